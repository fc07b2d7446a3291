"""Who computes a run's operators: the tuned file is read once, is the same on all ranks, and nothing is tuned here."""

from dataclasses import dataclass
from pathlib import Path

from drivetrain.config import RunConfig, chosen_backend, operator_fields
from drivetrain.config.fusion import AUTO
from drivetrain.engine.devices import Device
from drivetrain.engine.memory.host import keep_freed_memory
from drivetrain.engine.ops.selection import Choice, Selection
from drivetrain.engine.ops.signature import Signature
from drivetrain.engine.ops.tuned_file import TunedFile, environment_here, tuned_path
from drivetrain.engine.parallel.process_group import ProcessGroup
from drivetrain.engine.training_run import Logbook
from drivetrain.errors import DrivetrainError, EnvironmentFault

__all__ = ["TunedPlace", "require_usable_tuned_file", "selection_of_run", "tuned_file_of"]


def selection_of_run(config: RunConfig, device: Device, group: ProcessGroup, logbook: Logbook) -> Selection:
    """The selection of this rank, in which nothing is requested yet. Collective.

    Raises:
        DrivetrainError: the tuned file is damaged, is not there although ``fusion.tuned_file`` names it, or is not the
            same on all ranks.
    """

    told: set[str] = set()

    def tell(choice: Choice) -> None:
        # Signatures that differ in whose gradient is wanted read alike.
        text = f"{choice.reason}; {choice.backend.name} serves instead"
        if text not in told:
            told.add(text)
            logbook.warn(text)

    def tell_of_untuned(signature: Signature, choice: Choice) -> None:
        if signature.operator not in told and tuned is not None and not tuned.foreign:
            told.add(signature.operator)
            logbook.warn(
                f"{tuned.path} has no choice for {signature}; {choice.backend.name} serves, as where nothing was "
                f"tuned, and what that costs is unknown until: drivetrain ops tune CONFIG --operator "
                f"{signature.operator}"
            )

    tuned = _tuned_file(config, device, group)
    if tuned is not None:
        for problem in tuned.problems:
            logbook.warn(problem)
        logbook.event("tuned_file", path=str(tuned.path), sha256=tuned.hash, entries=len(tuned.entries))
    return Selection(
        tuned=None if tuned is None else tuned.backend_for,
        allow_fallback=config.fusion.allow_fallback,
        on_fallback=tell,
        on_untuned=tell_of_untuned,
    )


def require_usable_tuned_file(config: RunConfig) -> None:
    """The tuned file can be read where a run of ``config`` will read one.

    Raises:
        DrivetrainError: it is damaged, or is not there although ``fusion.tuned_file`` names it.
    """
    place = tuned_file_of(config)
    if place is not None and place.is_read:
        # Where it was made is compared when the run has set its threads.
        TunedFile.read(place.path, environment={})


@dataclass(frozen=True)
class TunedPlace:
    """Where a run looks for a tuned file, and whether it reads one: it is there, or was named."""

    path: Path
    is_read: bool


def tuned_file_of(config: RunConfig) -> TunedPlace | None:
    """The place of a run of ``config``; None where no operator is ``auto``."""
    if all(chosen_backend(config.fusion, name) != AUTO for name in operator_fields()):
        return None
    named = config.fusion.tuned_file
    path = tuned_path() if named is None else Path(named)
    return TunedPlace(path, named is not None or path.exists())


def _tuned_file(config: RunConfig, device: Device, group: ProcessGroup) -> TunedFile | None:
    """None where no operator is ``auto``, or where nothing was tuned on this machine."""
    place = tuned_file_of(config)
    if place is None:
        return None
    found, failure = None, ""
    try:
        if place.is_read:
            found = TunedFile.read(place.path, environment=_environment(config, device))
    except DrivetrainError as error:
        failure = str(error)
    here = "" if found is None else found.hash
    of_main = group.broadcast_text(here)
    # No rank may go on while another gives up, or choose otherwise.
    if group.maximum(float(bool(failure))) > 0:
        raise DrivetrainError(failure or "the tuned file could not be read on another rank")
    if group.maximum(float(here != of_main)) > 0:
        raise EnvironmentFault(
            f"the tuned file {place.path} is not the same on all ranks (SHA-256 here: {here[:12] or 'none'}, on "
            f"rank 0: {of_main[:12] or 'none'}): ranks would compute by different code; copy one file to all machines, "
            "or give fusion.tuned_file on a shared file system"
        )
    return found


def _environment(config: RunConfig, device: Device) -> dict[str, str]:
    """Of this process as it will be while it trains; its threads are set already."""
    if config.memory.keep_freed_memory:
        # It is put into effect behind this, and changes what is fastest: the file was measured with it.
        keep_freed_memory()
    return environment_here(device)
