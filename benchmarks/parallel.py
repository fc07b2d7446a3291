"""Data parallelism against torch's own, used by hand: the same collectives and bytes, and no more time for a step.

Two ranks on this machine, one thread each, over gloo. In the same two processes live our side and its peers, each with
a copy of one model; they take turns of a few steps in the order A B C C B A. A step is forward, backward, reduction and
fused AdamW; clipping is left out on all sides. What travels is counted by one observer for all sides, a dispatch mode
that sees every ``c10d`` operator, in a step that is not timed.

The time claim is that our step takes at most 1.05 times the peer's: ``ratio = peer / ours`` is to be at least
1/1.05 = 0.952, and the claim is sure where ``low`` is too. CPU time of rank 0's process, all threads, is listed for
information: a neighbour on the machine disturbs it less.

    python benchmarks/parallel.py --quick --json
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from harness.claims import Claim, claim_of_ratios, claim_of_times, document
from harness.quiet import Usage, foreign_share, wait_until_quiet
from harness.session import a_against_a

RANKS = 2
TARGET = 1 / 1.05
BUCKET_MB = 4.0
WARMUP = 4
QUIET_SHARE = 0.03


@dataclass(frozen=True)
class Pace:
    """Steps of a turn, how often the order is run, and how long a turn waits for a quiet machine."""

    steps: int
    rounds: int
    patience_s: float
    attempts: int


FULL = Pace(steps=10, rounds=10, patience_s=120.0, attempts=5)
QUICK = Pace(steps=3, rounds=2, patience_s=0.5, attempts=1)

OURS_0 = f"ZeRO 0, buckets of {BUCKET_MB:g} MB"
DDP_BEST = "DistributedDataParallel at its best"
DDP_DEFAULT = "DistributedDataParallel as it comes"
OURS_3 = "ZeRO 3"
FSDP = "FSDP2 by hand"
PEERS = {OURS_0: (DDP_BEST, DDP_DEFAULT), OURS_3: (FSDP,)}
SETTINGS = {
    DDP_BEST: f"bucket_cap_mb of {BUCKET_MB:g} MB, gradient_as_bucket_view, static_graph",
    DDP_DEFAULT: "DistributedDataParallel(module): buckets of 25 MiB, the first of 1 MiB",
    FSDP: "fully_shard on each block and on the root, all defaults",
}

Step = Callable[[], None]


def build_side(name: str) -> Step:
    """A model of its own, and one training step of it. Imports torch: for the ranks alone."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from drivetrain.config import ModelConfig, OptimizerConfig
    from drivetrain.config.layout import Layout
    from drivetrain.engine.model.batch import Batch, whole_sequences
    from drivetrain.engine.model.decoder import Decoder
    from drivetrain.engine.model.initialization import initialize
    from drivetrain.engine.optimizer import build_optimizer
    from drivetrain.engine.parallel.data_parallel import gradient_sync
    from drivetrain.engine.parallel.mesh import Mesh
    from drivetrain.engine.parallel.traffic import Traffic

    model = ModelConfig(
        num_layers=6,
        hidden_size=256,
        ffn_hidden_size=704,
        num_attention_heads=8,
        seq_length=128,
        vocab_size=4096,
    )
    rank = dist.get_rank()
    ids = torch.randint(4096, (2, 128), generator=torch.Generator().manual_seed(rank))
    batch = whole_sequences(ids)
    total = batch.num_valid_tokens * RANKS
    settings = OptimizerConfig(fused=True)
    decoder = Decoder(model, torch.float32)
    initialize(decoder, 1)

    class LossOf(torch.nn.Module):
        """What the peers wrap: the loss is its forward."""

        def __init__(self) -> None:
            super().__init__()
            self.decoder = decoder

        def forward(self, batch: Batch) -> torch.Tensor:
            return self.decoder.loss_sum(batch)

    if name in PEERS:
        sync = gradient_sync(
            decoder,
            Mesh.form(Layout(dp=RANKS), rank),
            Traffic(),
            zero_stage=0 if name == OURS_0 else 3,
            bucket_size_mb=BUCKET_MB,
            blocks=list(decoder.blocks.values()),
        )
        ours = build_optimizer(sync.updated(), settings)

        def our_step() -> None:
            with sync.micro_batch(last=True):
                (decoder.loss_sum(batch) / total).backward()
            sync.finish()
            sync.step(ours)

        return our_step

    wrapped: torch.nn.Module
    if name == FSDP:
        wrapped = LossOf()
        for block in decoder.blocks.values():
            fully_shard(block)
        fully_shard(wrapped)
    elif name == DDP_DEFAULT:
        wrapped = DistributedDataParallel(LossOf())
    else:
        wrapped = DistributedDataParallel(
            LossOf(), bucket_cap_mb=BUCKET_MB * 1e6 / 2**20, gradient_as_bucket_view=True, static_graph=True
        )
    optimizer = build_optimizer(wrapped.named_parameters(), settings)

    def their_step() -> None:
        # Both average over the ranks.
        (wrapped(batch) * (RANKS / total)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return their_step


def count_traffic(step: Step) -> dict[str, list[int]]:
    """Calls and payload bytes of each collective in one step of this rank."""
    from torch import Tensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_iter

    counted: dict[str, list[int]] = {}

    class Observer(TorchDispatchMode):
        """Sees operators that C++ calls, too."""

        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if func.namespace == "c10d":
                kind = func.overloadpacket.__name__
                # (output, input, ...) of the flat collectives; (tensors, ...) of the others.
                payload = args[1] if kind in ("_allgather_base_", "_reduce_scatter_base_") else args[0]
                entry = counted.setdefault(kind, [0, 0])
                entry[0] += 1
                entry[1] += sum(value.nbytes for value in tree_iter(payload) if isinstance(value, Tensor))
            return func(*args, **(kwargs or {}))

    with Observer():
        step()
    assert counted, "a step that communicates nothing was observed"
    return counted


def run_rank(result: Path, pace: Pace, other_pid_file: Path) -> None:
    """A rank: builds all sides, takes turns. Rank 0 writes what it found."""
    import torch
    import torch.distributed as dist

    from drivetrain.engine.parallel.process_group import Ranks, join

    torch.set_num_threads(1)
    with join(Ranks.from_environment(), "cpu", 5.0) as group:
        other = 0
        if group.ranks.rank == 1:
            other_pid_file.write_text(str(os.getpid()), encoding="utf-8")
        group.barrier()
        if group.is_main:
            other = int(other_pid_file.read_text(encoding="utf-8"))
        found: dict[str, Any] = {"torch": torch.__version__}
        for ours, peers in PEERS.items():
            names = [ours, *peers]
            sides = {name: build_side(name) for name in names}
            traffic = {}
            for name, step in sides.items():
                for _ in range(WARMUP):
                    step()
                traffic[name] = count_traffic(step)
            times: dict[str, list[float]] = {name: [] for name in names}
            cpu: dict[str, list[float]] = {name: [] for name in names}
            foreign: dict[str, list[float]] = {name: [] for name in names}
            for name in (names + names[::-1]) * pace.rounds:
                seconds, cpu_seconds, share = quiet_turn(sides[name], pace, group, other)
                times[name].append(seconds)
                cpu[name].append(cpu_seconds)
                foreign[name].append(share)
            found[ours] = {"traffic": traffic, "times": times, "cpu": cpu, "foreign": foreign}
            del sides
        if group.is_main:
            result.write_text(json.dumps(found), encoding="utf-8")
        dist.barrier()


def quiet_turn(step: Step, pace: Pace, group: Any, other: int) -> tuple[float, float, float]:
    """Median time of a few steps, their mean CPU time, and what other processes took of the machine meanwhile.

    A turn that was disturbed is repeated, whatever its time; rank 0 decides for both.
    """
    for attempt in range(pace.attempts):
        if group.is_main:
            wait_until_quiet(patience_s=pace.patience_s)
        group.barrier()
        step()
        before, cpu = Usage.now(other), time.process_time()
        taken = []
        for _ in range(pace.steps):
            start = time.perf_counter()
            step()
            taken.append(time.perf_counter() - start)
        cpu = (time.process_time() - cpu) / pace.steps
        share = foreign_share(before, Usage.now(other)) if group.is_main else 0.0
        last = attempt == pace.attempts - 1
        good = group.start_sum([int(group.is_main and (share <= QUIET_SHARE or last))]).wait()[0]
        if good:
            return median(taken), cpu, share
    raise AssertionError("the last attempt counts")


def start_ranks(pace_name: str) -> dict[str, Any]:
    """Both ranks as processes of their own; what rank 0 found."""
    with tempfile.TemporaryDirectory(prefix="parallel-") as folder:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        result = Path(folder) / "result.json"
        processes = []
        try:
            for rank in range(RANKS):
                environment = {
                    **os.environ,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(RANKS),
                    "LOCAL_WORLD_SIZE": str(RANKS),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "GLOO_SOCKET_IFNAME": "lo",
                    "OMP_NUM_THREADS": "1",
                }
                command = [sys.executable, str(Path(__file__).resolve()), "--rank-of", folder]
                processes.append(subprocess.Popen([*command, "--pace", pace_name], env=environment))
            codes = [process.wait() for process in processes]
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        if any(codes):
            sys.exit(f"the ranks ended with {codes}")
        found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        return found


def claims_of(found: dict[str, Any]) -> list[Claim]:
    """For each peer: collectives, bytes, time."""
    claims = []
    version = found["torch"]
    for ours, peers in PEERS.items():
        seen = found[ours]
        times = seen["times"]
        noise = a_against_a(times[ours])
        for peer in peers:
            own, theirs = seen["traffic"][ours], seen["traffic"][peer]
            for what, column in (("collectives", 0), ("payload bytes handed to collectives", 1)):
                mine = sum(entry[column] for entry in own.values())
                other = sum(entry[column] for entry in theirs.values())
                # With the documented default the number of buckets is another setting, not another way.
                target = 0.0 if peer == DDP_DEFAULT and column == 0 else 1.0
                why = "for information, the peer's buckets are another setting; " if target == 0 else ""
                claims.append(
                    claim_of_ratios(
                        f"{ours}: {what} of a step, the peer's over ours",
                        f"torch {peer}",
                        version,
                        [other / mine] * 2,
                        target=target,
                        note=f"{why}ours {own}, peer {theirs}, as [calls, bytes]; {SETTINGS[peer]}",
                    )
                )
            foreign = median(seen["foreign"][ours] + seen["foreign"][peer])
            conditions = (
                f"{SETTINGS[peer]}; {RANKS} ranks on one machine, gloo, 5.9 M parameters, fp32; "
                f"{len(times[ours])} turns a side; ours against itself {0.0 if noise is None else noise:.1%}; other "
                f"processes took {foreign:.0%} of the machine (median turn)"
            )
            for what, kind, target, why in (
                ("time of a step at most 1.05 times the peer's", "times", TARGET, ""),
                ("CPU time of a step", "cpu", 0.0, "for information, rank 0 with all its threads; "),
            ):
                claims.append(
                    claim_of_times(
                        f"{ours}: {what}",
                        f"torch {peer}",
                        version,
                        seen[kind][ours],
                        seen[kind][peer],
                        target=target,
                        note=why + conditions,
                    )
                )
    return claims


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few short turns, under a minute")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--pace", choices=["full", "quick"], default="full", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if options.rank_of is not None:
        pace = QUICK if options.pace == "quick" else FULL
        run_rank(options.rank_of / "result.json", pace, options.rank_of / "pid")
        return
    claims = claims_of(start_ranks("quick" if options.quick else "full"))
    for claim in claims:
        print(
            f"{claim.ratio:.3f} [{claim.low:.3f}, {claim.high:.3f}] {claim.claim} | {claim.peer}",
            file=sys.stderr,
        )
    if options.json:
        print(document(claims))


if __name__ == "__main__":
    main()
