"""The whole of ``drivetrain ops tune``: each recorded call in turn, each finished one in the file at once."""

import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self

from drivetrain.config import RunConfig, chosen_backend, operator_fields
from drivetrain.config.fusion import AUTO, OFF
from drivetrain.engine.data.progress import ProgressCallback, silent
from drivetrain.engine.devices import select_device, thread_count
from drivetrain.engine.memory.host import keep_freed_memory
from drivetrain.engine.ops._operator_code import module_of, operator_code
from drivetrain.engine.ops._tuned_environment import differences, environment_here
from drivetrain.engine.ops._tuned_key import key_of
from drivetrain.engine.ops.selection import Selection
from drivetrain.engine.ops.tuned_file import Entry
from drivetrain.engine.ops_tuning.described import undescribable
from drivetrain.engine.ops_tuning.one_call import CallTuner, OutOfTimeError
from drivetrain.engine.ops_tuning.processes import Ask, Children
from drivetrain.engine.ops_tuning.recording import (
    LAYS_OUT,
    RecordedCall,
    evaluations_per_step,
    heaviest_first,
    packings_of,
    recorded_calls,
)
from drivetrain.engine.ops_tuning.writing import held_entries, make_folder, merge_tuned, read_tuned
from drivetrain.errors import DrivetrainError

__all__ = ["Outcome", "Report", "Settings", "tune_calls", "tune_configuration"]

Status = Literal["tuned", "kept", "not reached", "failed", "left out"]


@dataclass(frozen=True)
class Settings:
    """How a tune is made.

    Attributes:
        budget_s: wall time for all of it; what it does not reach is said and not written.
        candidate_s: wall time that one process may take: a backend that hangs is rejected after it.
        rounds: in which backends are timed side by side.
        local_processes: of a run on one machine, which share its cores.
        fresh: begin anew, whatever the file holds; where operators are named, with these alone.
        module_of: where an operator lives, by its name.
        ask: who tries backends; None: children of a process of the tune's own.
    """

    budget_s: float
    candidate_s: float = 180.0
    rounds: int = 9
    local_processes: int = 1
    fresh: bool = False
    module_of: Callable[[str], str] = module_of
    ask: Ask | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of a call.

    Attributes:
        call, tokens, calls_per_step: which one.
        status: ``tuned`` now; ``kept``: the file had it; ``not reached`` within the budget; ``failed``: no backend is
            right, or timing went wrong; ``left out``: it cannot be tried.
        entry: what the file has of it now; None where nothing.
        reason: of a failed one, or one that was left out.
    """

    operator: str
    call: str
    tokens: int
    calls_per_step: float
    status: Status
    entry: Entry | None = None
    reason: str = ""


@dataclass
class Report:
    """What a tune did.

    Attributes:
        path: the file.
        environment: for which it holds.
        outcomes: one for each call, in the order in which they were tried.
        dropped: entries of former code that the file held and holds no more.
    """

    path: Path
    environment: dict[str, str]
    outcomes: list[Outcome] = field(default_factory=list)
    dropped: int = 0


def tune_configuration(
    config: RunConfig,
    settings: Settings,
    path: Path,
    *,
    only: Sequence[str] = (),
    progress: Callable[[str], None],
    preparing: ProgressCallback = silent,
) -> Report:
    """Record the calls of a configuration and tune each.

    Products whose results are parts of one tensor, or not, come first: what is computed of them is recorded as it lies
    in memory with the choice that was made.

    Args:
        only: operators; empty: all that the model can leave to one.
        preparing: told where a corpus is prepared.

    Raises:
        DrivetrainError: there is no such operator, the configuration cannot be recorded, or as :func:`tune_calls`.
    """
    known = operator_fields()
    for name in only:
        if name not in known:
            raise DrivetrainError(
                f"--operator {name}: no model asks for it; those that one can: {', '.join(known)}"
            )
    device = select_device(config.run)
    modes = (False, True) if evaluations_per_step(config) else (False,)
    ways: list[Collection[str]] = [known]
    if config.model.hidden_dropout:
        # Asked for, it takes the place of the residual that is added together with a norm; no level asks for it.
        ways.append([name for name in known if name != "bias_dropout_add"])
    with _Tune(config, settings, path, progress, only) as tune:
        packings = packings_of(config, preparing)

        def recorded(chosen: Mapping[str, str], *, first: bool, evaluation: bool) -> list[RecordedCall]:
            found = {
                call.signature: call
                for asked in ways
                for call in recorded_calls(
                    config, device.type, packings, chosen, evaluation=evaluation, asked=asked
                )
            }
            return [call for call in found.values() if (call.operator.name in LAYS_OUT) == first]

        def wanted(calls: Iterable[RecordedCall]) -> list[RecordedCall]:
            return [call for call in calls if not only or call.operator.name in only]

        products = {mode: recorded({}, first=True, evaluation=mode) for mode in modes}
        tune.run(wanted(heaviest_first(call for calls in products.values() for call in calls)))
        others: list[RecordedCall] = []
        for mode, calls in products.items():
            chosen = {call.operator.name: tune.choice(call) for call in calls}
            others += recorded(chosen, first=False, evaluation=mode)
        tune.run(wanted(heaviest_first(others)))
        return tune.report


def tune_calls(
    config: RunConfig,
    calls: Sequence[RecordedCall],
    settings: Settings,
    path: Path,
    *,
    progress: Callable[[str], None],
) -> Report:
    """Tune each call and write ``path`` after each.

    A call that the file has already, measured in this environment on this code, is kept: so an interrupted tune goes
    on where it was.

    Raises:
        DrivetrainError: the file is damaged, or was made in another environment.
        EnvironmentFault: the file cannot be written.
        KeyboardInterrupt: passed on; what was finished is in the file.
    """
    with _Tune(config, settings, path, progress) as tune:
        tune.run(calls)
        return tune.report


class _Tune:
    """A tune that goes on: the file, what it held, and the time that is left."""

    def __init__(
        self,
        config: RunConfig,
        settings: Settings,
        path: Path,
        progress: Callable[[str], None],
        only: Sequence[str] = (),
    ) -> None:
        self._deadline = time.monotonic() + settings.budget_s
        self._progress = progress
        self._fusion = config.fusion
        threads = thread_count(config.run, settings.local_processes)
        if config.memory.keep_freed_memory:
            # For the fingerprint to be that of a run; children do the same.
            keep_freed_memory()
        environment = environment_here(select_device(config.run), threads)
        # What could not be written is not to be measured first.
        make_folder(path)
        held = _kept_anew(path, environment, only) if settings.fresh else held_entries(path, environment)
        self._is_of_this_code: Callable[[Entry], bool] = lambda one: (
            one.code == operator_code(settings.module_of(one.operator))
        )
        self._entries = {name: one for name, one in held.items() if self._is_of_this_code(one)}
        # What others write meanwhile is kept, but for what a file that is begun anew held before.
        self._replaces = settings.fresh
        self._measured: dict[tuple[str, int], Entry] = {}
        self.report = Report(path, environment, dropped=len(held) - len(self._entries))
        self._folder = tempfile.TemporaryDirectory(prefix="drivetrain-ops-tune-")
        self._children = Children(Path(self._folder.name))
        self._tuner = CallTuner(
            threads=threads,
            deterministic=config.run.deterministic,
            keep_freed_memory=config.memory.keep_freed_memory,
            candidate_s=settings.candidate_s,
            rounds=settings.rounds,
            ask=settings.ask or self._children,
            module_of=settings.module_of,
            progress=progress,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._children.close()
        self._folder.cleanup()

    def run(self, calls: Sequence[RecordedCall]) -> None:
        """Tune these, and write the file after each."""
        for number, call in enumerate(calls, start=1):
            said = f"{call.operator.name}, {number} of {len(calls)}"
            outcome = _outcome(self._tuner, call, self._entries, self._deadline, said, self._progress)
            self.report.outcomes.append(outcome)
            if outcome.status == "tuned":
                assert outcome.entry is not None
                self._measured[outcome.entry.name] = outcome.entry
                self._entries = merge_tuned(
                    self.report.path,
                    self.report.environment,
                    self._measured,
                    base=self._entries if self._replaces else None,
                    keep=self._is_of_this_code,
                )
                self._replaces = False

    def choice(self, call: RecordedCall) -> str:
        """Who would serve a call in a run of this configuration that reads the file as it is now.

        Raises:
            DrivetrainError: the configuration names a backend that cannot serve it.
        """
        key = key_of(call.signature, deterministic=self._tuner.deterministic)
        entry = self._entries.get((key.call, key.tokens))
        named = chosen_backend(self._fusion, call.operator.name)
        # What is off is tuned for a run that switches it on.
        selection = Selection(
            requested={call.operator.name: AUTO if named == OFF else named},
            tuned=None if entry is None else lambda _: entry.backend,
            allow_fallback=self._fusion.allow_fallback,
        )
        return selection.choose(call.operator, call.signature).backend.name


def _outcome(
    tuner: CallTuner,
    call: RecordedCall,
    usable: dict[tuple[str, int], Entry],
    deadline: float,
    said: str,
    progress: Callable[[str], None],
) -> Outcome:
    key = key_of(call.signature, deterministic=tuner.deterministic)
    about = (call.operator.name, key.call, key.tokens, call.calls_per_step)
    known = usable.get((key.call, key.tokens))
    if known is not None:
        progress(f"{said}: {known.backend}, tuned before")
        # The file may have it of a configuration that calls it more often, or less.
        return Outcome(*about, "kept", known.model_copy(update={"calls_per_step": call.calls_per_step}))
    why = undescribable(call.signature)
    if why is not None:
        progress(f"{said}: left out, {why}")
        return Outcome(*about, "left out", reason=why)
    if time.monotonic() >= deadline:
        return Outcome(*about, "not reached")
    progress(f"{said}: {key.call}; {key.tokens} tokens, {call.calls_per_step:g} calls a step")
    try:
        found = tuner.tune(call, key, deadline)
    except OutOfTimeError:
        progress(f"{said}: the budget is used up")
        return Outcome(*about, "not reached")
    if isinstance(found, str):
        progress(f"{said}: failed, {found}")
        return Outcome(*about, "failed", reason=found)
    progress(f"{said}: {found.backend} ({found.reason})")
    return Outcome(*about, "tuned", found)


def _kept_anew(path: Path, environment: dict[str, str], only: Sequence[str]) -> dict[tuple[str, int], Entry]:
    """What stays in a file that is begun anew: other operators than the named ones, if what is measured here may stand
    beside them."""
    read = read_tuned(path) if only else None
    if read is None or differences(read[0], environment):
        return {}
    return {one.name: one for one in read[1] if one.operator not in only}
