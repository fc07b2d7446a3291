"""``make demo``: a slow configuration is measured, tuned, gated and trained, with every figure accounted for.

1. Measure what this machine sustains: a CPU has no data-sheet peak, and MFU needs one.
2. Tune a plain ``llama-2m``: fp32, one sequence after the other, and a loader that waits for a slow Python transform.
   The ladder profiles it, tries what the catalogue has against the largest class of its account, and keeps what is
   faster and trains as before.
3. Show the account of the baseline, and the ladder.
4. Train the final configuration; compare it with a bigram model fitted on the very tokens it has seen; show a sample.
5. Write the reports of the ladder and of the run.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DRIVETRAIN = [sys.executable, "-m", "drivetrain"]
PLAIN = [
    "precision.params_dtype=fp32",
    "optimizer.fused=false",
    "data.transform=examples.slow_transform:look_up",
    # A quarter of the preset's batch: shorter trials. One sequence at a time: four times as many calls.
    "training.micro_batch_size=1",
    "training.global_batch_size=4",
    # Larger micro-batches are offered under a limit alone, which they keep.
    "memory.device_memory_limit_bytes=2_000_000_000",
    "training.train_iters=900",
    "training.eval_iters=16",
]
CANDIDATES = ["data_workers", "recompute", "bf16"]
"""``recompute`` brings the move to a larger micro-batch, with which it begins."""
NOTHING_KEPT = 1


def drivetrain(*arguments: str, capture: bool = False, accept: tuple[int, ...] = (0,)) -> str:
    """Run one command of the command line, as a user would."""
    print(f"\n$ drivetrain {' '.join(arguments)}", file=sys.stderr, flush=True)
    done = subprocess.run(
        [*DRIVETRAIN, *arguments], check=False, stdout=subprocess.PIPE if capture else None, cwd=ROOT
    )
    if done.returncode not in accept:
        sys.exit(done.returncode)
    return done.stdout.decode() if capture else ""


def tuned() -> dict[str, Any]:
    """The ladder's document, shown as a table as well."""
    only = [word for name in CANDIDATES for word in ("--only", name)]
    short = ["--knob-trials", "0", "--json"]
    options = ["--budget", "12m", "--no-leave-one-out", "--gate-steps", "20", "--trial-steps", "16"]
    # Eight blocks tell a tenth apart only on a quiet machine.
    options += ["--trial-looks", "1,2,4"]
    found: dict[str, Any] = json.loads(
        drivetrain(
            "tune", "llama-2m", *PLAIN, *only, *options, *short, capture=True, accept=(0, NOTHING_KEPT)
        )
    )
    print("\nWhere the time of the plain configuration went\n", flush=True)
    drivetrain("account", found["baseline"]["run"])
    print("\nThe ladder\n", flush=True)
    drivetrain("tune", "--replay", found["tune"])
    return found


def main() -> None:
    """The demo; further arguments are overrides of the final training."""
    drivetrain("bench", "gemm", "--sustain", "10s", "--dtype", "fp32")
    tune = tuned()
    folder = ROOT / "tunes" / tune["tune"]
    final = tune["final"]
    kept = [step for step in tune["steps"] if step["kept"]] if final is not None else []
    config = folder / (final or tune["baseline"])["config"]
    summary = json.loads(drivetrain("train", str(config), "--json", *sys.argv[1:], capture=True))
    run = Path(summary["run"]) if Path(summary["run"]).is_absolute() else ROOT / summary["run"]

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
    drivetrain("report", str(folder))
    drivetrain("report", str(run))
    if tune["speed_up"] is not None:
        speed_up = tune["speed_up"]
        print(
            f"\nchanges kept: {len(kept)}; {speed_up['ratio']:.2f}x the speed of the plain configuration (95% interval "
            f"{speed_up['low']:.2f} to {speed_up['high']:.2f}); gate of the whole: {tune['final_gate']['verdict']}"
        )
        saved = tune["saved"]
        if saved["withheld"] is not None:
            print(f"What the account says was saved is withheld: {saved['withheld']}")
        else:
            print(
                f"saved, each step: {1e3 * saved['seconds_per_step']:,.1f} ms; by the account of the same processes "
                f"{1e3 * saved['account_seconds_per_step']:,.1f} ms, {saved['deviation']:+.1%} (95% interval "
                f"{saved['deviation_low']:+.1%} to {saved['deviation_high']:+.1%}): {saved['agreement']}"
            )
        print(f"The final configuration, with a comment on each change: {config}")
    else:
        print(
            "\nNothing was kept on this machine; the ladder above says why. The plain configuration was trained."
        )
    print(f"The run: {run}")
    if model_bits >= baseline.bits_per_byte:
        sys.exit("the model is no better than a bigram: this run was too short to learn anything")


if __name__ == "__main__":
    main()
