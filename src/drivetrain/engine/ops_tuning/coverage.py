"""What a tuned file would do for a run of a configuration here: said before the run exists."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from drivetrain.config import RunConfig, chosen_backend
from drivetrain.config.fusion import AUTO, OFF
from drivetrain.engine.devices import select_device, thread_count
from drivetrain.engine.memory.host import keep_freed_memory
from drivetrain.engine.operators_of_run import tuned_file_of
from drivetrain.engine.ops._tuned_key import key_of
from drivetrain.engine.ops.selection import Choice, Selection
from drivetrain.engine.ops.tuned_file import TunedFile, environment_here
from drivetrain.engine.ops_tuning.recording import RecordedCall, example_packings, recorded_as_served
from drivetrain.engine.preflight import asked_operators
from drivetrain.engine.random_state import deterministic

__all__ = ["AskedCall", "Coverage", "coverage_of"]

Status = Literal["used", "not used", "missing"]


@dataclass(frozen=True)
class AskedCall:
    """A call of an operator that is ``auto``.

    Attributes:
        operator: its name.
        call, tokens: by which it is looked up.
        gradients: whether it is one of training; else one of evaluation.
        backend: who would serve it.
        tuned: whether the file says so; else the operator's own preference does.
    """

    operator: str
    call: str
    tokens: int
    gradients: bool
    backend: str
    tuned: bool


@dataclass(frozen=True)
class Coverage:
    """What the file that a run would read has for it.

    Attributes:
        path: where it is looked for.
        status: ``not used``: it was made elsewhere, and nothing of it counts here.
        sha256: of its bytes; None where it is missing.
        entries, stale: how many it holds, and how many of these are of other code.
        problems: why it, or a part of it, is not used.
        calls: each kind of call that is ``auto``, once; None where it is not known which the run makes.
        unknown: why it is not.
    """

    path: Path
    status: Status
    sha256: str | None
    entries: int
    stale: int
    problems: tuple[str, ...]
    calls: tuple[AskedCall, ...] | None
    unknown: str | None = None

    @property
    def misses(self) -> tuple[AskedCall, ...]:
        """Calls for which the file has no choice."""
        return tuple(one for one in self.calls or () if not one.tuned)


def coverage_of(config: RunConfig, local_processes: int) -> Coverage | None:
    """Look up the calls that a run of ``config`` makes. None where no operator is ``auto``: no file is read then.

    Calls are recorded without data, so that of packed documents it is assumed that whole sequences and packed ones
    both come.

    Args:
        local_processes: of the run on one machine, which share its cores.

    Raises:
        DrivetrainError: the file is damaged, or ``fusion.tuned_file`` names one that is not there.
    """
    place = tuned_file_of(config)
    if place is None:
        return None
    device = select_device(config.run)
    if config.memory.keep_freed_memory:
        # As a run does before it compares where the file was made.
        keep_freed_memory()
    with deterministic(config.run.deterministic):
        tuned = None
        if place.is_read:
            here = environment_here(device, thread_count(config.run, local_processes))
            tuned = TunedFile.read(place.path, environment=here)
        calls, unknown = None, None
        if config.parallelism.tensor_model_parallel_size > 1:
            unknown = "layers are cut over tensor-parallel ranks, whose calls the tuner does not record"
        else:
            calls = _asked_calls(config, device.type, tuned)
    if tuned is None:
        return Coverage(place.path, "missing", None, 0, 0, (), calls, unknown)
    return Coverage(
        path=tuned.path,
        status="not used" if tuned.foreign else "used",
        sha256=tuned.hash,
        entries=len(tuned.entries),
        stale=len(tuned.stale),
        problems=tuned.problems,
        calls=calls,
        unknown=unknown,
    )


def _asked_calls(config: RunConfig, device: str, tuned: TunedFile | None) -> tuple[AskedCall, ...]:
    asked = asked_operators(config)
    requested = {name: chosen_backend(config.fusion, name) for name in asked}
    selection = Selection(
        requested=requested, tuned=None if tuned is None else tuned.backend_for, allow_fallback=True
    )
    made: dict[tuple[str, int], AskedCall] = {}

    def served(call: RecordedCall) -> Choice:
        return selection.choose(call.operator, call.signature)

    one_layer = config.model_copy(update={"model": config.model.model_copy(update={"num_layers": 1})})
    calls = recorded_as_served(
        one_layer, device, example_packings(config), lambda call: served(call).backend.name, asked
    )
    for call in calls:
        if requested.get(call.operator.name, OFF) != AUTO:
            continue
        key, choice = key_of(call.signature), served(call)
        made[key.call, key.tokens] = AskedCall(
            operator=call.operator.name,
            call=key.call,
            tokens=key.tokens,
            gradients=call.signature.requires_grad,
            backend=choice.backend.name,
            tuned=choice.reason == "tuned",
        )
    return tuple(sorted(made.values(), key=lambda one: (one.operator, one.call, one.tokens)))
