"""A finished file is handed to the scheduler's own program."""

import shutil
import subprocess
from collections.abc import Sequence

from drivetrain.errors import EnvironmentFault

__all__ = ["require_program", "submit"]


def require_program(name: str) -> None:
    """Raises EnvironmentFault where ``name`` is not on PATH."""
    if shutil.which(name) is None:
        raise EnvironmentFault(
            f"--submit needs {name}, which is not on PATH; run this where {name} is, or leave --submit out and take "
            "the file there"
        )


def submit(command: Sequence[str]) -> str:
    """Run ``command`` and return what it printed, without line ends around it.

    Raises:
        EnvironmentFault: it failed; with its own words.
    """
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        words = (done.stderr or done.stdout).strip() or "it said nothing"
        raise EnvironmentFault(
            f"{command[0]} refused the job (exit code {done.returncode}): {words}; the file was written and is there"
        )
    return done.stdout.strip()
