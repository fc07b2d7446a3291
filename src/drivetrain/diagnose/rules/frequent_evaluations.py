"""Evaluations at so short an interval that training stands still for them more than it should."""

import math
from collections.abc import Iterator

from drivetrain.diagnose.facts import Facts
from drivetrain.diagnose.finding import Evidence, Finding
from drivetrain.diagnose.loss import loss_beside_steps
from drivetrain.diagnose.remedies import remedies_against, setting_remedy
from drivetrain.diagnose.rule import Rule

__all__ = ["RULE"]

_MOST = 0.02
"""Share of a run that they may take."""
_LEAF = "training.eval_interval"


def _detect(facts: Facts) -> Iterator[Finding]:
    figures, config = facts.figures, facts.config
    assert figures is not None
    assert config is not None
    spent, step = figures.maintenance.get("evaluation"), figures.means.get("time/step_s")
    interval = config.training.eval_interval
    if spent is None or not spent.times or not figures.segment_steps or not step or not interval:
        return
    each = spent.seconds / figures.segment_steps
    share = each / (each + step)
    if share <= _MOST:
        return
    cost = each / step * facts.mean.window_ns
    # each' / (each' + step) = most, with each' = each * interval / interval'.
    wanted = math.ceil(interval * each * (1 - _MOST) / (_MOST * step))
    others, _, _ = remedies_against(facts, "maintenance.evaluation_too_often", cost, beside=True)
    yield loss_beside_steps(
        facts,
        "frequent_evaluations",
        "maintenance.evaluation_too_often",
        _LEAF,
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
                {_LEAF: wanted},
                cost,
                saved_ns=cost * (1 - interval / wanted),
                rule="the time is in proportion to how often it happens",
                numerics="exact",
                memory_bytes=0,
                beside=True,
            ),
            *others,
        ),
        class_name="maintenance.evaluation",
    )


RULE = Rule(
    "frequent_evaluations", ("maintenance.evaluation_too_often",), ("configuration", "logged steps"), _detect
)
