"""How many chunks a run's products were tuned for: the file is read once, and is the same on all ranks."""

import json
from pathlib import Path

from drivetrain.config import RunConfig
from drivetrain.engine.devices import Device
from drivetrain.engine.ops.tuned_file import TunedFile, environment_here, tuned_path
from drivetrain.engine.parallel.chunk_calls import OPERATOR, chunk_calls, link_text
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.process_group import ProcessGroup
from drivetrain.engine.parallel.tensor_parallel_overlap import WHOLE, Chunks, TunedChunks
from drivetrain.errors import DrivetrainError, EnvironmentFault

__all__ = ["tuned_chunks_of_run"]

_TUNE = "drivetrain ops tune CONFIG --nproc N"


def tuned_chunks_of_run(
    config: RunConfig, device: Device, group: ProcessGroup, mesh: Mesh
) -> TunedChunks | None:
    """What the tuned file says of this run's products; None where it is not asked. Collective.

    Raises:
        DrivetrainError: the file is damaged, is not there although ``fusion.tuned_file`` names it, or says something
            else to another rank.
    """
    if config.overlap.wanted_tp_chunks is not None:
        return None
    found, failure = TunedChunks(WHOLE, None), ""
    try:
        found = _read(config, device, group, mesh)
    except DrivetrainError as error:
        failure = str(error)
    here = json.dumps(found.chunks.by_product())
    of_main = group.broadcast_text(here)
    # No rank may go on while another gives up, or cuts otherwise: each waits for the other's collectives.
    if group.maximum(float(bool(failure))) > 0:
        raise DrivetrainError(failure or "the tuned file could not be read on another rank")
    if group.maximum(float(here != of_main)) > 0:
        raise EnvironmentFault(
            f"overlap.tp_chunks = tuned: the tuned file gives this rank the chunks {here}, and rank 0 {of_main}; copy "
            "one file to all machines, or give fusion.tuned_file on a shared file system"
        )
    return found


def _read(config: RunConfig, device: Device, group: ProcessGroup, mesh: Mesh) -> TunedChunks:
    named = config.fusion.tuned_file
    path = tuned_path() if named is None else Path(named)
    if named is None and not path.exists():
        return TunedChunks(WHOLE, f"there is no tuned file {path}, so nothing is cut; make one with: {_TUNE}")
    tuned = TunedFile.read(path, environment=environment_here(device))
    if tuned.foreign:
        return TunedChunks(WHOLE, f"nothing is cut: {'; '.join(tuned.problems)}")
    if any(one.operator == OPERATOR for one in tuned.stale):
        problems = [text for text in tuned.problems if OPERATOR in text]
        return TunedChunks(WHOLE, f"nothing is cut: {'; '.join(problems)}")
    return _chunks(config, device, group, mesh, tuned)


def _chunks(
    config: RunConfig, device: Device, group: ProcessGroup, mesh: Mesh, tuned: TunedFile
) -> TunedChunks:
    ranks = mesh.ranks("tp")
    link = link_text(device.type, ranks, group.ranks.local_world_size)
    chosen: dict[str, int] = {}
    missing = []
    for call in chunk_calls(config):
        text = call.text(config.precision.params_dtype, device.type, len(ranks), link)
        found = tuned.choice(text, call.tokens)
        if found is None:
            missing.append(call.product)
        elif not found.isdecimal() or int(found) < 1:
            raise DrivetrainError(f"the tuned file {tuned.path} is damaged: {found!r} chunks for {text}")
        else:
            chosen[call.product] = min(int(found), call.rows(len(ranks)))
    chunks = Chunks(**chosen)
    if missing:
        return TunedChunks(
            chunks,
            f"{tuned.path} has nothing for {len(ranks)} ranks, {link}, of {', '.join(missing)}: these are not cut; "
            f"{_TUNE}",
        )
    return TunedChunks(
        chunks, None if chunks != WHOLE else "it was tuned, and one piece is fastest for each product"
    )
