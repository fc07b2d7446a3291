"""A new run: its directory, with everything that is known before the first step."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drivetrain.archive.origin import PLAIN, RunOrigin
from drivetrain.archive.provenance import collect
from drivetrain.archive.writer import RunWriter
from drivetrain.config import LoadedConfig, RunConfig, config_hash, layout_of, to_toml
from drivetrain.engine.data.corpus import Corpus
from drivetrain.engine.devices import select_device
from drivetrain.engine.stop import StopRequest

__all__ = ["create_run"]


def create_run(
    loaded: LoadedConfig,
    corpus: Corpus,
    *,
    world_size: int,
    argv: Sequence[str],
    origin: RunOrigin = PLAIN,
) -> Path:
    """Make the run directory of ``loaded`` and return it."""
    config = loaded.config
    device = select_device(config.run)
    manifest: Mapping[str, Any] = {
        "config_hash": config_hash(config),
        "layout": layout_document(config, world_size),
        "provenance": collect(argv, Path(__file__).parent),
        "devices": {"type": device.type, "name": device.name, "count": world_size},
        "dataset": dataset_of(corpus),
        "seed": config.run.seed,
        **origin.to_manifest(),
    }
    name = config.run.name or loaded.name
    # A signal in here counts once the run is made: a run that exists has an end.
    with (
        StopRequest() as stop,
        RunWriter.create(config.run.runs_dir, name, config_toml=to_toml(config), manifest=manifest) as writer,
    ):
        if stop.requested:
            writer.event("end", status="interrupted", reason=f"{stop.signal_name} before the first step")
            raise KeyboardInterrupt
        return writer.path


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


def dataset_of(corpus: Corpus) -> dict[str, Any]:
    """Identity of the corpus, as the manifest keeps it."""
    return {"prefix": str(corpus.prefix), "fingerprint": corpus.fingerprint}
