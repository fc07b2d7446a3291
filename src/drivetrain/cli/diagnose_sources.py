"""What ``drivetrain diagnose`` looks at: the account, the run behind it, and the first trace's waits."""

from collections.abc import Mapping, Sequence
from typing import Any

from drivetrain.archive.collective_waits import collectives_of_run
from drivetrain.archive.optimisations import records_of
from drivetrain.archive.reader import Run
from drivetrain.cli.account_sources import Figures, achievable_of, first_trace, make_account, run_of
from drivetrain.config import LaunchFacts
from drivetrain.diagnose import Facts
from drivetrain.diagnose.rules.fallbacks import ENTRY_OF_WORD
from drivetrain.diagnose.run_figures import RunFigures, figures_of
from drivetrain.diagnose.trace_figures import trace_figures
from drivetrain.measure.peaks import find_by_torch_name
from drivetrain.trace.classify import Classification, classify
from drivetrain.trace.expectations import expected_findings
from drivetrain.trace.name_table import NameTable
from drivetrain.trace.synchronisation import synchronisations
from drivetrain.trace.table import Trace

__all__ = ["facts_of"]


def facts_of(
    sources: Sequence[str], *, figures: Figures, rules: str | None, expected: Sequence[str]
) -> Facts:
    """Everything the rules need of a run, or of traces.

    Raises:
        DrivetrainError: as for an account.
    """
    run = run_of(sources)
    if run is not None:
        sources = [str(run.path)]  # The same one all along: another may become the latest meanwhile.
    account, title = make_account(
        sources, step_window="device", figures=figures, rules=rules, expected=expected
    )
    trace = first_trace(sources)
    table = NameTable.load(user_file=rules)
    classes = classify(trace, table)
    files = None if run is None else figures_of(run)
    config = None if run is None else run.config()
    in_use, ruled_out = _shown(trace, classes) if run is None else (frozenset[str](), {})
    return Facts(
        account=account,
        subject=title.removeprefix("Account of "),
        config=config,
        launch=None if run is None else _launch_of(run),
        records=() if run is None else records_of(run),
        in_use=in_use,
        ruled_out=ruled_out,
        waits=synchronisations(trace, classes, rules=table),
        waits_source="trace" if trace.rank is None else f"trace of rank {trace.rank}",
        communication=None if run is None else _communication_of(run),
        collectives=None if run is None else collectives_of_run(run),
        data_operations={} if run is None else _data_operations(run),
        figures=files,
        trace=trace_figures(trace, classes),
        device=figures.device or _device_of(files),
        achievable_flops=achievable_of(sources, figures),
        achievable_dtype=figures.dtype or ("bf16" if config is None else config.precision.params_dtype),
    )


def _device_of(files: RunFigures | None) -> str | None:
    """The name in the table of peaks of the device a run had."""
    if files is None or files.device_type != "cuda":
        return None
    found = find_by_torch_name(files.device_name)
    return None if found is None else found.name


def _data_operations(run: Run) -> dict[str, float]:
    """Seconds a micro-batch of each operation, by the last of the events that tell."""
    told = [
        event["operations"] for event in run.events() if event["kind"] == "data" and "operations" in event
    ]
    return {name: float(one["seconds_per_micro_batch"]) for name, one in told[-1].items()} if told else {}


def _communication_of(run: Run) -> Mapping[str, Any] | None:
    found = (run.summary() or {}).get("communication")
    return found if isinstance(found, dict) else None


def _launch_of(run: Run) -> LaunchFacts:
    size = run.manifest["layout"].get("world_size")
    return LaunchFacts(world_size=int(size) if size is not None else 1)


def _shown(trace: Trace, classes: Classification) -> tuple[frozenset[str], dict[str, str]]:
    """Entries that a foreign trace shows in use, and those it rules out: no remedies, although nobody says what was
    set."""
    in_use, ruled_out = set(), {}
    for word, entry in ENTRY_OF_WORD.items():
        findings = expected_findings(trace, classes, (word.replace("_", "-"),))
        if not findings:
            in_use.add(entry)
        elif findings[0].id == "expected_fused_optimizer_unknown":
            ruled_out[entry] = "no update was recorded"
    return frozenset(in_use), ruled_out
