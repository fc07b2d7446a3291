"""What is claimed of a case, from what was found of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from cases.case import Case
from harness.case_calibration import Calibration
from harness.case_runs import Block
from harness.claims import Claim, claim_of_ratios, claim_of_times

__all__ = ["Outcome", "claims_of", "switches_claim"]

POINTS = 3.0
"""That a share of the baseline's account may be away from the source's."""
OF_THE_OPTIMUM = 0.9
PREDICTION_ERROR = 0.3
BASELINE, LADDER, ALL_ON = "baseline", "ladder", "all switches on"


@dataclass(frozen=True)
class Outcome:
    """What was found of a case.

    Attributes:
        case: which.
        calibration: how its parameters were found.
        overrides: of its baseline.
        tuned: the document of the tune.
        hashes: of all configurations of the final session, by name.
        blocks: of those that ran.
        failed: why others did not.
        hand_tuned: the fastest of those by hand; None: none ran.
        switched_on: entries that "all switches on" has on.
    """

    case: Case
    calibration: Calibration
    overrides: Sequence[str]
    tuned: Mapping[str, Any]
    hashes: Mapping[str, str]
    blocks: Mapping[str, Sequence[Block]]
    failed: Mapping[str, str]
    hand_tuned: str | None
    switched_on: Sequence[str]

    def times(self, name: str) -> list[float]:
        """Seconds of each block of a side, for as many tokens as a step of the baseline has."""
        tokens = self.blocks[BASELINE][0].tokens
        return [block.step_s * tokens / block.tokens for block in self.blocks[name]]

    def hash(self, name: str) -> str:
        """Of a configuration, shortened."""
        return self.hashes[name][:12]


def claims_of(outcome: Outcome) -> list[Claim]:
    """All claims of one case."""
    return [
        *_shares(outcome),
        _against_source(outcome),
        *_against_hand(outcome),
        *_all_on(outcome),
        *_other_rows(outcome),
        *_gates(outcome),
        *_predictions(outcome),
    ]


def _name(outcome: Outcome) -> str:
    return f"{outcome.case.name} ({outcome.case.source})"


def _conditions(outcome: Outcome) -> str:
    case = outcome.case
    parameters = ", ".join(f"{name} {value:g}" for name, value in outcome.calibration.best.parameters.items())
    where = f"{case.hosts} hosts of a rank" if case.hosts else "one process"
    return f"{where}{f'; {parameters}' if parameters else ''}; fixed: {case.fixed}; {case.differs}"


def _shares(outcome: Outcome) -> list[Claim]:
    """The account of the tuner's own profile of the baseline, against what the source states."""
    classes = outcome.tuned["baseline"]["classes"]
    found = []
    for share in outcome.case.shares:
        measured = share.of(classes)
        points = 100 * abs(measured - share.stated)
        found.append(
            claim_of_ratios(
                f"{_name(outcome)}: share of {share.name} in the baseline's step within {POINTS:g} points of the "
                f"source's: {POINTS:g} over the deviation",
                "the source's account",
                "",
                [POINTS / max(points, 0.01)],
                target=1.0,
                note=(
                    f"{measured:.1%}, the source {share.stated:.1%}: {points:.1f} points; after "
                    f"{len(outcome.calibration.rounds)} profiles of calibration; baseline {outcome.hash(BASELINE)}; "
                    f"{_conditions(outcome)}"
                ),
            )
        )
    return found


def _against_source(outcome: Outcome) -> Claim:
    case = outcome.case
    kept = ", ".join(_step_in_words(step) for step in outcome.tuned["steps"] if step["kept"]) or "nothing"
    return claim_of_times(
        f"{_name(outcome)}: tokens/s of the ladder's choice over the baseline's, at least the source's ratio",
        f"baseline {outcome.hash(BASELINE)}",
        "",
        outcome.times(LADDER),
        outcome.times(BASELINE),
        target=case.ratio,
        note=(
            f"the source: {case.told}; {case.ratio_told}, {case.ratio:g}; kept: {kept}; final {outcome.hash(LADDER)}; "
            f"the ladder took {outcome.tuned['spent_s']:.0f} s; fixed: {case.fixed}"
        ),
    )


def _against_hand(outcome: Outcome) -> list[Claim]:
    if outcome.hand_tuned is None:
        return []
    others = "; ".join(
        f"{name}: {median(outcome.times(name)) * 1e3:.1f} ms"
        for name in outcome.case.hand_tuned
        if name in outcome.blocks
    )
    return [
        claim_of_times(
            f"{_name(outcome)}: tokens/s of the ladder's choice over the hand-tuned optimum's",
            f"hand-tuned {outcome.hash(outcome.hand_tuned)}",
            "",
            outcome.times(LADDER),
            outcome.times(outcome.hand_tuned),
            target=OF_THE_OPTIMUM,
            note=(
                f"the fastest of what was declared, which flatters it a little: {outcome.hand_tuned}; {others}; "
                "seconds for as many tokens as a step of the baseline, all in one session"
            ),
        )
    ]


def _all_on(outcome: Outcome) -> list[Claim]:
    entries = ", ".join(outcome.switched_on)
    if ALL_ON not in outcome.blocks:
        why = outcome.failed.get(ALL_ON, "it was not measured")
        return [
            claim_of_ratios(
                f"{_name(outcome)}: all switches on ran to its end (1: yes)",
                "none",
                "",
                # A claim's figures are above zero.
                [1e-3],
                target=0.0,
                note=f"it did not: {why}; on: {entries}; {outcome.hash(ALL_ON)}",
            )
        ]
    return [
        claim_of_times(
            f"{_name(outcome)}: tokens/s of the ladder's choice over all switches on",
            f"all on {outcome.hash(ALL_ON)}",
            "",
            outcome.times(LADDER),
            outcome.times(ALL_ON),
            target=0.0,
            note=f"on, each on top of those before: {entries}",
        )
    ]


def _other_rows(outcome: Outcome) -> list[Claim]:
    return [
        claim_of_times(
            f"{_name(outcome)}: tokens/s of the source's own row `{name}` over the baseline's",
            f"baseline {outcome.hash(BASELINE)}",
            "",
            outcome.times(name),
            outcome.times(BASELINE),
            target=0.0,
            note=f"{' '.join(overrides)}; {outcome.hash(name)}",
        )
        for name, overrides in outcome.case.rows.items()
        if name in outcome.blocks
    ]


def _gates(outcome: Outcome) -> list[Claim]:
    """Kept steps, and the whole, that passed their gate, of all of them; nothing where nothing was kept."""
    kept = [step for step in outcome.tuned["steps"] if step["kept"]]
    if not kept:
        return []
    gates = [*(step["gate"] for step in kept), outcome.tuned["final_gate"]]
    passed = sum((gate or {}).get("verdict") == "pass" for gate in gates)
    claim = claim_of_ratios(
        f"{_name(outcome)}: share of kept steps, and of the whole, that passed the convergence gate",
        "none",
        "",
        [passed / len(gates) if passed else 1e-3],
        target=1.0,
        note=f"{passed} of {len(gates)}; {len(outcome.tuned['steps'])} steps tried, {len(kept)} kept",
    )
    return [claim]


def _predictions(outcome: Outcome) -> list[Claim]:
    """Predicted against measured gain, by the tune's own score."""
    score = outcome.tuned["prediction_score"]
    if score["median_error"] is None:
        return []
    return [
        claim_of_ratios(
            f"{_name(outcome)}: predicted against measured gain: {PREDICTION_ERROR:.0%} over the median error",
            "none",
            "",
            [PREDICTION_ERROR / max(score["median_error"], 1e-3)],
            target=1.0,
            note=(
                f"median {score['median_error']:.0%} of {score['predicted']} predicted steps, {score['measured']} "
                f"measured; {score['within_interval']} predictions within the trial's interval; {score['rule']}"
            ),
        )
    ]


def _step_in_words(step: Mapping[str, Any]) -> str:
    measured = step["measured"]
    name = step.get("move") or step["entry"]
    return f"{name} {measured['ratio']:.2f}x" if measured else str(name)


def switches_claim(outcomes: Sequence[Outcome]) -> list[Claim]:
    """In one case at least all switches on is slower than the ladder's choice."""
    ran = [outcome for outcome in outcomes if ALL_ON in outcome.blocks]
    if not ran:
        return []

    def gain(outcome: Outcome) -> float:
        return median(outcome.times(ALL_ON)) / median(outcome.times(LADDER))

    clearest = max(ran, key=gain)
    each = ", ".join(f"{outcome.case.name} {gain(outcome):.2f}" for outcome in ran)
    return [
        claim_of_times(
            "all switches on is slower than the ladder's choice in one case at least (C16)",
            f"all on {clearest.hash(ALL_ON)}",
            "",
            clearest.times(LADDER),
            clearest.times(ALL_ON),
            target=1.0,
            note=f"{clearest.case.name}; tokens/s of the ladder's choice over all on: {each}",
        )
    ]
