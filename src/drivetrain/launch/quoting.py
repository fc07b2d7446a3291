"""Values written so that the process at the other end gets exactly them."""

import shlex

from drivetrain.errors import DrivetrainError

__all__ = ["bash_word", "kubernetes_text", "require_text"]


def require_text(what: str, value: str) -> str:
    """``value``, if a file and a process can carry it.

    Raises:
        DrivetrainError: it holds a null character, or bytes that are no UTF-8.
    """
    if "\0" in value:
        raise DrivetrainError(f"{what}: {value!r} holds a null character, which no process can be given")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise DrivetrainError(f"{what}: {value!r} is not UTF-8 text, and a job file is; rename it") from None
    return value


def bash_word(value: str) -> str:
    """``value`` as one word of bash, on one line.

    Control characters are written as escapes: sbatch refuses a script that has CR LF anywhere, also inside quotes.
    """
    if all(character >= " " and character != "\x7f" for character in value):
        return shlex.quote(value)
    escaped = "".join(_escaped(character) for character in value)
    return f"$'{escaped}'"


def _escaped(character: str) -> str:
    if character in "\\'":
        return f"\\{character}"
    if character < " " or character == "\x7f":
        return f"\\x{ord(character):02x}"
    return character


def kubernetes_text(value: str) -> str:
    """``value`` for ``command``, ``args`` or ``env`` of a container.

    Kubernetes replaces ``$(NAME)`` there, and ``$$`` by ``$`` (API reference, Container v1 core, ``args``).
    """
    return value.replace("$", "$$")
