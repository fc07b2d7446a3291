"""A new run: its directory, with everything that is known before the first step."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from drivetrain.archive.origin import PLAIN, RunOrigin
from drivetrain.archive.provenance import collect
from drivetrain.archive.writer import RunWriter, append_event
from drivetrain.config import DataConfig, LoadedConfig, RunConfig, config_hash, layout_of, to_toml
from drivetrain.engine.data.corpus import Corpus
from drivetrain.engine.data.opening import data_identity
from drivetrain.engine.devices import select_device
from drivetrain.engine.stop import StopRequest

__all__ = ["create_run", "end_before_the_first_step"]


def create_run(
    loaded: LoadedConfig,
    corpus: Corpus,
    *,
    world_size: int,
    argv: Sequence[str],
    origin: RunOrigin = PLAIN,
    stop: StopRequest | None = None,
) -> Path:
    """Make the run directory of ``loaded`` and return it.

    Args:
        stop: holds signals from before there is a run, and goes on holding them for whoever trains it, to whom a signal
            that came in here is left. None: such a signal raises KeyboardInterrupt at the end, and the run has an end.
    """
    config = loaded.config
    device = select_device(config.run)
    manifest: Mapping[str, Any] = {
        "config_hash": config_hash(config),
        "layout": layout_document(config, world_size),
        "provenance": collect(argv, Path(__file__).parent),
        "devices": {"type": device.type, "name": device.name, "count": world_size},
        "dataset": dataset_of(corpus, config.data),
        "seed": config.run.seed,
        **origin.to_manifest(),
    }
    name = config.run.name or loaded.name
    # A signal in here counts once the run is made: a run that exists has an end.
    holding = StopRequest() if stop is None else stop
    holding.hold()
    try:
        toml = to_toml(config)
        with RunWriter.create(config.run.runs_dir, name, config_toml=toml, manifest=manifest) as writer:
            path = writer.path
        if stop is None and holding.requested:
            end_before_the_first_step(path, holding)
    finally:
        if stop is None:
            holding.release()
    return path


def end_before_the_first_step(path: Path, stop: StopRequest) -> NoReturn:
    """Give the run in ``path`` its end, which was asked for before it had begun, and raise KeyboardInterrupt."""
    append_event(path, "end", status="interrupted", reason=f"{stop.signal_name} before the first step")
    raise KeyboardInterrupt


def layout_document(config: RunConfig, world_size: int) -> dict[str, Any]:
    """How the processes share the work, as the manifest keeps it: every dimension that is shared, by its field."""
    layout, parallelism = layout_of(config, world_size), config.parallelism
    document: dict[str, Any] = {"world_size": world_size, "data_parallel_size": layout.dp}
    if layout.tp > 1:
        document["tensor_model_parallel_size"] = layout.tp
        document["sequence_parallel"] = parallelism.sequence_parallel
    if layout.pp > 1:
        document["pipeline_model_parallel_size"] = layout.pp
        document["pipeline_schedule"] = parallelism.pipeline_schedule
    if parallelism.zero_stage and layout.dp > 1:
        document["zero_stage"] = parallelism.zero_stage
        document["hybrid_shard_size"] = layout.size("dp_shard")
    if layout.dp < world_size:
        document["rank_order"] = parallelism.rank_order
    return document


def dataset_of(corpus: Corpus, data: DataConfig) -> dict[str, Any]:
    """Identity of the corpus, as the manifest keeps it; ``identity`` is that of the documents that training sees."""
    return {
        "prefix": str(corpus.prefix),
        "fingerprint": corpus.fingerprint,
        "identity": data_identity(corpus, data),
    }
