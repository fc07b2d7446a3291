"""The exact tier: a change that claims to touch no number leaves every loss and gradient norm as it was, to the bit."""

from drivetrain.tune.gate import Evidence, Verdict, refusal, with_leak_probe

__all__ = ["LEAST_STEPS", "exact_gate"]

LEAST_STEPS = 20
"""Fewer say little: a stale batch or a race need not show in the first steps."""


def exact_gate(baseline: Evidence, candidate: Evidence, *, least_steps: int = LEAST_STEPS) -> Verdict:
    """Compare two deterministic runs of one seed, step by step, over every step they have in common."""
    refused = refusal("exact", baseline, candidate)
    if refused is not None:
        return refused
    if (baseline.seed, baseline.data_seed) != (candidate.seed, candidate.data_seed):
        return Verdict("exact", "not comparable", f"{baseline.name} and {candidate.name} have other seeds")
    for run in (baseline, candidate):
        if not run.deterministic:
            why = f"{run.name} was not deterministic: train both with run.deterministic=true"
            return Verdict("exact", "inconclusive", why)
    pairs = list(zip(baseline.points, candidate.points, strict=False))
    uneven = next((step for step, (a, b) in enumerate(pairs, 1) if a.tokens != b.tokens), None)
    if uneven is not None:
        why = (
            f"at step {uneven} the runs have consumed {pairs[uneven - 1][0].tokens:,} and "
            f"{pairs[uneven - 1][1].tokens:,} tokens: runs of another batch are not equal to the bit"
        )
        return Verdict("exact", "not comparable", why)
    if len(pairs) < least_steps:
        why = f"the runs have {len(pairs)} steps in common, at least {least_steps} are needed"
        return Verdict("exact", "inconclusive", why, {"steps": len(pairs)})
    differing = [
        step for step, (a, b) in enumerate(pairs, 1) if (a.loss, a.grad_norm) != (b.loss, b.grad_norm)
    ]
    numbers = {"steps": len(pairs), "differing_steps": len(differing)}
    if not differing:
        why = f"loss and gradient norm of {len(pairs)} steps are equal to the bit"
        return with_leak_probe(Verdict("exact", "pass", why, numbers), (baseline, candidate))
    first = differing[0]
    a, b = pairs[first - 1]
    what, one, other = (
        ("loss", a.loss, b.loss) if a.loss != b.loss else ("gradient norm", a.grad_norm, b.grad_norm)
    )
    by = "" if one is None or other is None else f", a difference of {abs(other - one):.3g}"
    why = (
        f"{len(differing)} of {len(pairs)} steps differ, step {first} first: {what} {one!r} and {other!r}{by}"
    )
    return Verdict(
        "exact", "fail", why, numbers | {"first_differing_step": first, "what": what, "values": [one, other]}
    )
