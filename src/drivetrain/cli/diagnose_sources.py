"""What ``drivetrain diagnose`` looks at: the account, the run behind it, and the first trace's waits."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drivetrain.archive.collective_waits import collectives_of_run
from drivetrain.archive.optimisations import records_of
from drivetrain.archive.reader import Run
from drivetrain.cli.account_sources import Figures, achievable_of, first_trace, make_account, run_of
from drivetrain.config import LaunchFacts
from drivetrain.diagnose import Facts
from drivetrain.diagnose.chart_facts import Ceiling, ChartFacts, logged_steps
from drivetrain.diagnose.rules.fallbacks import ENTRY_OF_WORD
from drivetrain.diagnose.run_figures import RunFigures, figures_of
from drivetrain.diagnose.time_facts import time_facts_of
from drivetrain.diagnose.trace_figures import trace_figures
from drivetrain.measure.account import Account
from drivetrain.measure.ceilings import load_ceilings
from drivetrain.measure.optimisation import OptimisationRecord
from drivetrain.measure.peaks import find_by_torch_name, find_device
from drivetrain.trace.classify import Classification, classify
from drivetrain.trace.expectations import expected_findings
from drivetrain.trace.host import HostRecords
from drivetrain.trace.name_table import NameTable
from drivetrain.trace.ranked_kernels import ranked_kernels
from drivetrain.trace.synchronisation import synchronisations
from drivetrain.trace.table import Trace

__all__ = ["facts_of"]

_KERNELS = 10
"""Rows of the chart of kernels."""


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
    records = () if run is None else records_of(run)
    device = figures.device or _device_of(files)
    dtype = figures.dtype or ("bf16" if config is None else config.precision.params_dtype)
    achievable = achievable_of(sources, figures)
    return Facts(
        account=account,
        subject=title.removeprefix("Account of "),
        config=config,
        launch=None if run is None else _launch_of(run),
        records=records,
        in_use=in_use,
        ruled_out=ruled_out,
        waits=synchronisations(trace, classes, rules=table),
        waits_source="trace" if trace.rank is None else f"trace of rank {trace.rank}",
        communication=None if run is None else _communication_of(run),
        collectives=None if run is None else collectives_of_run(run),
        data_operations={} if run is None else _data_operations(run),
        figures=files,
        trace=trace_figures(trace, classes),
        device=device,
        achievable_flops=achievable,
        achievable_dtype=dtype,
        charted=ChartFacts(
            logged=() if run is None else logged_steps(run),
            kernels=ranked_kernels(
                trace,
                classes,
                count=_KERNELS,
                rules=table,
                absent=_absent(account),
                served_otherwise=_served_otherwise(records),
            ),
            loader_recorded=HostRecords(trace.events, classes, table).tells("data.loader"),
            products=_product_ceilings(device, dtype, achievable),
            memory=_memory_ceiling(device, files),
        ),
        run_path=None if run is None else _as_typed(run.path),
        time=(
            None
            if run is None or config is None
            else time_facts_of(run, account, config, _launch_of(run), seen=(trace, classes))
        ),
    )


def _as_typed(path: Path) -> str:
    """A path as a command names it: from here, where it lies below."""
    absolute, here = path.resolve(), Path.cwd()
    return str(absolute.relative_to(here) if absolute.is_relative_to(here) else absolute)


def _absent(account: Account) -> frozenset[str]:
    """Words of what was expected and does not show, or in part only."""
    found = set()
    for one in account.health:
        word, _, answer = one.id.removeprefix("expected_").rpartition("_")
        if one.id.startswith("expected_") and answer in ("absent", "partly"):
            found.add(word.replace("_", "-"))
    return frozenset(found)


def _served_otherwise(records: Sequence[OptimisationRecord]) -> dict[str, str]:
    """Operator and backend that stood in, as regions of a trace name them → the backend that was asked for."""
    return {
        f"{record.field.removeprefix('fusion.')}/{backend}": record.asked
        for record in records
        if record.requested
        for backend in record.served_otherwise
    }


def _product_ceilings(device: str | None, dtype: str, achievable: float | None) -> dict[str, Ceiling]:
    """Dtype → what products of it can reach: sustained where that is known, else the data sheet's peak."""
    found = {}
    if device is not None:
        for name, peak in find_device(device).flops.items():
            found[name] = Ceiling(peak, "data sheet")
    if achievable is not None:
        found[dtype] = Ceiling(achievable, "sustained matrix product")
    return found


def _memory_ceiling(device: str | None, files: RunFigures | None) -> Ceiling | None:
    """What memory can carry, read and written together."""
    if device is not None:
        bandwidth = find_device(device).memory_bandwidth
        return None if bandwidth is None else Ceiling(bandwidth, "data sheet")
    if files is None or files.device_type != "cpu":
        return None
    measured = load_ceilings().memory_bandwidth(files.device_name, files.threads)
    return None if measured is None else Ceiling(measured.value, "sustained memory traffic")


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
