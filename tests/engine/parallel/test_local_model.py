"""What a rank builds of a run's model, and what it asks of data parallelism."""

import pytest
import torch

from drivetrain.config import layout_of, load_config
from drivetrain.config.layout import Layout
from drivetrain.engine.devices import select_device
from drivetrain.engine.model.decoder import Decoder
from drivetrain.engine.optimisations.implementation import Building
from drivetrain.engine.optimisations.in_effect import Optimisations
from drivetrain.engine.parallel.data_parallel import gradient_sync
from drivetrain.engine.parallel.local_model import build_local_model
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.process_group import Ranks, join
from drivetrain.engine.parallel.traffic import Traffic
from rank_processes import on_kept_ranks

SIZE_MB = 0.1
MODEL = ("model.num_layers=2", "training.micro_batch_size=1", f"overlap.bucket_size_mb={SIZE_MB}")


def buckets_and_record(*overrides: str) -> tuple[int, bool, str | None]:
    """Buckets of this rank's gradients; whether ``ddp_bucket`` is said to be in effect, and why not."""
    config = load_config("llama-2m", [*MODEL, *overrides]).config
    with join(Ranks.from_environment(), "cpu", 1.0) as group:
        building = Building(config=config, device=select_device(config.run), num_ranks=group.size)
        optimisations = Optimisations(building)
        optimisations.prepare("choices")
        mesh = Mesh.form(layout_of(config, group.size), group.ranks.rank)
        local = build_local_model(config, mesh, torch.device("cpu"), building)
        (record,) = [one for one in optimisations.records() if one.name == "ddp_bucket"]
        return len(local.sync._buckets), record.active, record.reason  # type: ignore[attr-defined]


def test_buckets_of_a_pipeline_keep_their_size_and_are_not_said_to_hide_communication() -> None:
    found = on_kept_ranks(
        buckets_and_record, 4, "run.device=cpu", "parallelism.pipeline_model_parallel_size=2"
    )
    for buckets, active, reason in found:
        assert buckets > 1, "no buffer of all gradients at once"
        assert not active
        assert reason is not None
        assert "nothing is reduced before" in reason


def test_a_stage_whose_shards_a_single_rank_of_several_would_hold_is_built_as_no_other_stage() -> None:
    config = load_config("llama-2m", MODEL).config
    decoder = Decoder(config.model, torch.float32)
    mesh = _Sizes(Layout(dp=2, dp_shard=1))
    with pytest.raises(AssertionError, match="rule hybrid-shards-are-shared was not checked"):
        gradient_sync(decoder, mesh, Traffic(), zero_stage=1)  # type: ignore[arg-type]


class _Sizes:
    """A mesh that is asked for its sizes only."""

    def __init__(self, layout: Layout) -> None:
        self.size = layout.size
