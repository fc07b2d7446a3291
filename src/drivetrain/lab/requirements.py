"""What this machine lacks for a lab, as far as that can be told without making one."""

import os
import sys

from drivetrain.errors import EnvironmentFault
from drivetrain.lab.commands import program

__all__ = ["lacking", "require_means"]

_PROGRAMS = {"ip": "iproute2", "tc": "iproute2", "setpriv": "util-linux", "taskset": "util-linux"}


def lacking() -> str | None:
    """In words: another system, no root, a program; None: nothing of these."""
    if sys.platform != "linux":
        return f"the network lab needs Linux, and this is {sys.platform}"
    if os.geteuid() != 0:
        return (
            f"the network lab makes network namespaces, which takes root, and this is user {os.geteuid()}; run it as "
            "root"
        )
    absent = [name for name in _PROGRAMS if program(name) is None]
    if absent:
        packages = " and ".join(dict.fromkeys(_PROGRAMS[name] for name in absent))
        return f"the network lab needs {', '.join(absent)}, not installed here; install {packages}"
    return None


def require_means() -> None:
    """Raise EnvironmentFault where this machine cannot have a lab."""
    reason = lacking()
    if reason is not None:
        raise EnvironmentFault(reason)
