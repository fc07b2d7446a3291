"""Our own measuring and logging, where it takes a part of every step."""

from collections.abc import Iterator

from drivetrain.diagnose.facts import Facts
from drivetrain.diagnose.finding import Evidence, Finding
from drivetrain.diagnose.loss import loss
from drivetrain.diagnose.remedies import setting_remedy
from drivetrain.diagnose.rule import Rule

__all__ = ["RULE"]

_RARELY = 10
"""Steps between two lines at which logging costs a tenth."""


def _detect(facts: Facts) -> Iterator[Finding]:
    assert facts.config is not None
    assert facts.figures is not None
    hooks, step = (facts.figures.means.get(key, 0.0) for key in ("time/hooks_s", "time/step_s"))
    interval = facts.config.monitor.log_interval
    if interval >= _RARELY or not hooks or not step:
        return
    cost = hooks / step * facts.mean.window_ns
    yield loss(
        facts,
        "log_hooks",
        "host.logging",
        "monitor.log_interval",
        cost,
        evidence=(
            Evidence(
                f"{1e3 * hooks:.3g} ms of {1e3 * step:.3g} ms are inside our own hooks; a line every {interval} steps",
                f"{facts.figures.steady_steps} steady steps",
                {"hooks_s": hooks, "step_s": step, "log_interval": interval},
            ),
        ),
        remedies=(
            setting_remedy(
                facts,
                {"monitor.log_interval": _RARELY},
                cost,
                saved_ns=cost * (1 - interval / _RARELY),
                rule="all of it is spent on lines, and in proportion to their number; what each step records stays",
                numerics="exact",
                memory_bytes=0,
            ),
        ),
        part_of="host.python",
    )


RULE = Rule("log_hooks", ("host.logging",), ("configuration", "logged steps"), _detect)
