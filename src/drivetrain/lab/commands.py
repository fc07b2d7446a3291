"""Calls of ``ip`` and ``tc``, and what their failures mean."""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from drivetrain.errors import EnvironmentFault

__all__ = ["call", "environment", "program"]

_PLACES = ("/usr/sbin", "/sbin", "/usr/local/sbin")
_LONGEST_S = 30.0


def environment() -> Mapping[str, str]:
    """This process's, with the folders of system programs on the path: not every shell of root has them."""
    path = os.environ.get("PATH", os.defpath)
    return {**os.environ, "PATH": os.pathsep.join([path, *_PLACES]), "LC_ALL": "C"}


def program(name: str) -> str | None:
    """Where a program is; None where it is not installed."""
    return shutil.which(name, path=environment()["PATH"])


def call(*arguments: str, refused: Sequence[str] = ()) -> str:
    """Run a command and return what it printed.

    Args:
        refused: words of an error that is no error here: what was to be removed has gone already.

    Raises:
        EnvironmentFault: the command is not there, or the system refused what it asked for.
    """
    try:
        done = subprocess.run(
            arguments,
            env=environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LONGEST_S,
            check=False,
        )
    except FileNotFoundError:
        raise EnvironmentFault(
            f"the network lab needs the program {arguments[0]}, which is not installed; it is part of iproute2 "
            "(ip, tc) or util-linux (setpriv, taskset)"
        ) from None
    except subprocess.TimeoutExpired:
        raise EnvironmentFault(
            f"the network lab: {' '.join(arguments)} did not end within {_LONGEST_S:g} s"
        ) from None
    if done.returncode != 0 and not any(word in done.stderr for word in refused):
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise EnvironmentFault(f"the network lab: the system refused `{' '.join(arguments)}`: {said}")
    return done.stdout
