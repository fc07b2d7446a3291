"""Reading that is slow in the first steps of a run and fast in the last: the corpus was not in memory yet."""

from collections.abc import Iterator

from drivetrain.diagnose.facts import Facts
from drivetrain.diagnose.finding import Evidence, Finding
from drivetrain.diagnose.loss import loss
from drivetrain.diagnose.remedies import remedies_against
from drivetrain.diagnose.rule import Rule

__all__ = ["RULE"]

_FALLS_TO = 0.5
"""Part of the first quarter's reading that the last quarter's may be at most."""


def _detect(facts: Facts) -> Iterator[Finding]:
    assert facts.figures is not None
    early, late, means = facts.figures.early, facts.figures.late, facts.figures.means
    keys = ("data/read_s", "data/build_s", "time/data_wait_s", "time/step_s")
    if any(key not in figures for key in keys for figures in (early, late, means)):
        return
    read, build, wait, step = (means[key] for key in keys)
    if late["data/read_s"] > _FALLS_TO * early["data/read_s"] or not build or not step:
        return
    if late["time/data_wait_s"] >= early["time/data_wait_s"]:
        return  # Nobody waits less for it.
    cost = wait * max(0.0, read - late["data/read_s"]) / build / step * facts.mean.window_ns
    remedies, none, _ = remedies_against(facts, "data.cold_cache", cost)
    yield loss(
        facts,
        "cold_cache",
        "data.cold_cache",
        "reading",
        cost,
        confidence="medium",
        evidence=(
            Evidence(
                f"reading takes {1e3 * early['data/read_s']:.3g} ms a step in the first quarter of the steady steps, "
                f"{1e3 * late['data/read_s']:.3g} ms in the last",
                f"{facts.figures.steady_steps} steady steps",
                {"early_read_s": early["data/read_s"], "late_read_s": late["data/read_s"]},
            ),
        ),
        remedies=remedies,
        no_remedy=none,
        part_of="data.loader",
    )


RULE = Rule("cold_cache", ("data.cold_cache",), ("logged steps",), _detect)
