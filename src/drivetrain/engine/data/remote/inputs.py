"""Which files a URL stands for: a corpus of token ids, or an input of ``data prepare``; brought here, and held."""

import hashlib
import os
import re
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from drivetrain.archive.atomic import write_fault, write_json
from drivetrain.engine.data.progress import Progress, ProgressCallback, silent
from drivetrain.engine.data.remote.cache import Entry, RemoteCache
from drivetrain.engine.data.remote.store import PATIENT, Refused, RemoteFile, Retries, Store
from drivetrain.engine.data.remote.transfer import bring, is_here
from drivetrain.errors import DataError, EnvironmentFault

__all__ = ["Brought", "bring_corpus", "bring_input"]

BESIDE = (".meta.json", ".tokenizer.json")
"""What a corpus may have beside tokens and index."""
OF_IDS = (".parquet", ".arrow", ".mds", ".mds.gz", ".mds.zstd", ".mds.zst")
"""Files of a folder that may hold token ids."""
LIST_OF_FOLDER = "SHA256SUMS"
MOST_LIST_BYTES = 1 << 26
_LINE = re.compile(r"([0-9a-fA-F]{64})(?:\s+\*?(.+))?$")
Wanted = list[tuple[RemoteFile, str]]


@dataclass(frozen=True)
class Brought:
    """What a URL stands for, on this machine.

    Attributes:
        path: of the file or folder, or the prefix of the corpus.
        descriptor: open as long as it is in use, and may not be removed.
    """

    path: Path
    descriptor: int

    def close(self) -> None:
        """It may be removed from now on. Once."""
        os.close(self.descriptor)

    def hold_for(self, reader: object) -> None:
        """It is in use as long as ``reader`` lives."""
        weakref.finalize(reader, os.close, self.descriptor)


def bring_corpus(
    url: str, cache: RemoteCache, progress: ProgressCallback = silent, retries: Retries = PATIENT
) -> Brought:
    """The corpus that ``url`` names as ``data.data_path`` does: a prefix of ``.bin`` and ``.idx``, with its facts and
    its tokenizer, or a file of another tool, or a folder of Parquet.

    Raises:
        DataError: there is nothing, or its content is not what the list of checksums says.
        EnvironmentFault: fsspec is missing, the store does not answer, no room.
    """
    return _brought(url, cache, progress, retries, _files_of_corpus, "corpus")


def bring_input(
    url: str, cache: RemoteCache, progress: ProgressCallback = silent, retries: Retries = PATIENT
) -> Brought:
    """The file or folder that ``url`` names; raises as :func:`bring_corpus` does."""
    return _brought(url, cache, progress, retries, _file_or_folder, "input")


def _brought(
    url: str,
    cache: RemoteCache,
    progress: ProgressCallback,
    retries: Retries,
    files_of: Callable[["_Optional"], Wanted],
    kind: str,
) -> Brought:
    store = Store(url, retries, progress)
    # However often an address is signed anew, it is the same.
    url = store.url
    try:
        entry = cache.entry(url)
    except OSError as error:
        raise write_fault(cache.folder, error, f"{url} cannot be kept") from error
    try:
        with cache.only_one(entry, url, progress):
            _fill(store, entry, kind, cache, progress, files_of)
    except OSError as error:
        os.close(entry.descriptor)
        raise write_fault(entry.folder, error, f"{url} is not all here; what has come is kept") from error
    except BaseException:
        os.close(entry.descriptor)
        raise
    return Brought(entry.folder / kind / "files" / _name(store), entry.descriptor)


def _fill(
    store: Store,
    entry: Entry,
    kind: str,
    cache: RemoteCache,
    progress: ProgressCallback,
    files_of: Callable[["_Optional"], Wanted],
) -> None:
    """Bring what is not there, and remove what is not wanted any more; under the lock of the entry.

    Args:
        kind: folder in the entry: the same URL may be a corpus, and an input, of other files.
    """
    place = entry.folder / kind
    files, notes, whole = place / "files", place / "notes", place / "whole.json"
    optional = _Optional(store)
    try:
        wanted = files_of(optional)
        sums = _checksums(optional, [name for _, name in wanted], progress)
    except EnvironmentFault as error:
        # Somebody has brought all of it before, and nobody can tell whether it has changed.
        if not _all_here(place):
            raise
        progress(Progress(f"{error}; what was brought before is used"))
        return
    if optional.refused:
        progress(
            Progress(
                f"{store.url}: {', '.join(optional.refused)} cannot be looked for (the store refuses, as many do where "
                "nothing is): taken as not there"
            )
        )
    unversioned = [name for file, name in wanted if not file.versioned]
    if unversioned:
        progress(
            Progress(
                f"{store.url}: the store tells sizes alone of {', '.join(unversioned[:3])}: what was brought before is "
                "used as long as they are the same"
            )
        )
    notes.mkdir(parents=True, exist_ok=True)
    names = [name for _, name in wanted]
    here = all(is_here(files / name, notes / _note(name), file) for file, name in wanted)
    if not here or _names(whole) != names:
        cache.make_room(entry, store.url, sum(file.size for file, _ in wanted))
        whole.unlink(missing_ok=True)
        _remove_others(files, notes, names)
    for file, name in wanted:
        target = files / name
        target.parent.mkdir(parents=True, exist_ok=True)
        bring(store, file, target, notes / _note(name), sums.get(name), progress)
    if not whole.exists():
        write_json(whole, {"url": store.url, "names": names})


class _Optional:
    """A store that is asked for files that need not be there: one that is refused is as good as absent.

    Attributes:
        refused: their names.
        refusal: the first.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.refused: list[str] = []
        self.refusal: Refused | None = None

    def file(self, path: str) -> RemoteFile | None:
        """As :meth:`Store.file`, None where the store refuses."""
        try:
            return self.store.file(path)
        except Refused as error:
            self.refused.append(path.rpartition("/")[2])
            self.refusal = self.refusal or error
            return None


def _note(name: str) -> str:
    """Name of what is noted of a file: of one length, however deep the file lies."""
    return hashlib.sha256(name.encode()).hexdigest()[:32]


def _remove_others(files: Path, notes: Path, names: Sequence[str]) -> None:
    """Files that the store does not have any more, and what was made here of those that it had."""
    kept, noted = set(names), {_note(name) for name in names}
    for path in files.rglob("*"):
        if not path.is_dir() and path.relative_to(files).as_posix() not in kept:
            path.unlink()
    for path in notes.iterdir():
        if path.name.partition(".")[0] not in noted:
            path.unlink()


def _names(whole: Path) -> Sequence[str] | None:
    """Of all that was brought; None where it was not all."""
    import orjson

    try:
        names: Sequence[str] = orjson.loads(whole.read_bytes())["names"]
    except (OSError, ValueError, KeyError):
        return None
    return names


def _all_here(place: Path) -> bool:
    names = _names(place / "whole.json")
    return names is not None and all(
        is_here(place / "files" / name, place / "notes" / _note(name)) for name in names
    )


def _name(store: Store) -> str:
    """Of what the URL names, without the folders before it."""
    last = store.path.rstrip("/").rpartition("/")[2]
    name = re.split(r"[?#]", last)[0] or "files"
    if name in (".", ".."):
        raise DataError(f"{store.url} ends with {name!r}, which is no name of a file or folder")
    return name


def _parent(store: Store) -> str | None:
    """The folder of what the URL names; None of a whole bucket or web site: what is beside that is another one."""
    protocol, separator, path = store.path.rstrip("/").rpartition("://")
    return f"{protocol}{separator}{path.rpartition('/')[0]}" if "/" in path else None


def _files_of_corpus(optional: _Optional) -> Wanted:
    store = optional.store
    path, name = store.path.rstrip("/"), _name(store)
    if _parent(store) is None:
        index = tokens = None
    else:
        index, tokens = optional.file(f"{path}.idx"), optional.file(f"{path}.bin")
    if index is None or tokens is None:
        if index is not None or tokens is not None:
            if optional.refusal is not None:
                raise optional.refusal
            missing = ".bin" if tokens is None else ".idx"
            raise DataError(f"{store.url}{missing} does not exist: an indexed corpus has both .bin and .idx")
        wanted = _file_or_folder(optional)
        # A folder may hold much else.
        tables = [one for one in wanted if one[1] == name or one[1].endswith((*OF_IDS, ".json"))]
        if not any(one[1] == name or one[1].endswith(OF_IDS) for one in tables):
            raise DataError(
                f"{store.url} is no corpus: there is no {name}.bin with an {name}.idx, and in the folder no .parquet, "
                ".arrow or .mds; text becomes a corpus with `drivetrain data prepare`"
            )
        return [*tables, *_beside(optional)] if len(wanted) == 1 else tables
    wanted = [(tokens, f"{name}.bin"), (index, f"{name}.idx")]
    for suffix in BESIDE:
        file = optional.file(path + suffix)
        if file is not None:
            wanted.append((file, name + suffix))
    return [*wanted, *_beside(optional)]


def _beside(optional: _Optional) -> Wanted:
    """The tokenizer in the same folder, where there is one."""
    parent = _parent(optional.store)
    file = None if parent is None else optional.file(f"{parent}/tokenizer.json")
    return [] if file is None else [(file, "tokenizer.json")]


def _file_or_folder(optional: _Optional) -> Wanted:
    store = optional.store
    path, name = store.path.rstrip("/"), _name(store)
    file = store.file(path)
    if file is not None:
        return [(file, name)]
    found = store.files_below(path)
    if not found:
        # The files of a corpus may be there, where nobody may ask for them.
        if optional.refusal is not None:
            raise optional.refusal
        raise DataError(f"{store.url} does not exist, or holds nothing")
    inside = [(one, one.path.removeprefix(path).lstrip("/")) for one in found]
    for _, relative in inside:
        if ".." in relative.split("/"):
            raise DataError(f"{store.url} names a file outside of itself: {relative!r}")
    return [(one, f"{name}/{relative}") for one, relative in inside]


def _checksums(optional: _Optional, names: Sequence[str], progress: ProgressCallback) -> dict[str, str]:
    """SHA-256 of files by their names, as a list says: ``<path>.sha256``, or ``SHA256SUMS`` in the folder."""
    store = optional.store
    path, name, parent = store.path.rstrip("/"), _name(store), _parent(store)
    found: dict[str, str] = {}
    # Names in the list of a folder begin in that folder, and ours in the one above.
    lists = [(f"{path}/{LIST_OF_FOLDER}", f"{name}/")]
    if parent is not None:
        lists = [(f"{parent}/{LIST_OF_FOLDER}", ""), *lists, (f"{path}.sha256", "")]
    for list_path, above in lists:
        file = optional.file(list_path)
        if file is None:
            continue
        lines = 0
        if file.size > MOST_LIST_BYTES:
            raise DataError(f"{store.url}: {list_path} has {file.size:,} bytes and is no list of checksums")
        text = store.read(file, 0, file.size).decode("utf-8", "replace")
        for number, line in enumerate(text.splitlines(), start=1):
            match = _LINE.match(line.strip())
            if line.strip() and match is None:
                raise DataError(
                    f"{store.url}: {list_path}, line {number}: expected a SHA-256 and a name, found {line[:80]!r}"
                )
            if match is not None:
                listed = above + (match[2] if match[2] is not None else name).removeprefix("./")
                if found.setdefault(listed, match[1].lower()) != match[1].lower():
                    raise DataError(
                        f"{store.url}: {list_path}, line {number}: another SHA-256 of {listed!r} was given before"
                    )
                lines += listed in names
        if not lines:
            progress(
                Progress(
                    f"{store.url}: {list_path} names none of the files that are wanted: it verifies nothing"
                )
            )
    return {one: found[one] for one in names if one in found}
