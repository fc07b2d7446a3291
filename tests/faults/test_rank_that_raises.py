"""A rank that raises by itself: what it had begun is finished for the others, and then they learn that it has gone."""

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from drivetrain.config.layout import Layout
from drivetrain.engine.parallel.flat_collectives import CountedGroup
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.process_group import Ranks, join
from drivetrain.engine.parallel.traffic import Traffic
from drivetrain.errors import EnvironmentFault
from forkserver import CONTEXT
from rank_processes import free_port

RANKS, RAISING, BEGUN = 4, 3, 3
LIMIT_S = 120.0
"""Far below the hour that a collective may take in these runs; far above what a busy machine needs."""


def _begin(group: CountedGroup, kind: str) -> tuple[dist.Work, torch.Tensor, float]:
    """A collective, what it will leave, and the value of each of its elements then."""
    whole, rows = torch.ones(100_000), torch.ones(RANKS, 25_000)
    if kind == "all_reduce":
        return group.all_reduce(whole), whole, float(RANKS)
    if kind == "reduce_scatter":
        share = torch.zeros(25_000)
        return group.reduce_scatter(share, rows), share, float(RANKS)
    rows.zero_()
    return group.all_gather(rows, torch.ones(25_000)), rows, 1.0


def _rank(rank: int, port: int, kind: str, per_host: int | None, end: Any) -> None:
    """Begin some collectives, of which the others begin theirs late; says how many were finished and how it ended."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(RANKS),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
    )
    torch.set_num_threads(1)
    finished = 0
    try:
        with join(Ranks.from_environment(), "cpu", 60.0):
            mesh = Mesh.form(Layout(dp=RANKS), rank)
            if per_host is not None:
                mesh = mesh.in_levels(per_host, torch.device("cpu"))
            group = CountedGroup(mesh.group("dp"), "dp", Traffic(), mesh.hierarchy("dp"))
            work, _, _ = _begin(group, kind)
            work.wait()
            if rank != RAISING:
                # The raising rank is in the middle of its collectives by then, and of taking them down.
                time.sleep(0.5)
            begun = [_begin(group, kind) for _ in range(BEGUN)]
            if rank == RAISING:
                raise ValueError("a mistake of its own")
            for work, found, value in begun:
                work.wait()
                finished += bool((found == value).all())
            work, _, _ = _begin(group, kind)
            work.wait()
        end.send(("nothing", "", finished))
    except EnvironmentFault as error:
        end.send(("explained", str(error), finished))
    except BaseException as error:  # noqa: BLE001 - the test in the parent shows it
        end.send((type(error).__name__, str(error), finished))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "all_gather"])
@pytest.mark.parametrize("per_host", [None, 2], ids=["flat", "levels"])
def test_what_it_had_begun_is_finished_and_the_others_end_with_a_message(
    kind: str, per_host: int | None
) -> None:
    port, ends, processes = free_port(), [], []
    try:
        for rank in range(RANKS):
            here, there = CONTEXT.Pipe()
            process = CONTEXT.Process(target=_rank, args=(rank, port, kind, per_host, there))
            process.start()
            there.close()
            ends.append(here)
            processes.append(process)
        until = time.monotonic() + LIMIT_S
        for rank in range(RANKS):
            processes[rank].join(max(0.0, until - time.monotonic()))
            assert processes[rank].exitcode == 0, f"rank {rank} ended with {processes[rank].exitcode}"
            assert ends[rank].poll(), f"rank {rank} said nothing"
            how, text, count = ends[rank].recv()
            if rank == RAISING:
                assert (how, text) == ("ValueError", "a mistake of its own")
                continue
            assert how == "explained", f"rank {rank}: {how}: {text}"
            assert "another process of the run has ended or cannot be reached" in text
            assert count == BEGUN, "collectives that the raising rank had begun were not finished"
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
