"""A process of a run that is killed in the middle of a collective: the others end within seconds, and say where."""

import os
import re
import signal
import time
from typing import Any

import pytest
import torch

from drivetrain.config.layout import Layout
from drivetrain.engine.parallel.flat_collectives import CountedGroup
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.process_group import Ranks, join
from drivetrain.engine.parallel.traffic import Traffic
from drivetrain.errors import EnvironmentFault
from forkserver import CONTEXT
from rank_processes import free_port
from runs_on_the_spot import Tiny

RANKS = 4
DYING = 3
LIMIT_S = 150.0
"""Far below the hour that a collective may take in these runs; far above what a busy machine needs."""


def _rank(rank: int, port: int, kind: str, per_host: int | None, end: Any) -> None:
    """Collectives without end, several under way; says how it ended."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(RANKS),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
    )
    torch.set_num_threads(1)
    try:
        with join(Ranks.from_environment(), "cpu", 60.0):
            mesh = Mesh.form(Layout(dp=RANKS), rank)
            if per_host is not None:
                mesh = mesh.in_levels(per_host, torch.device("cpu"))
            group = CountedGroup(mesh.group("dp"), "dp", Traffic(), mesh.hierarchy("dp"))
            number = 0
            while True:
                if number == 5 and rank == DYING:
                    os.kill(os.getpid(), signal.SIGKILL)
                number += 1
                works = []
                for _ in range(3):
                    whole, rows = torch.ones(100_000), torch.ones(RANKS, 25_000)
                    works.append(
                        {
                            "all_reduce": lambda whole=whole: group.all_reduce(whole),
                            "reduce_scatter": lambda rows=rows: group.reduce_scatter(
                                rows.new_empty(25_000), rows
                            ),
                            "all_gather": lambda rows=rows: group.all_gather(rows, rows.new_ones(25_000)),
                        }[kind]()
                    )
                for work in works:
                    work.wait()
    except EnvironmentFault as error:
        end.send(("explained", str(error)))
    except BaseException as error:  # noqa: BLE001 - the test in the parent shows it
        end.send((type(error).__name__, str(error)))


@pytest.mark.parametrize(
    ("kind", "per_host"),
    [
        ("reduce_scatter", None),
        ("all_reduce", 2),
        *(
            pytest.param(kind, per_host, marks=pytest.mark.long)
            for kind, per_host in (
                ("all_reduce", None),
                ("all_gather", None),
                ("reduce_scatter", 2),
                ("all_gather", 2),
            )
        ),
    ],
)
def test_the_others_end_soon_and_name_the_collective(kind: str, per_host: int | None) -> None:
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
            assert processes[rank].exitcode is not None, f"rank {rank} hangs"
            if rank == DYING:
                assert processes[rank].exitcode == -signal.SIGKILL
                continue
            assert ends[rank].poll(), f"rank {rank} ended with {processes[rank].exitcode} and said nothing"
            how, text = ends[rank].recv()
            assert how == "explained", f"rank {rank}: {how}: {text}"
            assert "another process of the run has ended or cannot be reached" in text
            named = f"in the {kind.replace('_', '-')} of dp over ranks 0, 1, 2, 3"
            if per_host is not None:
                named = r"in the (reduce-scatter|all-reduce|all-gather) of dp "
                named += r"(inside the machine( again)?|between machines) over ranks \d, \d"
            assert re.search(named, text), text
            assert "\n" not in text
            assert processes[rank].exitcode == 0, "it did not end in order"
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 2])
def test_a_run_in_levels_ends_with_a_message_on_each_of_its_ranks(tiny: Tiny, stage: int) -> None:
    """Four processes that a job manager started, two on each of two machines: nobody but they can tell."""
    port, processes = free_port(), []
    for rank in range(RANKS):
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % 2),
            "WORLD_SIZE": str(RANKS),
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        processes.append(
            tiny.start(
                "train",
                str(tiny.file),
                "training.train_iters=100000",
                "training.micro_batch_size=1",
                "training.global_batch_size=8",
                "overlap.bucket_size_mb=0.02",
                "overlap.hierarchical_collectives=true",
                f"parallelism.zero_stage={stage}",
                environment=environment,
            )
        )
    try:
        until = time.monotonic() + 2 * LIMIT_S
        while not any(path.stat().st_size > 2000 for path in tiny.runs.glob("*/segments/0000/metrics.jsonl")):
            assert time.monotonic() < until, "it never trained"
            assert [process.poll() for process in processes] == [None] * RANKS, processes[0].communicate()
            time.sleep(0.05)
        metrics = next(tiny.runs.glob("*/segments/0000/metrics.jsonl")).read_text()
        assert "comm/dp_across_bytes" in metrics or "comm/dp_shard_across_bytes" in metrics, (
            "nothing went in levels"
        )
        processes[DYING].kill()
        for rank, process in enumerate(processes):
            _, errors = process.communicate(timeout=LIMIT_S)
            message = errors.decode()
            if rank == DYING:
                continue
            assert process.returncode == 2, message
            assert message.count("error:") == 1, message
            assert "another process of the run has ended or cannot be reached" in message
            assert "Traceback" not in message
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
