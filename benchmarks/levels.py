"""The levels of fusion on a preset: step time, live bytes, operators a layer, MFU – nothing on, core on, all on.

Step times are of ``drivetrain train``, interleaved in one session. Live bytes are counted, not sampled: all tensors
alive at the peak of one step. Operators a layer are those that do work on the host in forward and backward of the
blocks (views and bookkeeping left out; a call of compiled code counts as the kernels that were generated for it),
divided by the layers. MFU is model FLOPs over the measured ceiling of bf16 products, where one was measured.

    python benchmarks/levels.py --json
    python benchmarks/levels.py --quick
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from drivetrain.measure.flops import model_flops
from harness.claims import Claim, claim_of_ratios, claim_of_times, document
from harness.lanes import Side
from harness.ours import our_side
from harness.session import Pace, a_against_a, medians, run_session
from harness.workload import THREADS, Workload

KEEPS_MEMORY = "malloc that keeps memory"
LEVELS = {"off": (), "core": ("fusion.level=core",), "all": ("fusion.level=all",)}
FULL = Pace(warmup=5, steps=3, rounds=3, attempts=4, patience_s=120.0)
QUICK = Pace(warmup=2, steps=1, rounds=1, attempts=1, patience_s=1.0)
PEER = "drivetrain, fusion.level=off"


@dataclass(frozen=True)
class Counted:
    """What one step of a level needs, counted in a process of its own.

    Attributes:
        live_bytes: at the peak.
        activation_bytes: of them, what forward keeps for backward.
        operators_per_layer: operators that do work, forward and backward, over the layers.
    """

    live_bytes: int
    activation_bytes: int
    operators_per_layer: float


def count(work: Workload, settings: Sequence[str]) -> Counted:
    """Run :mod:`harness.level_counts` on the workload."""
    command = [sys.executable, "-m", "harness.level_counts", work.preset, *work.overrides(), *settings]
    done = subprocess.run(
        command, cwd=Path(__file__).parent, stdout=subprocess.PIPE, check=True, timeout=1800
    )
    return Counted(**json.loads(done.stdout))


def ceiling_tflops() -> float | None:
    """The measured bf16 ceiling with as many threads; None where too few of the cores were to be had."""
    command = [
        sys.executable,
        "-m",
        "drivetrain",
        "bench",
        "gemm",
        "--dtype",
        "bf16",
        "--threads",
        str(THREADS),
    ]
    done = subprocess.run([*command, "--json"], stdout=subprocess.PIPE, check=False, timeout=600)
    if done.returncode != 0:
        return None
    (entry,) = json.loads(done.stdout)["ceilings"]
    value = entry.get("value")
    return None if value is None else float(value) / 1e12


def run(preset: str, pace: Pace, micro_batch_size: int) -> list[Claim]:
    """Claims for information: each level against ``off``, and what it counts."""
    with tempfile.TemporaryDirectory(prefix="levels-") as name:
        folder = Path(name).resolve()
        work = Workload(folder / "work", preset, micro_batch_size, 1, 400)
        sides: dict[str, Side] = {
            level: our_side(work, KEEPS_MEMORY, settings) for level, settings in LEVELS.items()
        }
        order = [*LEVELS, *reversed(LEVELS)] * pace.rounds
        ran = run_session(sides, order, folder / "session", pace)
        counted = {level: count(work, settings) for level, settings in LEVELS.items()}
        ceiling = ceiling_tflops()
    config = work.config()
    tokens = work.tokens_per_step
    flops = model_flops(
        config.model, tokens=tokens, sum_squared_lengths=micro_batch_size * config.model.seq_length**2
    ).total
    noise = a_against_a(medians(ran["off"]))
    claims = []
    for level in LEVELS:
        seconds = median(medians(ran[level]))
        achieved = flops / seconds / 1e12
        mfu = "withheld, no ceiling was measured" if ceiling is None else f"{achieved / ceiling:.1%}"
        note = (
            f"{seconds * 1e3:.1f} ms a step of {tokens:,} tokens, {tokens / seconds:,.0f} tokens/s; {achieved:.3f} "
            f"TFLOP/s of model FLOPs, MFU {mfu}"
            f"{'' if ceiling is None else f' of the measured {ceiling:.3f} TFLOP/s'}; "
            f"{counted[level].operators_per_layer:.1f} operators a layer; {counted[level].live_bytes / 1e6:,.1f} MB "
            f"alive at the peak, {counted[level].activation_bytes / 1e6:,.1f} MB of them kept for backward; A/A "
            f"{'unknown' if noise is None else format(noise, '.1%')}; mean loss of the first 5 steps "
            f"{sum(ran[level].done.losses[:5]) / len(ran[level].done.losses[:5]):.4f}"
        )
        claims.append(
            claim_of_times(
                f"training step, {preset}, fusion.level={level} against off",
                PEER,
                "this revision",
                medians(ran[level]),
                medians(ran["off"]),
                target=0.0,
                note=note,
            )
        )
        claims.append(
            claim_of_ratios(
                f"live bytes at the peak of a step, {preset}, off over fusion.level={level}",
                PEER,
                "this revision",
                [counted["off"].live_bytes / counted[level].live_bytes],
                target=0.0,
                note="counted, not sampled: each storage once",
            )
        )
    return claims


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="llama-2m, a few steps")
    parser.add_argument("--preset", default="llama-50m")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    claims = run("llama-2m", QUICK, 2) if options.quick else run(options.preset, FULL, 4)
    for claim in claims:
        print(
            f"{claim.ratio:.3f} [{claim.low:.3f}, {claim.high:.3f}] {claim.claim}: {claim.note}",
            file=sys.stderr,
        )
    if options.json:
        print(document(claims))


if __name__ == "__main__":
    main()
