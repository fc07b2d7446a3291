"""Where a run came from: code, versions, machine, command. Collected once, at the start.

Devices and the data set's fingerprint are the engine's to add. Nothing secret is recorded: of the environment
only an allow-list, of git's working tree only a hash and names.
"""

import hashlib
import importlib.metadata
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drivetrain.measure.machine import cpu_model, usable_cores

__all__ = ["collect"]

_PACKAGES = (
    "drivetrain",
    "torch",
    "triton",
    "numpy",
    "pydantic",
    "orjson",
    "safetensors",
    "tokenizers",
    "pyarrow",
    "transformers",
)
_ENVIRONMENT = re.compile(
    r"(OMP_NUM_THREADS|MKL_NUM_THREADS|CUDA_VISIBLE_DEVICES|CUDA_DEVICE_MAX_CONNECTIONS|PYTORCH_[A-Z_]+|LD_PRELOAD|MALLOC_[A-Z_]+|"
    r"(NCCL|GLOO|TORCH|TORCHELASTIC|TORCHINDUCTOR|SLURM)_\w+|WORLD_SIZE|LOCAL_WORLD_SIZE|RANK|LOCAL_RANK)"
)
# SLURM_JWT is a credential; so may be anything that sounds like one.
_SECRET = re.compile(r"JWT|TOKEN|SECRET|PASS|KEY|AUTH|CREDENTIAL", re.IGNORECASE)
_MOST_UNTRACKED = 1000
_GIT_SECONDS = 10.0


def collect(argv: Sequence[str], repo_dir: Path | str) -> dict[str, Any]:
    """What can be known about this process's code and machine.

    Args:
        argv: the command line, as typed.
        repo_dir: a folder of the code whose git state is recorded.

    Returns:
        JSON: ``command, working_directory, git, packages, python, platform, host, cpu, memory_bytes,
        environment``. ``git`` is ``{commit, branch, dirty, diff_sha256, untracked, untracked_count,
        reason}``; all but ``reason`` are None where there is no repository. What cannot be found out is None.
    """
    system = os.uname()
    return {
        "command": list(argv),
        "working_directory": os.getcwd(),
        "git": _git(Path(repo_dir)),
        "packages": {name: _version(name) for name in _PACKAGES},
        "python": {"version": platform.python_version(), "implementation": sys.implementation.name},
        "platform": {"system": system.sysname, "release": system.release, "machine": system.machine},
        "host": socket.gethostname(),
        "cpu": {"model": cpu_model(), "usable_cores": usable_cores()},
        "memory_bytes": _memory_bytes(),
        "environment": _environment(os.environ),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name: environ[name]
        for name in sorted(environ)
        if _ENVIRONMENT.fullmatch(name) and not _SECRET.search(name)
    }


def _run_git(folder: Path, *arguments: str) -> bytes:
    """Output of one read-only git command; raises OSError or subprocess.SubprocessError."""
    # No optional locks: a git command of the user, at the same time, must not fail because of us.
    environ = os.environ | {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    return subprocess.run(
        ["git", "-C", str(folder), *arguments],
        check=True,
        capture_output=True,
        stdin=subprocess.DEVNULL,
        timeout=_GIT_SECONDS,
        env=environ,
    ).stdout


def _git(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = dict.fromkeys(
        ("commit", "branch", "dirty", "diff_sha256", "untracked", "untracked_count", "reason")
    )
    try:
        status = _run_git(
            folder, "status", "--porcelain=v2", "--branch", "-z", "--untracked-files=all", "--no-renames"
        )
        return state | _parse_status(status, folder)
    except FileNotFoundError:
        return state | {"reason": "git is not installed"}
    except subprocess.TimeoutExpired:
        return state | {"reason": f"git took longer than {_GIT_SECONDS:.0f} s"}
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines()
        return state | {"reason": lines[0] if lines else f"git ended with {error.returncode}"}
    except OSError as error:
        return state | {"reason": f"git could not be run: {error.strerror}"}


def _parse_status(status: bytes, folder: Path) -> dict[str, Any]:
    """Fields of git-status(1), porcelain format version 2, NUL-terminated."""
    commit = branch = None
    changed = False
    untracked: list[str] = []
    for entry in status.decode(errors="surrogateescape").split("\0"):
        if entry.startswith("# branch.oid "):
            commit = entry.removeprefix("# branch.oid ")
        elif entry.startswith("# branch.head "):
            branch = entry.removeprefix("# branch.head ")
        elif entry.startswith("? "):
            # A name need not be UTF-8, JSON must be.
            untracked.append(entry[2:].encode(errors="surrogateescape").decode(errors="replace"))
        elif entry[:2] in ("1 ", "2 ", "u "):
            changed = True
    if commit == "(initial)":
        return {"branch": branch, "dirty": True, "reason": "the repository has no commit yet"}
    diff_sha256 = None
    if changed:
        diff = _run_git(folder, "diff", "--no-ext-diff", "--no-textconv", "--no-color", "--binary", "HEAD")
        diff_sha256 = hashlib.sha256(diff).hexdigest()
    return {
        "commit": commit,
        "branch": None if branch == "(detached)" else branch,
        "dirty": changed or bool(untracked),
        "diff_sha256": diff_sha256,
        "untracked": sorted(untracked)[:_MOST_UNTRACKED],
        "untracked_count": len(untracked),
    }


def _memory_bytes() -> int | None:
    """Memory of the machine, or of the container where that is less."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdecimal() else total
