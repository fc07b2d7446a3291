"""More compute threads than cores: processes take the cores from each other."""

from collections.abc import Iterator

from drivetrain.diagnose.facts import Facts
from drivetrain.diagnose.finding import Evidence, Finding, Remedy
from drivetrain.diagnose.loss import loss
from drivetrain.diagnose.remedies import setting_remedy
from drivetrain.diagnose.rule import Rule

__all__ = ["RULE"]


def _detect(facts: Facts) -> Iterator[Finding]:
    figures = facts.figures
    assert figures is not None
    if figures.device_type != "cpu" or None in (figures.threads, figures.cores, figures.local_processes):
        return
    threads, cores, processes = figures.threads or 1, figures.cores or 1, figures.local_processes or 1
    if threads * processes <= cores:
        return
    fitting = max(1, cores // processes)
    remedies: tuple[Remedy, ...] = ()
    if fitting < threads:
        remedies = (
            setting_remedy(
                facts,
                {"run.num_threads": fitting},
                None,
                numerics="round-off",
                note="usable cores over local processes, as it is where nothing is set",
            ),
        )
    yield loss(
        facts,
        "thread_counts",
        "host.thread_oversubscription",
        "run.num_threads",
        None,
        why_unknown="slower computation shows in every class, and nobody measured the run with fewer threads",
        kind="setting",
        evidence=(
            Evidence(
                f"{processes} processes of {threads} compute threads on {cores} usable cores",
                "provenance of the run",
                {"processes": processes, "threads": threads, "cores": cores},
            ),
        ),
        remedies=remedies,
        no_remedy=f"{processes} processes are more than {cores} cores: start fewer on this machine",
    )


RULE = Rule("thread_counts", ("host.thread_oversubscription",), ("run",), _detect)
