"""What ``drivetrain account`` is given: a run, trace files, a folder of them, and the figures for MFU."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.archive.listing import resolve_run
from drivetrain.archive.optimisations import records_of
from drivetrain.archive.profile_windows import newest_window
from drivetrain.archive.reader import Run, open_run
from drivetrain.errors import DataError, DrivetrainError, RunError
from drivetrain.measure.account import Account
from drivetrain.measure.flops import FlopCount, forward_flops
from drivetrain.measure.peaks import Peak, find_by_torch_name, find_device, peak_flops, supplied_peak
from drivetrain.trace.account import account_of, as_accounted
from drivetrain.trace.classify import classify
from drivetrain.trace.expectations import checked_words, expected_findings, expected_of, merged_findings
from drivetrain.trace.health import Finding
from drivetrain.trace.name_table import NameTable
from drivetrain.trace.operator_records import operator_findings
from drivetrain.trace.read import is_timeline, read_trace
from drivetrain.trace.slices import RankSplit
from drivetrain.trace.table import Trace

if TYPE_CHECKING:  # Traces alone need no schema, which costs as much as an account from the cache.
    from drivetrain.config import ModelConfig

__all__ = [
    "Figures",
    "achievable_of",
    "first_trace",
    "kernels_of",
    "make_account",
    "run_of",
    "timeline_target",
]

_SUFFIXES = (".json", ".json.gz")


@dataclass(frozen=True)
class Figures:
    """The options that turn times into MFU, as given on the command line."""

    model: str | None = None
    tokens_per_step: int | None = None
    device: str | None = None
    dtype: str | None = None
    """None: the run's own, or bf16 where there is no run."""
    peak_flops: float | None = None
    achievable_flops: float | None = None


@dataclass(frozen=True)
class _Facts:
    """What turns times into MFU, resolved."""

    model: "ModelConfig | None"
    tokens_per_step: int | None
    flops_per_step: FlopCount | None
    peak: Peak | None
    achievable: Peak | None
    effective_share: float | None


def make_account(
    sources: Sequence[str],
    *,
    step_window: str,
    figures: Figures,
    rules: str | None,
    expected: Sequence[str] = (),
    on_split: Callable[[RankSplit], None] | None = None,
) -> tuple[Account, str]:
    """The account of ``sources`` and a title for it.

    Args:
        expected: words of ``trace.expectations``: what does not show in the records becomes a finding in ``health``.
            What the configuration of a run asks for is expected in any case, and what its records say of operators
            that others served is in ``health``, too.
        on_split: see :func:`drivetrain.trace.account.account_of`.

    Raises:
        DrivetrainError: nothing to read, ranks of different jobs, options that do not fit.
    """
    words = checked_words(expected)
    if step_window not in ("device", "cpu"):
        raise DrivetrainError(f"--step-window {step_window!r} is neither `device` nor `cpu`")
    run = run_of(sources)
    paths = _paths_of(sources, run)
    table = NameTable.load(user_file=rules) if rules is not None else None
    facts = _facts_of(run, figures)
    if run is not None:
        words = checked_words([*words, *expected_of(run.config())])
    fallbacks: list[tuple[int | None, Sequence[Finding]]] = []
    account = account_of(
        _watched(_read(paths, frozenset(map(Path, sources))), words, table, fallbacks),
        step_window="cpu" if step_window == "cpu" else "device",
        model=facts.model,
        tokens_per_step=facts.tokens_per_step,
        flops_per_step=facts.flops_per_step,
        peak=facts.peak,
        achievable=facts.achievable,
        effective_share=facts.effective_share,
        rules=table,
        on_split=on_split,
    )
    served = () if run is None else operator_findings(records_of(run))
    account = replace(account, health=(*account.health, *served, *merged_findings(fallbacks)))
    subject = run.path.name if run is not None else ", ".join(path.name for path in paths[:3])
    more = f" and {len(paths) - 3} more" if run is None and len(paths) > 3 else ""
    return account, f"Account of {subject}{more}"


def _watched(
    traces: Iterator[Trace],
    words: Sequence[str],
    table: NameTable | None,
    found: list[tuple[int | None, Sequence[Finding]]],
) -> Iterator[Trace]:
    """The traces as they are; what of the expected does not show in each is added to ``found`` on the way."""
    for trace in traces:
        if words and len(trace.events):
            found.append((trace.rank, expected_findings(trace, classify(trace, table), words)))
        yield trace


def kernels_of(sources: Sequence[str], *, count: int, figures: Figures, rules: str | None) -> str:
    """Operators, top kernels, matrix products, small operators, launch-bound stretches of the first trace, as text."""
    from drivetrain.report.kernel_text import kernel_text
    from drivetrain.trace.generated import generated_kernels
    from drivetrain.trace.kernels import matrix_products, small_operators, top_kernels
    from drivetrain.trace.launch_bound import launch_bound_stretches
    from drivetrain.trace.operator_regions import operator_totals
    from drivetrain.trace.synchronisation import synchronisations

    trace = first_trace(sources)
    table = NameTable.load(user_file=rules)
    classes = classify(trace, table)
    ceiling = _facts_of(run_of(sources), figures).achievable
    text = kernel_text(
        top_kernels(trace, classes, count),
        matrix_products(trace, classes),
        small_operators(trace, classes),
        launch_bound_stretches(trace, count),
        synchronisations(trace, classes, rules=table),
        operators=operator_totals(trace.events, classes.kind, host_view=classes.host_view),
        generated=generated_kernels(trace.events, classes.kind),
        count=count,
        ceiling=None if ceiling is None else ceiling.value,
    )
    return f"\nkernels of {trace.path.name}\n{text}"


def first_trace(sources: Sequence[str]) -> Trace:
    """The first trace of ``sources`` that the account is of: rank 0's, where the names say the ranks.

    Raises:
        DataError: none of them is a trace.
    """
    paths = _paths_of(sources, run_of(sources))
    for path in paths[:-1]:
        try:
            return _readable(path)
        except DataError:
            continue  # The account has said that it passes this one over, or refused it.
    return _readable(paths[-1])


def run_of(sources: Sequence[str]) -> Run | None:
    """The run that is meant: the one source is a run directory; or it is no path at all, and a run answers to it.

    Raises:
        DrivetrainError: a run among other sources; a single source that is neither there nor a run.
    """
    runs = [source for source in sources if (Path(source) / "run.json").is_file()]
    if runs and len(sources) > 1:
        raise DrivetrainError(
            f"{runs[0]} is a run, and an account is of one job: give the run alone, or traces of one job"
        )
    if runs:
        return open_run(runs[0])
    if len(sources) == 1 and not Path(sources[0]).exists():
        try:
            return resolve_run(sources[0])
        except RunError as error:
            raise RunError(
                f"{sources[0]} is neither a trace nor a folder of traces, and no run: {error}"
            ) from error
    return None


def timeline_target(path: str, sources: Sequence[str]) -> Path:
    """Where a timeline of ``sources`` is to be written.

    Raises:
        DrivetrainError: it is a folder, in no folder, not called ``.json`` or ``.json.gz``, or one of the traces.
    """
    target = Path(path)
    if target.is_dir():
        raise DrivetrainError(f"--perfetto {path} is a folder; name a file: {target / 'timeline.json.gz'}")
    if not target.name.endswith(_SUFFIXES):
        raise DrivetrainError(
            f"--perfetto {path}: the name must end in {' or '.join(_SUFFIXES)}; nearest: {path}.json.gz"
        )
    if not target.parent.is_dir():
        raise DrivetrainError(f"--perfetto {path}: the folder {target.parent} does not exist")
    for trace in _paths_of(sources, run_of(sources)) if target.exists() else ():
        if trace.exists() and trace.samefile(target) and not is_timeline(trace):
            raise DrivetrainError(f"--perfetto {path} would replace one of the traces; give it another name")
    return target


def _paths_of(sources: Sequence[str], run: Run | None) -> list[Path]:
    """The traces of ``run``'s newest profile window, or of the sources themselves where no run is meant."""
    if run is not None:
        return _window_of(run)
    found: list[Path] = []
    for source in sources:
        path = Path(source)
        if path.is_dir():
            found.extend(_traces_in(path))
        else:
            found.append(path)
    return found


def _window_of(run: Run) -> list[Path]:
    """The traces of the run's newest profile window."""
    window = newest_window(run)
    remedy = f"make one with: drivetrain profile {run.path / 'config.toml'}"
    if window is None:
        raise RunError(f"{run.path} holds no profile; {remedy}")
    folder = run.path / window["path"]
    if not folder.is_dir():
        raise RunError(
            f"{run.path} holds no profile any more: {folder} is missing; copy the run again whole, or {remedy}"
        )
    return _traces_in(folder)


def _traces_in(folder: Path) -> list[Path]:
    traces = sorted(path for path in folder.iterdir() if path.name.endswith(_SUFFIXES) and path.is_file())
    if not traces:
        raise DataError(f"{folder} holds no trace: files that end in {' or '.join(_SUFFIXES)} are looked for")
    return traces


def _readable(path: Path) -> Trace:
    """The trace in ``path``, as its account takes it.

    Raises:
        DataError: it holds none.
    """
    if is_timeline(path):
        raise DataError(f"{path}: a timeline made of an account, which records nothing itself")
    return as_accounted(read_trace(path))


def _read(paths: Sequence[Path], named: frozenset[Path]) -> Iterator[Trace]:
    """Read one after the other, so that memory does not grow with the number of ranks.

    A file the user ``named`` must be a trace. Others lay in a folder: what holds nothing to read is passed over, and
    said so.
    """
    for index, path in enumerate(paths):
        if len(paths) > 1:
            print(f"reading {index + 1}/{len(paths)} {path.name}", file=sys.stderr, flush=True)
        try:
            trace = _readable(path)
        except DataError as error:
            if path in named or len(paths) == 1:
                raise
            print(f"passed over: {error}", file=sys.stderr)
            continue
        yield trace


def achievable_of(sources: Sequence[str], figures: Figures) -> float | None:
    """Sustained matrix products of one device in FLOP/s, as the account takes them; None where unknown."""
    achievable = _facts_of(run_of(sources), figures).achievable
    return None if achievable is None else achievable.value


def _facts_of(run: Run | None, figures: Figures) -> _Facts:
    if figures.peak_flops is not None and figures.device is not None:
        raise DrivetrainError("--device and --peak-flops are two peaks; give one of them")
    if figures.dtype is not None and figures.device is None:
        raise DrivetrainError(
            f"--dtype {figures.dtype} is that of --device's peak; give a device, or drop it"
        )
    achievable = (
        Peak(figures.achievable_flops, "supplied by the user")
        if figures.achievable_flops is not None
        else None
    )
    if run is None:
        return _Facts(
            _model_of(figures), figures.tokens_per_step, None, _peak_given(figures, "bf16"), achievable, None
        )
    if figures.model is not None or figures.tokens_per_step is not None:
        raise DrivetrainError(
            f"{run.path} knows its model and its tokens; drop --model and --tokens-per-step"
        )
    from drivetrain.config import tokens_per_step

    config = run.config()
    given = _peak_given(figures, config.precision.params_dtype)
    measured = _peak_of(run, config.precision.params_dtype)
    flops, tokens, share = _counted(run, config.model)
    return _Facts(
        model=config.model,
        tokens_per_step=tokens or tokens_per_step(config),
        flops_per_step=flops,
        peak=given or measured,
        achievable=achievable or (measured if run.manifest["devices"]["type"] == "cpu" else None),
        effective_share=share,
    )


def _model_of(figures: Figures) -> "ModelConfig | None":
    if figures.model is None:
        return None
    from drivetrain.config import load_config

    return load_config(figures.model).config.model


def _peak_given(figures: Figures, dtype: str) -> Peak | None:
    if figures.peak_flops is not None:
        return supplied_peak(figures.peak_flops)
    if figures.device is not None:
        return peak_flops(find_device(figures.device), figures.dtype or dtype)
    return None


def _peak_of(run: Run, dtype: str) -> Peak | None:
    """The peak of the run's own device: the data sheet's, or this machine's measured product."""
    devices: dict[str, Any] = run.manifest["devices"]
    if devices["type"] == "cuda":
        found = find_by_torch_name(devices["name"])
        return None if found is None else peak_flops(found, dtype)
    threads = next((event.get("threads") for event in reversed(run.events()) if event.get("threads")), None)
    from drivetrain.measure.ceilings import load_ceilings

    return load_ceilings().matmul_flops(devices["name"], dtype, threads)


def _counted(run: Run, model: "ModelConfig") -> tuple[FlopCount | None, int | None, float | None]:
    """Mean model FLOPs and tokens of the newest window's steps, which know their documents, and the share of tokens
    that carried loss. FLOPs of full sequences stand in where the window did not count them."""
    window = newest_window(run)
    if window is None:
        return None, None, None
    try:
        steps = int(window["last"]) - int(window["first"]) + 1
        tokens, flops = int(window["tokens"]) // steps, int(window["model_flops"]) // steps
        share = int(window["effective_tokens"]) / int(window["tokens"])
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise RunError(
            f"{run.path / 'events.jsonl'}: a profile window without its counts ({error!r})"
        ) from error
    plain = forward_flops(model, tokens=tokens, sum_squared_lengths=0).times(3)
    return FlopCount(plain.matmul, flops - plain.total, plain.logits), tokens, share
