"""Ranks that torchrun started agree on one run directory before any of them trains."""

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import PrefixStore, TCPStore

from drivetrain.engine.parallel.process_group import Ranks
from drivetrain.errors import DrivetrainError, EnvironmentFault

__all__ = ["agree_on_run", "run_store"]

_TIMEOUT = timedelta(minutes=30)
"""Rank 0 may have a corpus to prepare first."""

_TOLD_WITHIN_S = 10.0


def run_store(ranks: Ranks) -> TCPStore:
    """Where the ranks agree; torchrun's agent serves it, or rank 0 where somebody else started the processes.

    Served by rank 0 it must live until the ranks have formed their group: torch then goes on with the same server. One
    that was closed in between would leave the others with a connection to nothing, or with the wrong server.
    """
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if address is None or port is None:
        raise EnvironmentFault("MASTER_ADDR and MASTER_PORT are not set; start the run with torchrun")
    # torchrun's agent serves the store itself unless told otherwise; then no rank may open the port again.
    return TCPStore(
        address,
        int(port),
        is_master=not _agent_serves() and ranks.rank == 0,
        timeout=_TIMEOUT,
        wait_for_workers=False,
        multi_tenant=True,
    )


def agree_on_run(ranks: Ranks, make_run: Callable[[], Path], tcp: TCPStore | None = None) -> Path:
    """Rank 0 makes the run; the others wait for its path.

    Where torchrun has restarted the ranks, they go on with the run that was made before.

    Args:
        tcp: :func:`run_store`, which the caller keeps; one of its own where torchrun's agent serves it.

    Raises:
        DrivetrainError: on every rank, with rank 0's message, when the run could not be made.
    """
    tcp = run_store(ranks) if tcp is None else tcp
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    store = PrefixStore(_prefix(attempt), tcp)
    if ranks.rank != 0:
        answer = store.get("run").decode()
        store.add("told", 1)
        if answer.startswith("error:"):
            raise DrivetrainError(answer.removeprefix("error:"))
        return Path(answer.removeprefix("path:"))
    try:
        path = _run_made_before(tcp, attempt) or make_run().resolve()
    except DrivetrainError as error:
        _tell(store, f"error:{error}", ranks)
        raise
    _tell(store, f"path:{path}", ranks)
    return path


def _agent_serves() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _tell(store: PrefixStore, answer: str, ranks: Ranks) -> None:
    """Rank 0's answer. Where it serves the store, this process may be about to end: the others are to have read it
    before, if they are still there."""
    store.set("run", answer)
    if _agent_serves():
        return
    give_up = time.monotonic() + _TOLD_WITHIN_S
    while store.add("told", 0) < ranks.world_size - 1 and time.monotonic() < give_up:
        time.sleep(0.02)


def _prefix(attempt: int) -> str:
    # A store may serve several jobs; of two with the same id torchrun makes one.
    job = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return f"drivetrain-run-{job}-{attempt}"


def _run_made_before(tcp: TCPStore, attempt: int) -> Path | None:
    """The newest run that this job has made; None where it made none, or the store has not outlived it.

    This attempt may have made one: torchrun does not count a start anew because machines came or went.
    """
    for number in range(attempt, -1, -1):
        store = PrefixStore(_prefix(number), tcp)
        if store.check(["run"]):
            answer = store.get("run").decode()
            if answer.startswith("path:"):
                return Path(answer.removeprefix("path:"))
    return None
