"""Trials of a configuration against itself: the 95% interval of the speed ratio must cover 1 in 54 of 60.

Each trial is what ``drivetrain tune`` runs: blocks A B B A, each a process of its own, of a small variation of
llama-2m. Finished trials are kept in ``--folder``, and a second call goes on from there. From each two neighbouring
trials one of two units is formed, with the names of the second one's sides exchanged (both are the same configuration),
as the second look of a trial would have seen it. Those lines are for information.

    python benchmarks/trial_aa.py --quick --json
"""

import argparse
import json
import math
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drivetrain.archive.atomic import write_json, write_text
from drivetrain.config import load_config, to_toml
from drivetrain.tune.trainer import CommandLineTrainer
from drivetrain.tune.trial import TrialSettings, run_trial
from drivetrain.tune.trial_statistics import Noise, order_of, speed_ratio
from harness.claims import Claim, document, wilson

OVERRIDES = (
    "model.num_layers=2",
    "model.seq_length=128",
    "training.micro_batch_size=8",
    "training.global_batch_size=8",
    "training.train_iters=2000",
)
SETTINGS = TrialSettings(steps=30, looks=(1,))
TRIALS, QUICK_TRIALS = 60, 12
LEAST_COVERED = 0.9
HERE = Path(__file__).resolve().parent


def trials(folder: Path, count: int) -> list[dict[str, Any]]:
    """The first ``count`` trials in ``folder``; missing ones are run."""
    folder.mkdir(parents=True, exist_ok=True)
    state = folder / "trials.json"
    done: list[dict[str, Any]] = json.loads(state.read_text())["trials"] if state.exists() else []
    config = folder / "a.toml"
    write_text(config, to_toml(load_config("llama-2m", OVERRIDES).config))
    with CommandLineTrainer(folder / "logs") as trainer:
        while len(done) < count:
            number = len(done) + 1
            result = run_trial(
                config,
                config,
                trainer=trainer,
                runs_dir=folder / "runs",
                name=f"aa-{number}",
                settings=SETTINGS,
            )
            if result.judgement is None:
                sys.exit(f"trial {number} has no figure: {result.why}")
            speeds = [block.tokens_per_second for block in result.blocks]
            done.append({"speeds": speeds, "elapsed_s": result.elapsed_s})
            write_json(state, {"schema": 1, "trials": done})
            measured = result.judgement.measured
            print(
                f"trial {number} of {count}: {measured.ratio:.4f} [{measured.low:.4f}, {measured.high:.4f}], blocks "
                f"deviate by {measured.deviation:.2%}, {result.elapsed_s:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    return done[:count]


def coverage(name: str, units: int, series: Sequence[Sequence[float]], target: float) -> Claim:
    """How often the interval covers 1, over what is asked of it, with Wilson's interval (95%)."""
    measured = [speed_ratio(order_of(units), speeds, confidence=0.95) for speeds in series]
    covered, count = sum(one.low <= 1 <= one.high for one in measured), len(measured)
    low, high = wilson(covered, count)
    worst = max(abs(math.log(one.ratio)) for one in measured)
    return Claim(
        f"{name}: share of 95% intervals that cover 1, over {LEAST_COVERED}",
        "itself",
        "",
        [],
        [],
        covered / count / LEAST_COVERED,
        low / LEAST_COVERED,
        high / LEAST_COVERED,
        target,
        f"{covered} of {count} cover 1; largest deviation of a ratio from 1: {math.expm1(worst):.2%}; median half "
        f"width {sorted(one.high / one.ratio - 1 for one in measured)[count // 2]:.2%}",
    )


def mean_ratio(name: str, units: int, series: Sequence[Sequence[float]]) -> Claim:
    """The mean ratio of all trials, which is 1 where the order of the blocks favours no side; for information."""
    logs = [math.log(speed_ratio(order_of(units), speeds, confidence=0.95).ratio) for speeds in series]
    mean = sum(logs) / len(logs)
    half = 1.96 * math.sqrt(sum((one - mean) ** 2 for one in logs) / (len(logs) - 1) / len(logs))
    ratio, low, high = (math.exp(one) for one in (mean, mean - half, mean + half))
    return Claim(f"{name}: mean ratio", "itself", "", [], [], ratio, low, high, 0.0, f"{len(logs)} trials")


def noise(series: Sequence[Sequence[float]], elapsed_s: float) -> Claim:
    """The deviation of one block, over all trials; for information."""
    total = Noise()
    for speeds in series:
        logs = [math.log(speed) for speed in speeds]
        mean = sum(logs) / len(logs)
        total += Noise(sum((one - mean) ** 2 for one in logs), len(logs) - 1)
    deviation = total.deviation or 0.0
    return Claim(
        "deviation of a block from others of the same trial (log scale)",
        "itself",
        "",
        [],
        [],
        deviation,
        deviation,
        deviation,
        0.0,
        f"{total.freedom} degrees of freedom; {SETTINGS.steps} steps a block; {elapsed_s / 60:.0f} minutes of runs",
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_TRIALS} trials: some minutes")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument(
        "--folder",
        type=Path,
        default=HERE.parent / "runs" / "trial-aa",
        help="finished trials (default: runs/trial-aa)",
    )
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    done = trials(options.folder, QUICK_TRIALS if options.quick else TRIALS)
    series = [trial["speeds"] for trial in done]
    pairs = [[*first, *second] for first, second in zip(series[::2], series[1::2], strict=False)]
    one, two = "A/A trials of one unit A B B A", "A/A trials of two units A B B A B A A B"
    claims = [
        coverage(one, 1, series, 1.0),
        mean_ratio(one, 1, series),
        coverage(two, 2, pairs, 0.0),
        mean_ratio(two, 2, pairs),
        noise(series, sum(trial["elapsed_s"] for trial in done)),
    ]
    for claim in claims:
        print(f"{claim.claim}: {claim.ratio:.4f}; {claim.note}", file=sys.stderr, flush=True)
    if options.json:
        print(document(claims))


if __name__ == "__main__":
    main()
