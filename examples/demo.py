"""``make demo``: a real model on real text in a few minutes, with every figure accounted for.

1. measure what this machine's matrix product sustains (a CPU has no data-sheet peak; MFU needs one),
2. train ``llama-2m`` on the Python standard library's source,
3. fit an interpolated bigram model on exactly the tokens the run has seen, and set both side by side,
4. show the five dimensions, a sample, and where the run is.
"""

import json
import subprocess
import sys
from pathlib import Path

PRESET = "llama-2m"
DRIVETRAIN = [sys.executable, "-m", "drivetrain"]


def drivetrain(*arguments: str, capture: bool = False) -> str:
    """Run one command of the command line, as a user would."""
    print(f"\n$ drivetrain {' '.join(arguments)}", file=sys.stderr, flush=True)
    done = subprocess.run([*DRIVETRAIN, *arguments], check=False, stdout=subprocess.PIPE if capture else None)
    if done.returncode != 0:
        sys.exit(done.returncode)
    return done.stdout.decode() if capture else ""


def main() -> None:
    """The demo."""
    drivetrain("bench", "gemm", "--sustain", "10s", "--dtype", "bf16")
    summary = json.loads(drivetrain("train", PRESET, "--json", *sys.argv[1:], capture=True))
    run = Path(summary["run"])

    from drivetrain.cli.dimensions import five_dimensions
    from drivetrain.engine.baseline import bigram_baseline

    baseline = bigram_baseline(run)
    model_bits = summary["validation_bits_per_byte"]
    print("\nThe five dimensions of the run\n")
    print(five_dimensions(summary))
    print("\nHeld-out text, bits per byte (lower is better)\n")
    print(f"  this model                                         {model_bits:.4f}")
    print(f"  interpolated bigram fitted on the same tokens      {baseline.bits_per_byte:.4f}")
    print(f"  ({baseline.seen_tokens:,} tokens seen, {baseline.validation_tokens:,} held-out tokens)")
    print("\nA sample\n", flush=True)
    drivetrain("generate", str(run), "--prompt", "def read_file(path):\n", "--max-new-tokens", "120")
    print(f"\nThe run: {run}")
    if model_bits >= baseline.bits_per_byte:
        sys.exit("the model is no better than a bigram: this run was too short to learn anything")


if __name__ == "__main__":
    main()
