"""What ``drivetrain compare A B --gate`` does."""

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from drivetrain.archive.encoding import SCHEMA
from drivetrain.archive.listing import resolve_run
from drivetrain.cli.output import show_document
from drivetrain.errors import DrivetrainError

if TYPE_CHECKING:
    from drivetrain.tune.gate import Tier, Verdict

__all__ = ["EXIT_OF_VERDICT", "run_compare_gate"]

EXIT_OF_VERDICT = {"pass": 0, "fail": 1, "suspicious": 1, "inconclusive": 1, "not comparable": 2}


def run_compare_gate(
    references: Sequence[str], runs_dir: Path | str, tier: str | None, *, run_missing: bool, as_json: bool
) -> int:
    """Judge the second run as a change of the first one; returns the exit code."""
    from drivetrain.tune.gate_runs import gate_of_runs
    from drivetrain.tune.trainer import CommandLineTrainer

    declared = _tier(tier)
    if len(references) != 2:
        raise DrivetrainError(
            f"--gate compares two runs, the baseline and its change; {len(references)} were given"
        )
    baseline, candidate = (resolve_run(reference, runs_dir) for reference in references)
    trainer = CommandLineTrainer(candidate.path.parent / "gate-logs") if run_missing else None
    with trainer or contextlib.nullcontext():
        verdict = gate_of_runs(
            baseline,
            candidate,
            tier=declared,
            trainer=trainer,
            progress=lambda text: print(text, file=sys.stderr, flush=True),
        )
    if as_json:
        show_document({"schema": SCHEMA, **verdict.to_document()})
    else:
        _say(verdict)
    return EXIT_OF_VERDICT[verdict.verdict]


def _tier(given: str | None) -> "Tier | None":
    from drivetrain.config import nearest
    from drivetrain.tune.gate import TIERS

    found = next((tier for tier in TIERS if tier == given), None)
    if given is not None and found is None:
        close = nearest(given, TIERS)
        hint = f"did you mean {close}? " if close is not None else ""
        raise DrivetrainError(f"there is no tier {given!r}; {hint}the tiers are {', '.join(TIERS)}")
    return found


def _say(verdict: "Verdict") -> None:
    rule = verdict.numbers.get("tier_rule")
    tier = verdict.tier or "no tier"
    print(f"gate      {tier}{f' ({rule})' if rule else ''}")
    print(f"verdict   {verdict.verdict}")
    print(f"why       {verdict.why}")
