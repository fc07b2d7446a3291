"""Operators: what we choose on a CPU against torch's own operators, forward and backward.

Each workload has two sides that compute the same from the same tensors, which is checked before anything is timed. Both
run in one process of one thread, started with malloc's settings in its environment: they have to be there before Python
starts, and are the same for both. The sides take turns of a few calls in the order A B B A; a turn that other processes
disturbed is repeated. ``ratio`` is the time of torch's operators over ours.

    python benchmarks/operators.py --quick --json
    python benchmarks/operators.py --only "glu bfloat16"
"""

import argparse
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from harness.attention_workloads import attention_workloads, live_bytes_claim
from harness.claims import Claim, claim_of_times, document
from harness.elementwise_workloads import TOKENS, elementwise_workloads
from harness.layer_workloads import layer_workloads
from harness.preset_workloads import preset_workloads
from harness.product_workloads import loss_live_bytes_claim, product_workloads
from harness.quiet import Usage, foreign_share, wait_until_quiet
from harness.session import a_against_a
from harness.sides import Sides
from harness.workload import ALLOCATORS

THREADS = 1
QUIET_SHARE = 0.03
ALLOCATOR = "malloc that keeps memory"

WORKLOADS: dict[str, Callable[[], Sides]] = {
    **{
        key: lambda build=build: build(TOKENS)  # type: ignore[misc]
        for key, build in elementwise_workloads().items()
    },
    **attention_workloads(),
    **product_workloads(),
    **layer_workloads(),
    **preset_workloads(),
}
"""All workloads, in the order in which they run."""

QUICK = ("add_rms_norm bfloat16", "glu bfloat16", "rotary bfloat16", "layer_norm bfloat16")
"""Those of ``--quick``."""


@dataclass(frozen=True)
class Pace:
    """Most calls of a turn, how often A B B A is run, how long a turn waits for a quiet machine and how often it is
    tried. A turn ends with the call that takes it over ``turn_s``: slow workloads have fewer calls in a turn."""

    calls: int
    rounds: int
    patience_s: float
    attempts: int
    turn_s: float = 1.0


PACES = {"full": Pace(5, 8, 120.0, 5), "quick": Pace(3, 2, 0.5, 1)}


@dataclass(frozen=True)
class Measured:
    """What was found of one workload; times are medians of turns in seconds, by side.

    Attributes:
        workload: its name in words.
        peer, target, note: as of the sides.
        times: wall time of a call.
        cpu: CPU time of the process for a call.
        foreign: what other processes took of the machine during each turn.
        torch: its version.
        no_slower: as of the sides.
    """

    workload: str
    peer: str
    target: float
    note: str
    times: dict[str, list[float]]
    cpu: dict[str, list[float]]
    foreign: dict[str, list[float]]
    torch: str
    no_slower: bool = False


class DifferentResultsError(Exception):
    """Two sides that do not compute the same cannot be compared."""


def environment(outer: Mapping[str, str]) -> dict[str, str]:
    """Of the process that measures: the caller's, with malloc's settings and threads for both sides."""
    threads = {"OMP_NUM_THREADS": str(THREADS), "MKL_NUM_THREADS": str(THREADS)}
    return {**outer, **ALLOCATORS[ALLOCATOR], **threads}


def require_same_results(sides: Sides) -> None:
    """Compare outputs and gradients of both sides, by their root mean squares in fp64.

    Raises:
        DifferentResultsError: they differ by more than a few roundings of their dtype.
    """
    import torch

    for number, (ours, theirs) in enumerate(zip(sides.ours(), sides.theirs(), strict=True)):
        right = theirs.detach().double()
        difference, size = (
            (ours.detach().double() - right).square().mean().sqrt(),
            right.square().mean().sqrt(),
        )
        allowed = 16 * torch.finfo(theirs.dtype).eps
        if not float(difference) <= allowed * float(size):
            raise DifferentResultsError(
                f"{sides.name}: result {number} differs by {float(difference / size):.1e} of its size, allowed are "
                f"{allowed:.1e}"
            )


def measure(sides: Sides, pace: Pace, parent: int) -> Measured:
    """Both sides in turns."""
    import torch

    if sides.same_results:
        require_same_results(sides)
    calls = {"ours": sides.ours, "theirs": sides.theirs}
    for call in calls.values():
        call()
    found: dict[str, dict[str, list[float]]] = {
        kind: {side: [] for side in calls} for kind in ("t", "c", "f")
    }
    for side in ("ours", "theirs", "theirs", "ours") * pace.rounds:
        for kind, value in zip("tcf", quiet_turn(calls[side], pace, parent), strict=True):
            found[kind][side].append(value)
    return Measured(
        sides.name,
        sides.peer,
        sides.target,
        sides.note,
        times=found["t"],
        cpu=found["c"],
        foreign=found["f"],
        torch=torch.__version__,
        no_slower=sides.no_slower,
    )


def quiet_turn(call: Callable[[], Any], pace: Pace, parent: int) -> tuple[float, float, float]:
    """Median wall time and mean CPU time of a few calls, and what others took of the machine meanwhile."""
    for attempt in range(pace.attempts):
        wait_until_quiet(patience_s=pace.patience_s)
        call()
        before, cpu = Usage.now(parent), time.process_time()
        taken = []
        for _ in range(pace.calls):
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
            if sum(taken) > pace.turn_s:
                break
        cpu = (time.process_time() - cpu) / len(taken)
        share = foreign_share(before, Usage.now(parent))
        if share <= QUIET_SHARE or attempt == pace.attempts - 1:
            return median(taken), cpu, share
    raise AssertionError("the last attempt counts")


def run_all(result: Path, pace: Pace, keys: Sequence[str], parent: int) -> None:
    """In the process that measures: each workload built, measured, dropped."""
    import torch

    missing = {name for name, value in ALLOCATORS[ALLOCATOR].items() if os.environ.get(name) != value}
    assert not missing, f"started without {missing}"
    torch.set_num_threads(THREADS)
    found = []
    for key in keys:
        sides = WORKLOADS[key]()
        found.append(asdict(measure(sides, pace, parent)))
        ours, theirs = (median(found[-1]["times"][side]) * 1e3 for side in ("ours", "theirs"))
        print(f"  {sides.name}: {ours:.1f} ms, {sides.peer} {theirs:.1f} ms", file=sys.stderr, flush=True)
        del sides
        gc.collect()
        # After each: what was measured stays where a later workload ends the process.
        result.write_text(json.dumps(found), encoding="utf-8")


def start(pace: str, keys: Sequence[str]) -> list[Measured]:
    """A process with everything in its environment from its start; what it found."""
    with tempfile.TemporaryDirectory(prefix="operators-") as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, str(Path(__file__).resolve()), "--measure", str(result), "--pace", pace]
        for key in keys:
            command += ["--only", key]
        process = subprocess.Popen(command, env=environment(os.environ))
        try:
            code = process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        found = json.loads(result.read_text(encoding="utf-8")) if result.exists() else []
        if code != 0:
            missing = ", ".join(keys[len(found) :])
            print(f"measuring ended with {code}; not measured: {missing}", file=sys.stderr)
        return [Measured(**one) for one in found]


def claims_of(found: Sequence[Measured]) -> list[Claim]:
    """For each workload its time, and CPU time for information."""
    claims = []
    for one in found:
        noise = a_against_a(one.times["ours"])
        foreign = median(one.foreign["ours"] + one.foreign["theirs"])
        conditions = (
            f"{one.note}; {THREADS} thread, {ALLOCATOR} on both sides; {len(one.times['ours'])} turns a side; ours "
            f"against itself {0.0 if noise is None else noise:.1%}; other processes took {foreign:.0%} of the machine "
            "(median turn)"
        )
        information = "" if one.target else "for information; "
        target = one.target - least_effect(one.times) if one.no_slower else one.target
        for what, times, least, why in (
            ("time", one.times, target, information),
            ("CPU time", one.cpu, 0.0, "for information; "),
        ):
            claims.append(
                claim_of_times(
                    f"{one.workload}: {what}{_claimed(least, one.no_slower)}",
                    one.peer,
                    one.torch,
                    times["ours"],
                    times["theirs"],
                    target=least,
                    note=why + conditions,
                )
            )
    return claims


def least_effect(times: Mapping[str, Sequence[float]]) -> float:
    """The least difference that counts: 1%, or twice what either side differs from itself."""
    return max(0.01, *(2 * (a_against_a(one) or 0.0) for one in times.values()))


def _claimed(target: float, no_slower: bool) -> str:
    if not target:
        return ""
    if no_slower:
        return (
            f" no more than the peer's, but for the {1 - target:.1%} below which a difference means nothing"
        )
    return f" at most 1/{target:g} of the peer's"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="four workloads in few turns, about a minute")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument(
        "--only", action="append", choices=list(WORKLOADS), help="this workload; may be repeated"
    )
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--pace", choices=list(PACES), default="full", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    keys = options.only or list(QUICK if options.quick else WORKLOADS)
    if options.measure is not None:
        run_all(options.measure, PACES[options.pace], keys, os.getppid())
        return
    found = start("quick" if options.quick else "full", keys)
    claims = claims_of(found)
    if not options.only:
        claims += [live_bytes_claim(), loss_live_bytes_claim()]
    for claim in claims:
        print(
            f"{claim.ratio:.3f} [{claim.low:.3f}, {claim.high:.3f}] {claim.claim} | {claim.peer}",
            file=sys.stderr,
        )
    if options.json:
        print(document(claims))
    if len(found) < len(keys):
        sys.exit(1)


if __name__ == "__main__":
    main()
