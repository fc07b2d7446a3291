"""The folder that holds a run's checkpoints: names, the newest sound one, pruning, what crashes leave behind.

Names in it::

    step-00000120                     a checkpoint
    .tmp-step-00000120-<pid>-<hex>    one that is being written by process <pid>
    .old-step-00000120-<pid>-<hex>    one whose place is just being taken by a new one of the same step
    damaged-step-00000120             one that was found damaged and set aside
"""

import os
import re
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from drivetrain.archive.atomic import sync_folder
from drivetrain.engine.checkpoint.manifest import damage
from drivetrain.errors import CheckpointError

__all__ = [
    "find_latest",
    "new_temporary",
    "prune",
    "publish",
    "remove_leftovers",
    "set_aside",
    "step_name",
]

_STEP = re.compile(r"step-(\d{8,})")
_LEFTOVER = re.compile(r"\.(tmp|old)-(step-\d{8,})-(\d+)-[0-9a-f]+")


def step_name(step: int) -> str:
    """Name of the checkpoint of ``step``."""
    return f"step-{step:08d}"


def _checkpoints(folder: Path) -> dict[int, Path]:
    """Checkpoints in ``folder`` by step, newest first, sound or not."""
    if not folder.is_dir():
        return {}
    found = {int(match[1]): path for path in folder.iterdir() if (match := _STEP.fullmatch(path.name))}
    return dict(sorted(found.items(), reverse=True))


def find_latest(folder: Path, on_damaged: Callable[[Path, str], None]) -> Path | None:
    """The newest sound checkpoint in ``folder``; None if it has no checkpoint at all. Changes nothing.

    Args:
        on_damaged: called with path and reason for each newer one that is damaged and so passed over.

    Raises:
        CheckpointError: there are checkpoints, and every one is damaged.
    """
    reasons = {}
    for path in _checkpoints(folder).values():
        reason = damage(path)
        if reason is None:
            return path
        reasons[path] = reason
        on_damaged(path, reason)
    if not reasons:
        return None
    raise CheckpointError(
        f"every checkpoint in {folder} is damaged; start a new run, or restore one from a copy:\n"
        + "\n".join(f"  {path.name}: {reason}" for path, reason in reasons.items())
    )


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint so that it is neither found nor counted again; returns its new path."""
    target = path.with_name(f"damaged-{path.name}")
    if target.exists():
        target = path.with_name(f"damaged-{path.name}-{secrets.token_hex(4)}")
    path.rename(target)
    sync_folder(path.parent)
    return target


def prune(folder: Path, step: int, keep_latest_k: int) -> None:
    """Remove all but the newest ``keep_latest_k`` checkpoints up to ``step``, which itself is always kept.

    One whose files have the wrong sizes takes up no place among those kept.
    """
    sound = [
        path for at, path in _checkpoints(folder).items() if at <= step and not damage(path, contents=False)
    ]
    for path in sound[max(1, keep_latest_k) :]:
        _remove(path)


def _remove(path: Path) -> None:
    # Out of the way first: a crash in the middle of rmtree must not leave half a checkpoint under its name.
    doomed = path.with_name(f".tmp-{path.name}-{os.getpid()}-{secrets.token_hex(4)}")
    path.rename(doomed)
    shutil.rmtree(doomed)


def new_temporary(folder: Path, step: int) -> Path:
    """Make the folder in which the checkpoint of ``step`` is written, and remove older attempts at it."""
    for path in _attempts(folder, step):
        shutil.rmtree(path)
    temporary = folder / f".tmp-{step_name(step)}-{os.getpid()}-{secrets.token_hex(4)}"
    temporary.mkdir()
    return temporary


def _attempts(folder: Path, step: int) -> list[Path]:
    return sorted(folder.glob(f".tmp-{step_name(step)}-*"))


def publish(temporary: Path, final: Path) -> None:
    """Give a complete checkpoint its name, in place of an older one of the same step."""
    old = None
    if final.exists():
        old = final.with_name(f".old-{final.name}-{os.getpid()}-{secrets.token_hex(4)}")
        final.rename(old)
    try:
        temporary.rename(final)
    except OSError:
        if old is not None:
            old.rename(final)
        raise
    sync_folder(final.parent)
    if old is not None:
        shutil.rmtree(old)


def remove_leftovers(folder: Path) -> list[Path]:
    """Clean up after processes that died while saving; call it on one rank, before the first save.

    What belongs to a process that is alive is left alone. A checkpoint that was about to be replaced, and
    was not, gets its name back.

    Returns:
        The paths that are gone.
    """
    gone = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        match = _LEFTOVER.fullmatch(path.name)
        if match is None or _is_another_live_process(int(match[3])):
            continue
        original = folder / match[2]
        if match[1] == "old" and not original.exists():
            path.rename(original)
        else:
            shutil.rmtree(path)
        gone.append(path)
    return gone


def _is_another_live_process(pid: int) -> bool:
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
