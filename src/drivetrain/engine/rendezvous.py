"""Ranks that torchrun started agree on one run directory before any of them trains."""

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import PrefixStore, TCPStore

from drivetrain.engine.parallel.process_group import Ranks
from drivetrain.errors import DrivetrainError, EnvironmentFault

__all__ = ["agree_on_run"]

_TIMEOUT = timedelta(minutes=30)
"""Rank 0 may have a corpus to prepare first."""


def agree_on_run(ranks: Ranks, make_run: Callable[[], Path]) -> Path:
    """Rank 0 makes the run; the others wait for its path, through the agent's own store.

    Where torchrun has restarted the ranks, they go on with the run that was made before.

    Raises:
        DrivetrainError: on every rank, with rank 0's message, when the run could not be made.
    """
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if address is None or port is None:
        raise EnvironmentFault("MASTER_ADDR and MASTER_PORT are not set; start the run with torchrun")
    # torchrun's agent serves the store itself unless told otherwise; then no rank may open the port again.
    agent_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    tcp = TCPStore(
        address,
        int(port),
        is_master=not agent_serves and ranks.rank == 0,
        timeout=_TIMEOUT,
        wait_for_workers=False,
    )
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    store = PrefixStore(_prefix(attempt), tcp)
    if ranks.rank != 0:
        answer = store.get("run").decode()
        if answer.startswith("error:"):
            raise DrivetrainError(answer.removeprefix("error:"))
        return Path(answer.removeprefix("path:"))
    try:
        path = _run_made_before(tcp, attempt) or make_run().resolve()
    except DrivetrainError as error:
        store.set("run", f"error:{error}")
        raise
    store.set("run", f"path:{path}")
    return path


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
