"""Time inside our own measuring and logging, as a share of a training step, logging at every step.

The run itself measures it (``time/hooks_s`` over ``time/step_s``): metrics line, log line on the console,
clock, moving averages. The claim is that the share stays at 0.5% or less; it is turned into
``0.5% / share``, so that at least 1 is won.

    python benchmarks/logging_overhead.py --quick --json
"""

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from harness.claims import Claim, claim_of_ratios, document
from harness.ours import our_side
from harness.session import Pace, Ran, run_session
from harness.workload import Workload

LIMIT = 0.005
KEEPS_MEMORY = "malloc that keeps memory"
FULL = Pace(warmup=5, steps=10, rounds=4, attempts=5, patience_s=120.0)
QUICK = Pace(warmup=5, steps=10, rounds=2, attempts=1, patience_s=1.0)


def claim_of(preset: str, ran: Ran, warmup: int) -> Claim:
    """The share of each step after warm-up; a disturbed step counts too, its hooks were disturbed with it."""
    shares = ran.done.hooks[warmup:]
    step_s = median(block.median_s for block in ran.blocks)
    return claim_of_ratios(
        f"logging at every step, {preset}: 0.5% over the share of a step spent inside our hooks",
        "none",
        "",
        [LIMIT / share for share in shares],
        target=1.0,
        note=(
            f"{KEEPS_MEMORY}; {len(shares)} steps, measured by the run itself; median share {median(shares):.4%} "
            f"of a step of {step_s * 1e3:.0f} ms, largest {max(shares):.4%}"
        ),
    )


def run(presets: Sequence[str], pace: Pace) -> list[Claim]:
    """One claim for each preset."""
    claims = []
    with tempfile.TemporaryDirectory(prefix="logging-overhead-") as name:
        for preset in presets:
            # Its files are not written: our side reads the corpus.
            work = Workload(Path(name) / "work", preset, 8, 1, 2000)
            sides = {preset: our_side(work, KEEPS_MEMORY)}
            ran = run_session(sides, [preset] * pace.rounds, Path(name).resolve() / preset, pace)
            claims.append(claim_of(preset, ran[preset], pace.warmup))
            print(f"{claims[-1].ratio:.1f} {claims[-1].note}", file=sys.stderr, flush=True)
    return claims


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="llama-2m only, under a minute")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument(
        "--preset", action="append", help="instead of llama-2m and llama-10m; may be repeated"
    )
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    presets = options.preset or (["llama-2m"] if options.quick else ["llama-2m", "llama-10m"])
    claims = run(presets, QUICK if options.quick else FULL)
    if options.json:
        print(document(claims))


if __name__ == "__main__":
    main()
