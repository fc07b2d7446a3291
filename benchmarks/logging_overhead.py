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

from harness.blocks import Block
from harness.claims import Claim, claim_of_ratios, document
from harness.ours import run_ours
from harness.workload import Workload

LIMIT = 0.005
KEEPS_MEMORY = "malloc that keeps memory"
WARMUP = 4


def claim_of(preset: str, blocks: Sequence[Block]) -> Claim:
    """``blocks`` hold the share of each timed step."""
    shares = [share for block in blocks for share in block.hooks]
    step_s = median(second for block in blocks for second in block.step_s)
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


def run(presets: Sequence[str], steps: int, blocks: int, patience_s: float) -> list[Claim]:
    """One claim for each preset."""
    claims = []
    with tempfile.TemporaryDirectory(prefix="logging-overhead-") as name:
        for preset in presets:
            # No files are needed: our side reads the corpus.
            work = Workload(Path(name), preset, 8, 1, WARMUP + steps)
            ran = []
            for _ in range(blocks):
                ran.append(run_ours(work, KEEPS_MEMORY, compiled=False, warmup=WARMUP, patience_s=patience_s))
                share = median(ran[-1].hooks)
                print(
                    f"{preset}: {share:.4%} of {ran[-1].median_s * 1e3:.0f} ms", file=sys.stderr, flush=True
                )
            claims.append(claim_of(preset, ran))
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
    claims = run(presets, 30, 1 if options.quick else 2, patience_s=2.0 if options.quick else 180.0)
    if options.json:
        print(document(claims))


if __name__ == "__main__":
    main()
