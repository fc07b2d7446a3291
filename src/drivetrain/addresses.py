"""Addresses that are also keys: what is shown and kept of a URL that holds a password or a signature.

A signed address opens its file to whoever has it. So the command line takes its secret out before anything else sees
it, and leaves the whole address to this process and those it starts in ``ADDRESS_VARIABLE``, where whoever reads the
file looks for it. What is written anywhere is the address without its secret; it names the same file.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping, MutableMapping
from urllib.parse import unquote

from drivetrain.errors import DrivetrainError

__all__ = [
    "ADDRESS_VARIABLE",
    "PASSWORD_ADVICE",
    "holds_password",
    "is_withheld",
    "require_apart",
    "take_secrets",
    "whole_address",
    "withheld",
]

ADDRESS_VARIABLE = "DRIVETRAIN_SIGNED_URLS"
"""Environment variable: whole addresses, with their signatures, separated by spaces."""
PASSWORD_ADVICE = (
    "it would be shown in messages and kept in records; give it in fsspec's configuration files or environment "
    "variables, or as the protocol's own package reads it"
)
_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+://[^\s'\"<>]+")
# One that was taken out is refused as it would have been. Of github://owner:repository@branch it is none.
_PASSWORD = re.compile(r"(?<!github)://([^/\s]*:[^/\s]*|withheld)@")
# A name alone is no secret, but a token in its place is as long as one. Elsewhere: abfs://container@account.
_HTTP_TOKEN = re.compile(r"(?i:https?)://[^/?#\s]{16,}@")
_USER = re.compile(r"((?i:https?)://(?=[^/?#\s]{16,}@)|(?<!github)://(?=[^/\s]*:[^/\s]*@))[^/\s]*@")
_BAKED = re.compile(r"\.baked-[0-9a-f]{12}$")
"""What the name of a corpus ends with to whose documents a transform was applied; it stands behind the query."""
_WITHHELD = "withheld"
_SIGNED = f"signature={_WITHHELD}"
# What a sentence has behind an address: "https://h/x?signature=withheld: is not kept".
_BEHIND = re.compile(rf"(?<={_SIGNED})[:,;)]+$")
_SECRET = re.compile(
    r"signature|token(?!i[sz]|s$)|secret|passw|pwd$|credential|auth(?!or)|authori[sz]ation|api[-_]?key|access[-_]?key|"
    r"rlkey|resourcekey|jwt|hmac|^(sig|sign|key|code|pass|pw|md5|ticket|delegation|hdnts|hdnea|hdntl|__gda__)$"
)
"""Names of parameters, in small letters, that are credentials."""
_COMPANION = re.compile(
    r"x-(amz|goog|oss|cos|ms)-.*|expires?|policy|key-pair-id|googleaccessid|q-.*|"
    r"s[vprest]|srt|spr|sip|sks|skt|ske|skv|sktid|skoid|saoid|suoid|scid|sdd"
)
"""Names of parameters that say how, and for how long, an address is signed; they change when it is signed anew."""
_CONTENT = re.compile(
    r"version(-?id)?|generation|(file|object|doc|export)?-?(id|name|path)|file|path|key-?name|ref"
)
"""Names of parameters that say which file is meant, however long their values are."""
_LONG = re.compile(r"(?=[^&]*[0-9])(?=[^&]*[A-Za-z])[A-Za-z0-9+/=_.~%-]{24,}")
_DIGEST = re.compile(rf"{_WITHHELD}-[0-9a-f]{{12}}")
_INNER_NAME = re.compile(r"([\w.-]+)=")


def holds_password(text: str) -> bool:
    """Whether a URL in ``text`` is written with one, as ``https://name:password@host/x`` or ``https://token@host/x``."""
    return any(_PASSWORD.search(url[0]) or _HTTP_TOKEN.search(url[0]) for url in _URL.finditer(text))


def withheld(text: str) -> str:
    """``text``, in which URLs keep no secret.

    By this rule: before a host, ``name:password@`` (of HTTP: a token, too) becomes ``withheld@``. Where a
    parameter behind ``?`` or ``#`` is named as credentials are, it, and those that say how an address is signed, give
    way to ``signature=withheld``. Of any other whose value is as long as a key, and whose name says no version or
    file, a digest of 48 bits stays, so that other values remain other addresses. The rule leaves its own result alone.
    """
    return _URL.sub(lambda match: _without_secrets(match[0]), text)


def _without_secrets(url: str) -> str:
    behind = _BAKED.search(url) or _BEHIND.search(url)
    tail = behind[0] if behind else ""
    url = _USER.sub(rf"\g<1>{_WITHHELD}@", url[: len(url) - len(tail)])
    address, sharp, fragment = url.partition("#")
    address, mark, query = address.partition("?")
    parts = [address]
    for sign, parameters in ((mark, query), (sharp, fragment)):
        if sign:
            # A fragment may be a heading, and a query a single word.
            parts.append(sign + (_kept(parameters) if "=" in parameters else parameters))
    return "".join(parts) + tail


def _kept(parameters: str) -> str:
    pieces = re.split("([&;])", parameters)
    pairs = [one.partition("=") for one in pieces[::2]]
    names = [unquote(name).lower() for name, _, _ in pairs]
    if any(map(_SECRET.search, names)):
        kept = [
            pair
            for pair, name in zip(pairs, names, strict=True)
            if not _SECRET.search(name) and not _COMPANION.fullmatch(name)
        ]
        return "&".join([*map(_one, kept), _SIGNED])
    return "".join(
        _one(piece.partition("=")) if number % 2 == 0 else piece for number, piece in enumerate(pieces)
    )


def _one(pair: tuple[str, str, str]) -> str:
    name, equals, value = pair
    is_key = _LONG.fullmatch(value) and not _CONTENT.fullmatch(unquote(name).lower())
    if (is_key or _holds_another(value)) and not _DIGEST.fullmatch(value):
        value = f"{_WITHHELD}-{hashlib.sha256(value.encode()).hexdigest()[:12]}"
    return f"{name}{equals}{value}"


def _holds_another(value: str) -> bool:
    """Whether the value of a parameter is an address, or parameters, with a secret of their own."""
    inner = unquote(unquote(value))
    # A password that is not encoded was taken out before.
    hides_password = holds_password(inner) and not holds_password(value)
    return hides_password or any(_SECRET.search(name.lower()) for name in _INNER_NAME.findall(inner))


def is_withheld(url: str) -> bool:
    """Whether ``url`` lacks a secret that :func:`withheld` took out of it."""
    return re.search(rf"[?&#]{_SIGNED}(?=[&#.]|$)|=withheld-[0-9a-f]{{12}}(?=[&;#.]|$)", url) is not None


def whole_address(url: str, environment: Mapping[str, str]) -> str | None:
    """``url`` as it can be asked for: with the secret that was taken out of it, from ``ADDRESS_VARIABLE``.

    None: it lacks one that is not there.
    """
    if not is_withheld(url):
        return url
    known = environment.get(ADDRESS_VARIABLE, "").split()
    # Of several that were signed one after the other, the last.
    shown = withheld(url)
    return next((one for one in reversed(known) if withheld(one) == shown), None)


def require_apart(addresses: Iterable[str]) -> None:
    """Nothing, where no two of ``addresses``, of which something reads all, differ in what is withheld alone.

    Raises:
        DrivetrainError: two do: kept without it they would be one, and one of them would be read for both.
    """
    seen: dict[str, str] = {}
    for one in addresses:
        shown = withheld(one)
        if seen.setdefault(shown, one) != one and one != shown:
            raise DrivetrainError(
                f"{shown}: two addresses differ in what is withheld alone, and would be taken for one: download one of "
                "them, and give its path"
            )


def take_secrets(words: list[str], environment: MutableMapping[str, str]) -> None:
    """Put the whole addresses in ``words`` into ``environment``, and leave in ``words`` what may be shown.

    Raises:
        DrivetrainError: two of the addresses cannot be told apart then.
    """
    given: list[str] = []
    for number, word in enumerate(words):
        shown = withheld(word)
        # The text of a prompt is what a model reads, and kept nowhere.
        is_text = word.startswith("--prompt=") or (number > 0 and words[number - 1] == "--prompt")
        if shown == word or is_text:
            continue
        words[number] = shown
        whole = [
            _BAKED.sub("", url[0])
            for url in _URL.finditer(word)
            if is_withheld(withheld(url[0])) and not holds_password(url[0])
        ]
        given.extend(whole)
        before = environment.get(ADDRESS_VARIABLE, "").split()
        environment[ADDRESS_VARIABLE] = " ".join([*before, *whole]).strip()
    require_apart(given)
