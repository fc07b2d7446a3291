"""The sources' cases, by the tuner alone: from a baseline whose account shows what the source states, up the ladder.

For each case (``cases/``):

1. *calibration*: the few free parameters (cost of the data transform, rate of the link, length of a sequence) are
   found by profiling until the account of the baseline shows the shares of a step that the source states;
2. ``drivetrain tune`` climbs the ladder from there, in the network lab where the case has links;
3. baseline, ladder's choice, hand-tuned configurations and all switches on are measured in one session, in turns that
   read the same backwards.

The lab needs Linux and root (docs/lab.md). Accounts, ladder, configurations with their hashes and all blocks go to
``--raw`` (``results/`` unless the run is quick or tiny).

    python benchmarks/tuner.py --json
    python benchmarks/tuner.py --case e10 --quick --folder tuner-e10
    python benchmarks/tuner.py --tiny
"""

import argparse
import dataclasses
import datetime
import json
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from cases import CASES, Case
from cases.case import RATE
from drivetrain.archive.atomic import write_text
from drivetrain.config import RunConfig, load_config, to_toml
from drivetrain.lab import missing as lab_missing
from drivetrain.measure.corpora import baked_data_path
from drivetrain.report.ladder_rows import LADDER_HEADINGS, ladder_rows
from drivetrain.tune.short_run import as_override
from harness.case_calibration import Calibration, calibrate
from harness.case_claims import ALL_ON, BASELINE, LADDER, Outcome, claims_of, switches_claim
from harness.case_runs import BENCHMARKS, Block, CaseRuns, Failed, hash_of
from harness.case_switches import all_switched_on
from harness.claims import Claim, document
from harness.packed_text import MODULES, packed_corpus
from harness.report import machine

RESULTS = BENCHMARKS / "results"


@dataclass(frozen=True)
class Size:
    """How much is done.

    Attributes:
        modules: of the standard library, whose functions are the corpus.
        calibrations: profiles at most until the shares fit.
        profiled: steps of each.
        tune: options of ``drivetrain tune``.
        only: entries that the ladder may try and that all switches has on; empty: all; None: what the source names.
        steps: of a block of the final session.
        rounds: times its order is run, forwards and back.
        hand_tuned: configurations at most.
        overrides: of the baseline, after the case's own.
        by_hand: of the hand-tuned and other rows, after their own.
    """

    modules: Sequence[str]
    calibrations: int
    profiled: int
    tune: tuple[str, ...]
    only: tuple[str, ...] | None
    steps: int
    rounds: int
    hand_tuned: int
    overrides: tuple[str, ...] = ()
    by_hand: tuple[str, ...] = ()


FULL = Size(MODULES, 8, 16, ("--budget", "60m"), (), 24, 2, 9)
QUICK = Size(
    MODULES[:10],
    5,
    10,
    (
        *("--budget", "12m", "--short-gates", "--trial-steps", "10", "--trial-looks", "1"),
        *("--knob-trials", "2", "--no-leave-one-out"),
    ),
    None,
    12,
    1,
    2,
)
TINY = Size(
    MODULES[:1],
    1,
    2,
    (
        *("--budget", "1h", "--gate-steps", "20", "--trial-steps", "4", "--trial-looks", "1"),
        *("--knob-trials", "0", "--no-leave-one-out"),
    ),
    ("keep_freed_memory",),
    2,
    1,
    1,
    (
        "model.num_layers=1",
        "model.hidden_size=32",
        "model.ffn_hidden_size=64",
        "model.num_attention_heads=2",
        "model.seq_length=32",
    ),
    # Kernels of the fusion levels are compiled, which takes longer than all else.
    ("fusion.level=off",),
)


@dataclass(frozen=True)
class Started:
    """A calibrated case: the overrides of its baseline and the file that they make, the rate of its links."""

    calibration: Calibration
    overrides: tuple[str, ...]
    file: Path
    rate_mbit: float | None


def calibrated(runs: CaseRuns, corpus: Path, size: Size) -> Started:
    """Find the parameters."""
    case = runs.case
    fixed = (*case.overrides, as_override("data.data_path", str(corpus)))

    def overrides(parameters: Mapping[str, float]) -> tuple[str, ...]:
        whole = (*fixed, *case.configure(parameters), *size.overrides)
        return (*whole, *limit_of(case, load_config("llama-2m", whole).config))

    def write(name: str, parameters: Mapping[str, float]) -> Path:
        # A file: what is given as an override is not shortened for a profile.
        file = runs.folder / f"{name}.toml"
        write_text(file, to_toml(load_config("llama-2m", overrides(parameters)).config))
        return file

    def classes_of(parameters: Mapping[str, float]) -> Mapping[str, float]:
        with runs.links(parameters.get(RATE)):
            return runs.profile(write("calibrated", parameters), size.profiled).classes

    found = calibrate(case, classes_of, size.calibrations)
    best = found.best.parameters
    return Started(found, overrides(best), write(case.name, best), best.get(RATE))


def limit_of(case: Case, config: RunConfig) -> list[str]:
    """The override that limits memory, where the case has a limit."""
    if case.limit_over_peak is None:
        return []
    from drivetrain.engine.memory.step_estimate import estimate_step

    peak = estimate_step(config, case.ranks).peak_bytes
    return [f"memory.device_memory_limit_bytes={round(peak * case.limit_over_peak)}"]


def sides_of(
    runs: CaseRuns, tune: Path, tuned: Mapping[str, Any], size: Size
) -> tuple[dict[str, Path], list[str]]:
    """All configurations of the final session, and the entries that all switches on has on."""
    baseline = tune / tuned["baseline"]["config"]
    config = load_config(str(baseline)).config
    final = tuned["final"]
    sides = {BASELINE: baseline, LADDER: baseline if final is None else tune / final["config"]}
    baked = baked_data_path(config)
    written = runs.folder / "configs"
    written.mkdir()

    def write(name: str, made: RunConfig) -> None:
        file = written / f"{len(sides):03d}.toml"
        write_text(file, to_toml(made))
        sides[name] = file

    for name, overrides in [*list(runs.case.hand_tuned.items())[: size.hand_tuned], *runs.case.rows.items()]:
        whole = [*(one.replace("{baked}", str(baked)) for one in overrides), *size.by_hand]
        write(name, load_config(str(baseline), whole).config)
    made, _leaves, names = all_switched_on(
        config, runs.case.ranks, only=entries_of(runs.case, size), missing=_lacking(config)
    )
    write(ALL_ON, made)
    return sides, names


def entries_of(case: Case, size: Size) -> tuple[str, ...]:
    """Those alone that are tried; empty: all."""
    return case.entries if size.only is None else size.only


def _lacking(config: RunConfig) -> Any:
    from drivetrain.engine.capabilities import capability
    from drivetrain.engine.devices import select_device

    device = select_device(config.run)
    return lambda name: capability(name, device).reason


def outcome_of(case: Case, folder: Path, size: Size) -> Outcome:
    """Calibrate, climb, measure.

    Raises:
        Failed: a verb did not end as it should.
    """
    corpus = packed_corpus(folder / "corpus", size.modules)
    work = folder / case.name
    work.mkdir()
    with CaseRuns(work, case) as runs:
        started = calibrated(runs, corpus, size)
        with runs.links(started.rate_mbit):
            only = [word for name in entries_of(case, size) for word in ("--only", name)]
            tune, tuned = runs.tune(started.file, [*size.tune, *only])
            print(ladder_text(tuned), file=sys.stderr, flush=True)
            sides, switched = sides_of(runs, tune, tuned, size)
            blocks, failed = runs.measure(sides, size.steps, size.rounds)
    if BASELINE not in blocks or LADDER not in blocks:
        raise Failed(f"{case.name}: {failed.get(BASELINE) or failed.get(LADDER)}")
    hand_tuned = [name for name in case.hand_tuned if name in blocks]
    return Outcome(
        case=case,
        calibration=started.calibration,
        overrides=started.overrides,
        tuned=tuned,
        hashes={name: hash_of(file) for name, file in sides.items()},
        blocks=blocks,
        failed=failed,
        hand_tuned=min(hand_tuned, key=lambda name: seconds(blocks[name])) if hand_tuned else None,
        switched_on=switched,
    )


def seconds(blocks: Sequence[Block]) -> float:
    """Median seconds a token."""
    return median(block.step_s / block.tokens for block in blocks)


def ladder_text(tuned: Mapping[str, Any]) -> str:
    """The ladder as a table."""
    rows = [LADDER_HEADINGS, *(row.cells for row in ladder_rows(tuned["steps"]))]
    widths = [max(len(row[place]) for row in rows) for place in range(len(LADDER_HEADINGS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def raw_of(outcome: Outcome, size: str) -> dict[str, Any]:
    """All of it, for whoever wants to look closer."""
    tuned = outcome.tuned
    return {
        "schema": 1,
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "size": size,
        "case": outcome.case.name,
        "source": outcome.case.source,
        "fixed": outcome.case.fixed,
        "differs": outcome.case.differs,
        "calibration": [dataclasses.asdict(one) for one in outcome.calibration.rounds],
        "parameters": dict(outcome.calibration.best.parameters),
        "overrides": list(outcome.overrides),
        "configurations": {
            name: {"hash": found, "blocks": [dataclasses.asdict(one) for one in outcome.blocks.get(name, [])]}
            for name, found in outcome.hashes.items()
        },
        "failed": dict(outcome.failed),
        "hand_tuned": outcome.hand_tuned,
        "switched_on": list(outcome.switched_on),
        "tune": {key: value for key, value in tuned.items() if key != "pieces"},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", action="append", choices=list(CASES), help="this case; may be repeated")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one case (e10 unless named), with what its source has changed alone: under twenty minutes",
    )
    parser.add_argument("--tiny", action="store_true", help="only shows that every part runs")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument(
        "--folder", type=Path, default=None, help="keep corpus, runs and tunes here; must be new"
    )
    parser.add_argument("--budget", default=None, help="of each ladder: 20m; another than the size's own")
    parser.add_argument("--raw", type=Path, default=None, help="folder of what was found of each case")
    options = parser.parse_args(arguments)
    if options.quick and options.tiny:
        parser.error("--quick and --tiny: give one of them")
    if options.quick and len(options.case or []) > 1:
        parser.error("--quick runs one case: give one --case")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    name, size = ("quick", QUICK) if options.quick else ("tiny", TINY) if options.tiny else ("full", FULL)
    if options.budget is not None:
        size = dataclasses.replace(size, tune=("--budget", options.budget, *size.tune[2:]))
    default = ["e10"] if options.quick else ["a15"] if options.tiny else list(CASES)
    cases = [CASES[one] for one in options.case or default]
    if any(case.hosts for case in cases) and (reason := lab_missing()) is not None:
        sys.exit(reason)
    raw = options.raw or (RESULTS if name == "full" else None)
    with tempfile.TemporaryDirectory(prefix="tuner-") as place:
        folder = (options.folder or Path(place)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        if any(path.name != "corpus" for path in folder.iterdir()):
            sys.exit(f"{folder} holds something already; give another --folder")
        run_all(cases, folder, size, name, raw, as_json=options.json)


def run_all(
    cases: Sequence[Case], folder: Path, size: Size, name: str, raw: Path | None, *, as_json: bool
) -> None:
    """All cases, one after the other; what was finished is kept even where a later one fails."""
    outcomes: list[Outcome] = []
    claims: list[Claim] = []
    try:
        for case in cases:
            outcome = outcome_of(case, folder, size)
            outcomes.append(outcome)
            done = claims_of(outcome)
            claims += done
            for claim in done:
                print(
                    f"{claim.ratio:.3f} target {claim.target:g} {claim.claim} | {claim.note}", file=sys.stderr
                )
            if raw is not None:
                raw.mkdir(parents=True, exist_ok=True)
                text = json.dumps(raw_of(outcome, name), indent=1) + "\n"
                write_text(raw / f"tuner-{case.name}.json", text)
        claims += switches_claim(outcomes)
    except Failed as error:
        sys.exit(f"error: {error}")
    finally:
        if as_json:
            print(document(claims), flush=True)


if __name__ == "__main__":
    main()
