"""The facts that models of time look at: of a run its account, files and trace, of its machine the ceilings."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drivetrain.archive.profile_windows import newest_window
from drivetrain.archive.reader import Run
from drivetrain.catalogue.time_models import TimeFacts, Traffic
from drivetrain.config import LaunchFacts, RunConfig
from drivetrain.diagnose.run_figures import RunFigures, figures_of
from drivetrain.errors import DataError
from drivetrain.measure.account import Account
from drivetrain.measure.ceilings import load_ceilings
from drivetrain.measure.optimisation import Observation
from drivetrain.trace.classify import Classification, classify
from drivetrain.trace.observe import observe
from drivetrain.trace.read import read_trace
from drivetrain.trace.table import Trace
from drivetrain.trace.traffic import activation_traffic

__all__ = ["data_operations_of", "time_facts_of", "traffic_of"]

_RATED = ("fp32", "bf16", "fp16")


def time_facts_of(
    run: Run,
    account: Account,
    config: RunConfig,
    launch: LaunchFacts,
    *,
    seen: tuple[Trace, Classification] | None = None,
) -> TimeFacts:
    """What is known of the newest profiled window of a run.

    Args:
        account: of that window.
        config: of the run, or as the run was meant where it was shortened for a profile.
        launch: how it was started.
        seen: the trace of its lowest rank, read and classed already; None: it is read here, if it is there.

    Raises:
        RunError: a file of the run is damaged.
        DataError: its trace cannot be read.
    """
    figures = figures_of(run)
    if seen is None:
        trace = _trace_of(run)
        seen = None if trace is None else (trace, classify(trace, None))
    threads = figures.threads if figures.device_type == "cpu" else None
    ceilings = load_ceilings()
    rates = {dtype: ceilings.matmul_flops(figures.device_name, dtype, threads) for dtype in _RATED}
    bandwidth = ceilings.memory_bandwidth(figures.device_name, threads)
    observed: Observation | None = None
    traffic: tuple[Traffic, ...] = ()
    if seen is not None:
        observed = observe(*seen)
        traffic = traffic_of(*seen, config)
    return TimeFacts(
        account=account,
        config=config,
        launch=launch,
        matmul_flops={dtype: rate.value for dtype, rate in rates.items() if rate is not None},
        memory_bandwidth=None if bandwidth is None else bandwidth.value,
        observed=observed,
        traffic=traffic,
        communication=_communication(run),
        data_operations=data_operations_of(run),
        padding=figures.padding,
        spare_cores=_spare_cores(figures),
        threads=threads,
    )


def data_operations_of(run: Run) -> dict[str, float]:
    """Seconds a micro-batch of each operation of building batches, by the last of the events that tell."""
    told = [
        event["operations"] for event in run.events() if event["kind"] == "data" and "operations" in event
    ]
    return {name: float(one["seconds_per_micro_batch"]) for name, one in told[-1].items()} if told else {}


def traffic_of(trace: Trace, classes: Classification, config: RunConfig) -> tuple[Traffic, ...]:
    """Memory-bound operators on activations of a mean step, of a trace of one rank."""
    rows = config.training.micro_batch_size * config.model.seq_length
    found, steps = activation_traffic(trace, classes, rows_of_micro_batch=rows)
    return tuple(
        Traffic(
            one.kind,
            one.operator,
            one.calls / steps,
            one.ns / steps,
            None if one.bytes is None else one.bytes / steps,
        )
        for one in found
    )


def _trace_of(run: Run) -> Trace | None:
    """The trace of the lowest rank of the newest window; None where there is none any more."""
    window = newest_window(run)
    if window is None:
        return None
    names = sorted(window["file_bytes"], key=lambda file: (len(file), file))
    path: Path = run.path / window["path"] / names[0]
    if not path.is_file():
        return None
    try:
        return read_trace(path, cache=False)
    except FileNotFoundError as error:
        raise DataError(f"{path}: {error}") from error


def _communication(run: Run) -> Mapping[str, Any] | None:
    found = (run.summary() or {}).get("communication")
    return found if isinstance(found, dict) else None


def _spare_cores(figures: RunFigures) -> int | None:
    """Usable cores of a machine that its processes' compute threads leave."""
    if figures.cores is None or figures.local_processes is None:
        return None
    if figures.device_type != "cpu":
        # One thread of each process feeds its device.
        return max(0, figures.cores - figures.local_processes)
    if figures.threads is None:
        return None
    return max(0, figures.cores - figures.local_processes * figures.threads)
