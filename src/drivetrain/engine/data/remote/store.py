"""What a URL names, read through fsspec, with as many attempts as a network needs."""

import hashlib
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

from drivetrain.addresses import (
    ADDRESS_VARIABLE,
    PASSWORD_ADVICE,
    holds_password,
    is_withheld,
    whole_address,
    withheld,
)
from drivetrain.engine.data.progress import Progress, ProgressCallback, silent
from drivetrain.engine.data.remote.refusals import (
    refusal_in,
    status_of,
    traceable,
    what_to_set,
    words_of,
)
from drivetrain.errors import DataError, EnvironmentFault

__all__ = ["PATIENT", "Refused", "RemoteFile", "Retries", "Store", "is_url"]

Answer = TypeVar("Answer")
_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+://")
_IDENTITY = (
    *("ETag", "etag", "checksum", "md5", "crc32c", "Content-MD5", "Digest", "version_id", "sha", "blob_id"),
    *("LastModified", "Last-Modified", "mtime", "created"),
)
"""Keys under which fsspec's file systems tell versions of a file apart; which of them are there is theirs to say."""
_MISSING = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
_ABSENT = (404, 410)
_TRY_AGAIN = (408, 425, 429)
"""Answers of HTTP below 500 that may be others the next time."""


class Refused(EnvironmentFault):
    """The store answers, and does not let us read: credentials are missing, wrong or expired."""


def is_url(path: object) -> bool:
    """Whether ``path`` names something by a protocol, as ``s3://bucket/corpora/mine`` does."""
    return isinstance(path, str) and _URL.match(path) is not None


@dataclass(frozen=True)
class Retries:
    """How often something is tried, and how long is waited in between: each time twice as long.

    Attributes:
        attempts: tries, at least 1.
        first_s, most_s: seconds before the second try, and at most.
        sleep: waits.
    """

    attempts: int = 6
    first_s: float = 0.5
    most_s: float = 30.0
    sleep: Callable[[float], None] = time.sleep


PATIENT = Retries()
"""A request that fails each time is given up after a quarter of a minute."""


@dataclass(frozen=True)
class RemoteFile:
    """A file of a store.

    Attributes:
        path: as the store names it.
        size: bytes.
        identity: changes with the content, as far as the store tells.
        versioned: the store tells more than the size.
    """

    path: str
    size: int
    identity: str
    versioned: bool = True


class Store:
    """The file system of a URL.

    Args:
        url: of a file, a folder or a prefix. Where its signature was withheld, the environment has it, or every
            request raises Refused.
        retries: for each request.
        progress: told of requests that are tried again.
    Attributes:
        url: as it was given, without the secret of a signed address.
        path: of the URL within the store; not to be shown.
    Raises:
        EnvironmentFault: fsspec, or the package for this protocol, is not installed.
        DataError: an unknown protocol, a password in the URL.
    """

    def __init__(self, url: str, retries: Retries = PATIENT, progress: ProgressCallback = silent) -> None:
        self.url = withheld(url)
        self._retries = retries
        self._progress = progress
        if holds_password(url):
            raise DataError(f"a URL holds a password: {PASSWORD_ADVICE}")
        address = whole_address(url, os.environ)
        url = self.url
        self._lacks_signature = address is None
        self._secret = ""
        try:
            from fsspec.core import url_to_fs
        except ImportError as error:
            raise EnvironmentFault(
                f"{url} is read through fsspec: pip install 'drivetrain[remote]'"
            ) from error
        try:
            self._files, path = url_to_fs(address or url)
        except ImportError as error:
            raise EnvironmentFault(f"{url} cannot be read: {error}") from error
        except ValueError as error:
            raise DataError(f"{url} cannot be read: {withheld(str(error))}") from traceable(error)
        except FileNotFoundError as error:
            raise DataError(f"{url} does not exist") from traceable(error)
        # Some file systems connect, or open an archive, when they are made.
        except Exception as error:
            fault = EnvironmentFault(f"{url} cannot be read: {words_of(error)}")
            refusal = refusal_in(error)
            if refusal is not None:
                fault = self._refused("opening it", refusal)
            if traceable(error) is None:
                raise fault from None
            raise fault from error
        # What signs an address signs what is beside it, or nothing: it belongs to none of the names. Nor does any query
        # of HTTP: a server that ignores it would give the file itself for whatever stands behind.
        self._query = ""
        if is_withheld(url) or urlsplit(path).scheme.lower() in ("http", "https"):
            path, mark, query = path.partition("?")
            self._query = mark + query
            self._secret = query if is_withheld(url) else ""
            if mark and path.endswith("/"):
                path, self._query = path.rstrip("/"), f"/{self._query}"
        self.path = path

    def _refused(self, what: str, error: BaseException) -> Refused:
        words = self._shown(words_of(error))
        return Refused(f"{self.url}: {what} is refused ({words}): {what_to_set(self.url)}")

    def _shown(self, words: str) -> str:
        """Without the secret, where a message names the file and not its whole address."""
        return words.replace(self._secret, "signature=withheld") if self._secret else words

    def _cause(self, error: BaseException) -> BaseException | None:
        return traceable(error, self._secret)

    def _asked(self, path: str) -> str:
        return path + self._query

    def file(self, path: str) -> RemoteFile | None:
        """The file at ``path``; None where there is none, or a folder.

        Raises:
            Refused: the store does not say; some do not say either that there is none.
            EnvironmentFault: it does not answer.
        """
        try:
            found = self._tried(lambda: self._files.info(self._asked(path)), f"looking for {path}")
        except _MISSING:
            return None
        if found.get("type", "file") != "file":
            return None
        # An address that ends with a slash before its query may well be of a file.
        if _is_page_of_folder(found) and not (self._query and found.get("mimetype") != "text/html"):
            return None
        return _file(path, found, self.url)

    def file_now(self, path: str) -> RemoteFile | None:
        """As :meth:`file`, of what the store tells now. A listing may tell the version of a file in another way."""
        self._files.invalidate_cache()
        return self.file(path)

    def files_below(self, path: str) -> list[RemoteFile]:
        """All files below a folder, by path; none where there is no such folder.

        Raises:
            EnvironmentFault: it, or a folder in it, could not be listed.
        """
        if self._query:
            # Whatever the links on a page are, they are not signed, and what a query chooses is no folder.
            return []
        try:
            found = self._found_below(path)
        except _MISSING:
            return []
        files = []
        for one in sorted(found):
            # A store without folders may keep an empty object in place of one.
            if one == path or one.endswith("/"):
                continue
            known = found[one]
            file = _file(one, known, self.url) if known.get("size") is not None else self.file(one)
            if file is not None:
                files.append(file)
        return files

    def _found_below(self, path: str) -> dict[str, dict[str, Any]]:
        """What is told of each file below a folder. fsspec's own search leaves out what it fails to list."""
        if _finds_by_itself(self._files):
            found: dict[str, dict[str, Any]] = self._tried(
                lambda: self._files.find(path, detail=True), f"listing {path}"
            )
            return found
        found, folders, seen = {}, [path], {path}
        while folders:
            here = folders.pop()
            for one in self._listed(here, top=here == path):
                name = str(one["name"])
                # Pages of folders have links by which they are sorted.
                if "://" in name and "?" in name:
                    continue
                if one.get("type") != "directory":
                    found[name] = one
                elif name.rstrip("/") not in seen:
                    seen.add(name.rstrip("/"))
                    folders.append(name.rstrip("/"))
        return found

    def _listed(self, folder: str, *, top: bool) -> list[dict[str, Any]]:
        try:
            listed: list[dict[str, Any]] = self._tried(
                lambda: self._files.ls(folder, detail=True), f"listing {folder}"
            )
        except _MISSING as error:
            if top:
                raise
            raise DataError(f"{self.url}: {folder} was there, and is not any more") from self._cause(error)
        return listed

    def read(self, file: RemoteFile, start: int, end: int) -> bytes:
        """Bytes ``[start, end)`` of a file.

        Raises:
            EnvironmentFault: they did not come in as many attempts as there are.
            DataError: the file has gone.
        """

        def attempt() -> bytes:
            data = bytes(self._files.cat_file(self._asked(file.path), start=start, end=end))
            if len(data) > end - start:
                raise NotImplementedError("the server sends all of a file where a part is asked for")
            if len(data) != end - start:
                raise OSError(f"{len(data):,} bytes came instead of {end - start:,}")
            return data

        try:
            return self._tried(attempt, f"reading {file.path} from byte {start:,} on")
        except (FileNotFoundError, IsADirectoryError) as error:
            raise DataError(f"{self.url}: {file.path} was there, and is not any more") from self._cause(error)

    def _tried(self, action: Callable[[], Answer], what: str) -> Answer:
        if self._lacks_signature:
            raise Refused(
                f"{self.url}: its signature is not kept; give the address again, whole, in the environment variable "
                f"{ADDRESS_VARIABLE}"
            )
        wait = self._retries.first_s
        for attempt in range(1, self._retries.attempts + 1):
            try:
                return action()
            # Of whatever class: fsspec hands on what the library of a protocol raises.
            except Exception as raised:
                # Before all else: fsspec says of HTTP that there is no such file whatever the answer was.
                refusal = refusal_in(raised)
                if refusal is not None:
                    raise self._refused(what, refusal) from self._cause(raised)
                reason, words = _reason(raised)
                words = self._shown(words)
                if issubclass(reason, _MISSING):
                    raise
                if issubclass(reason, NotImplementedError | ImportError) or _is_final(raised):
                    # Of a name that is not there, some servers say that the query is no good.
                    fault = Refused if self._query and status_of(raised) == 400 else EnvironmentFault
                    raise fault(f"{self.url}: {what} is not possible: {words}") from self._cause(raised)
                if attempt == self._retries.attempts:
                    raise EnvironmentFault(
                        f"{self.url}: {what} failed {attempt} times, the last time with: {words}; what has "
                        "come so far is kept, and the same command goes on from there"
                    ) from self._cause(raised)
                self._progress(Progress(f"{what} failed ({words}); trying again in {wait:g} s"))
            self._retries.sleep(wait)
            wait = min(2 * wait, self._retries.most_s)
        raise AssertionError("at least one attempt is made")


def _reason(error: Exception) -> tuple[type[BaseException], str]:
    """What failed, its class and in words: fsspec says of HTTP that there is no such file whatever went wrong."""
    cause = error.__cause__
    if isinstance(error, FileNotFoundError) and cause is not None and not isinstance(cause, _MISSING):
        of_network = isinstance(cause, OSError) or type(cause).__module__.startswith("aiohttp")
        if of_network and status_of(cause) not in _ABSENT:
            return type(cause), words_of(cause)
    return type(error), words_of(error)


def _is_final(error: Exception) -> bool:
    """Whether the same request will have the same answer."""
    status = status_of(error)
    return status is not None and 400 <= status < 500 and status not in _TRY_AGAIN


def _is_page_of_folder(info: dict[str, Any]) -> bool:
    """Whether HTTP answers with the page of a folder, or leads to one: its address ends with a slash."""
    address = info.get("url")
    return isinstance(address, str) and urlsplit(address).path.rpartition("/")[2] == ""


def _finds_by_itself(files: Any) -> bool:
    from fsspec import AbstractFileSystem
    from fsspec.asyn import AsyncFileSystem

    general = AbstractFileSystem, AsyncFileSystem
    return any(
        "find" in vars(one) or "_find" in vars(one) for one in type(files).__mro__ if one not in general
    )


def _file(path: str, info: dict[str, Any], url: str) -> RemoteFile:
    size = info.get("size")
    if size is None:
        raise DataError(f"{url}: the size of {path} is not told; it cannot be read in parts")
    known = [f"{key}={info[key]}" for key in _IDENTITY if info.get(key) is not None]
    identity = hashlib.sha256("\n".join([str(size), *known]).encode()).hexdigest()
    return RemoteFile(path, int(size), identity, bool(known))
