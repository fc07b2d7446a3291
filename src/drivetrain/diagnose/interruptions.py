"""What stops training at an interval: what that costs, and an interval at which it costs as much as it may."""

import math
from collections.abc import Iterator

from drivetrain.diagnose.facts import Facts
from drivetrain.diagnose.finding import Evidence, Finding
from drivetrain.diagnose.loss import loss_beside_steps
from drivetrain.diagnose.remedies import remedies_against, setting_remedy

__all__ = ["too_often"]


def too_often(
    facts: Facts, rule: str, cause: str, *, kind: str, leaf: str, interval: int | None, most: float
) -> Iterator[Finding]:
    """A finding where an interruption takes more than a share of the run.

    Args:
        kind: ``checkpoint`` or ``evaluation``, of the run's maintenance.
        leaf: that holds the interval.
        interval: its value in steps; None or 0: never.
        most: share of the run that it may take.
    """
    figures = facts.figures
    assert figures is not None
    spent, step = figures.maintenance.get(kind), figures.means.get("time/step_s")
    if spent is None or not spent.times or not figures.segment_steps or not step or not interval:
        return
    each = spent.seconds / figures.segment_steps
    share = each / (each + step)
    if share <= most:
        return
    # The time itself: the profiler, which makes steps longer, does not run beside it.
    cost = 1e9 * each
    # each' / (each' + step) = most, with each' = each * interval / interval'.
    wanted = math.ceil(interval * each * (1 - most) / (most * step))
    # What stands between two steps of the window is in the earlier one's time, if there is any in it.
    name = f"maintenance.{kind}"
    within = facts.mean.classes.get(name, 0.0) > 0
    if within:
        cost = min(cost, facts.mean.window_ns)
    others, _, _ = remedies_against(facts, cause, cost, beside=not within)
    yield loss_beside_steps(
        facts,
        rule,
        cause,
        leaf,
        cost,
        evidence=(
            Evidence(
                f"{spent.times} times, every {interval} steps: {spent.seconds:.3g} s beside "
                f"{figures.segment_steps} steps of {step:.3g} s, {share:.1%} of the run",
                "summary of the run",
                {"seconds": spent.seconds, "times": spent.times, "interval": interval, "share": share},
            ),
        ),
        remedies=(
            setting_remedy(
                facts,
                {leaf: wanted},
                cost,
                saved_ns=cost * (1 - interval / wanted),
                rule="the time is in proportion to how often it happens",
                numerics="exact",
                memory_bytes=0,
                beside=not within,
            ),
            *others,
        ),
        class_name=name,
        part_of=name if within else None,
    )
