"""What a ladder expects to try within its budget, said before it tries anything.

It is an expectation: after each change that is kept a new account decides what is next, and trials that stay undecided
take longer. Costs are those by which the ladder itself decides whether something still fits.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from drivetrain.tune.candidates import Candidate
from drivetrain.tune.ladder_records import Rung, in_words
from drivetrain.tune.ladder_steps import Steps

__all__ = ["plan_document", "plan_lines"]

Fits = Literal["yes", "perhaps", "no"]


def plan_document(candidates: Sequence[Candidate], baseline: Rung, steps: Steps) -> dict[str, Any]:
    """The candidates in their order, each with what it costs and whether the budget reaches it.

    Of each: ``trial_s`` (of all trials of a search), ``gate_s`` and ``profile_s`` that follow where it is better,
    ``least_budget_s`` with which it can be tried if nothing else is, and ``fits``: ``yes``, also where everything
    before it is kept; ``perhaps``, where only trials come before it; ``no``.
    """
    bench = steps.bench
    spent_s = most_s = least_s = bench.journal.elapsed_s
    budget_s = bench.settings.budget_s
    rows: list[dict[str, Any]] = []
    for candidate in candidates:
        # A candidate is begun where one trial with its gate and the end of the ladder fit.
        begin_s = steps.estimate_s(baseline, candidate)
        # Whatever is kept before it makes an end of its own necessary.
        end_s = max(
            steps.end_s(baseline.config, candidate),
            steps.whole_end_s(baseline.config, candidate) if rows else 0.0,
        )
        own_s = begin_s - steps.end_s(baseline.config, candidate)
        trials = _trials(candidate, bench.settings.knob_trials)
        trial_s = trials * bench.costs.of_trial(baseline.config)
        gate_s, profile_s = bench.costs.of_gate(candidate.numerics), bench.costs.of_profile
        fits: Fits = "no"
        if most_s + own_s + end_s <= budget_s:
            fits = "yes"
        elif least_s + begin_s <= budget_s:
            fits = "perhaps"
        rows.append(
            {
                "candidate": candidate.key,
                "change": None if candidate.change is None else dict(candidate.change.leaves),
                "what": _what(candidate, trials),
                "treats": list(candidate.treats),
                "tier": candidate.numerics,
                "trials": trials,
                "trial_s": trial_s,
                "gate_s": gate_s,
                "profile_s": profile_s,
                "least_budget_s": spent_s + begin_s,
                "fits": fits,
            }
        )
        most_s += trial_s + gate_s + profile_s
        least_s += trial_s
    return {"spent_s": spent_s, "budget_s": budget_s, "candidates": rows}


def _trials(candidate: Candidate, knob_trials: int) -> int:
    """The most that it takes."""
    if candidate.knob is None:
        return 1
    return knob_trials * (1 if candidate.partner is None else 2)


def _what(candidate: Candidate, trials: int) -> str:
    if candidate.layout is not None:
        return f"layout: {candidate.layout.summary}"
    if candidate.move is not None:
        return f"{candidate.move.summary}, at the size that promises most"
    if candidate.knob is not None:
        fields = [candidate.knob.field, *([candidate.partner[1].field] if candidate.partner else [])]
        return f"search of {' and '.join(fields)}, {trials} trials at most"
    assert candidate.change is not None
    return in_words(candidate.change)


def plan_lines(plan: Mapping[str, Any]) -> list[str]:
    """The plan for a reader, a candidate a line."""
    rows: Sequence[Mapping[str, Any]] = plan["candidates"]
    if not rows:
        return ["nothing of the catalogue treats what the baseline's account holds"]
    reached = sum(row["fits"] == "yes" for row in rows)
    lines = [
        f"plan: {len(rows)} candidates; the budget of {plan['budget_s']:.0f} s, of which {plan['spent_s']:.0f} s are "
        f"spent, reaches {reached} of them for sure (each with the least budget that would do for it alone)"
    ]
    for number, row in enumerate(rows, start=1):
        cost = f"{row['trial_s']:.0f} s, gate {row['gate_s']:.0f} s, profile {row['profile_s']:.0f} s"
        lines.append(
            f"{number:>3}. {row['what']} ({row['candidate']}; {row['tier']}; for {row['treats'][0]}): {cost}; least "
            f"budget {row['least_budget_s']:.0f} s; {_FITS[row['fits']]}"
        )
    lines.append("what is kept changes the account, and with it what comes next")
    return lines


_FITS: Mapping[str, str] = {
    "yes": "fits",
    "perhaps": "fits if not everything before it is kept",
    "no": "does not fit",
}
