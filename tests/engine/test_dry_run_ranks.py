"""A dry run of many ranks: what is counted without memory is what real ranks do, and what the formulas say."""

import gc
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.config import LaunchFacts, RunConfig, layout_of, load_config, violations
from drivetrain.engine.dry_run_formulas import Amount
from drivetrain.engine.dry_run_ranks import DryWorld, RankFigures, dry_run_of_ranks
from drivetrain.engine.dry_run_world import choices_of
from drivetrain.engine.model.batch import whole_sequences
from drivetrain.engine.model.initialization import initial_value
from drivetrain.engine.optimizer import build_optimizer
from drivetrain.engine.parallel.local_model import build_local_model
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.process_group import Ranks, join
from drivetrain.engine.parallel.traffic import Count
from drivetrain.engine.step import Stepper
from rank_processes import on_ranks

# Nothing divides by 8: rows of the vocabulary, of keys, of the MLP leave rests and empty parts.
TOML = """
[model]
num_layers = 4
hidden_size = 24
ffn_hidden_size = 28
num_attention_heads = 4
num_query_groups = 2
seq_length = 16
vocab_size = 51

[data]
data_path = "corpus"

[training]
micro_batch_size = 1
global_batch_size = 16
train_iters = 4
clip_grad = 0.1

[overlap]
bucket_size_mb = 0.004

[precision]
params_dtype = "fp32"

[run]
device = "cpu"
num_threads = 1
"""
GPT = (
    "model.normalization=LayerNorm",
    "model.position_embedding_type=learned_absolute",
    "model.activation_func=gelu",
    "model.add_bias_linear=true",
    "model.hidden_dropout=0.1",
)
UNTIED = "model.untie_embeddings_and_output_weights=true"
TP, PP = "parallelism.tensor_model_parallel_size", "parallelism.pipeline_model_parallel_size"
ZERO, SCHEDULE = "parallelism.zero_stage", "parallelism.pipeline_schedule"
THREE = (f"{TP}=2", f"{PP}=2")
SEQUENCE = "parallelism.sequence_parallel=true"
SHARDS = "parallelism.hybrid_shard_size"
EACH = "parallelism.reduce_each_micro_batch=true"
BF16 = "precision.params_dtype=bf16"

LAYOUTS: dict[str, tuple[str, ...]] = {
    **{f"tp2-pp2-dp2-zero{stage}": (*THREE, f"{ZERO}={stage}") for stage in (0, 1, 2, 3)},
    "tp2-sp-pp2-dp2-zero3-gpt": (*THREE, f"{ZERO}=3", SEQUENCE, *GPT),
    "tp4-sp-dp2-zero2-gpt-shared-keys": (f"{TP}=4", f"{ZERO}=2", SEQUENCE, *GPT),
    "tp2-dp4-hsdp2-zero3": (f"{TP}=2", f"{ZERO}=3", f"{SHARDS}=2"),
    "dp8-hsdp4-zero2-each": (f"{ZERO}=2", f"{SHARDS}=4", EACH),
    "dp8-zero3-bf16": (f"{ZERO}=3", BF16),
    "tp2-pp2-dp2-zero2-interleaved": (*THREE, f"{ZERO}=2", f"{SCHEDULE}=interleaved_1f1b", BF16),
    "pp2-dp4-hsdp2-zero3-interleaved": (
        f"{PP}=2",
        f"{ZERO}=3",
        f"{SHARDS}=2",
        f"{SCHEDULE}=interleaved_1f1b",
    ),
    "pp2-dp4-zero3-zero-bubble": (f"{PP}=2", f"{ZERO}=3", f"{SCHEDULE}=interleaved_zero_bubble"),
    "tp2-pp2-dp2-zero2-zbv": (*THREE, f"{ZERO}=2", f"{SCHEDULE}=zbv"),
    "pp2-dp4-zero3-zbv-untied": (f"{PP}=2", f"{ZERO}=3", f"{SCHEDULE}=zbv", UNTIED),
    "tp2-pp4-gpipe": (f"{TP}=2", f"{PP}=4", f"{SCHEDULE}=gpipe", "model.qk_layernorm=true"),
    "pp4-dp2-zero3-other-order": (
        f"{PP}=4",
        f"{ZERO}=3",
        "parallelism.rank_order=dp-pp-cp-tp",
        'parallelism.pipeline_model_parallel_layout="2,1,1,0"',
    ),
}
WORLD = 8


def configured(folder: Path, overrides: Sequence[str], world_size: int = WORLD) -> RunConfig:
    file = folder / "dry.toml"
    file.write_text(TOML)
    config = load_config(str(file), list(overrides)).config
    broken = violations(config, LaunchFacts(world_size))
    assert broken == [], "; ".join(map(str, broken))
    return config


def run_dry(
    config: RunConfig, world_size: int, ranks: Sequence[int] | None = None, **options: Any
) -> DryWorld:
    world = dry_run_of_ranks(config, world_size, ranks, progress=lambda done, total: None, **options)
    assert not world.failed, world.failed
    return world


def counted_figures(one: RankFigures) -> dict[str, Any]:
    """In the form in which a real rank tells of itself."""
    return {
        "parameters": one.resident.parameters,
        "gradients": one.resident.gradients,
        "moments": one.resident.moments,
        "traffic": dict(one.traffic),
        "shapes": {name: tuple(last - first for first, last in ranges) for name, _, ranges in one.parts},
    }


def storages(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of the storages, each once."""
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in local}.values())


def real_step(config_json: str) -> dict[str, Any]:
    """What a real rank holds, and what the second step hands over."""
    config = RunConfig.model_validate_json(config_json)
    with join(Ranks.from_environment(), "cpu", 4.0) as group:
        mesh = Mesh.form(layout_of(config, group.size), group.ranks.rank)
        building = choices_of(config, group.size)
        local = build_local_model(config, mesh, torch.device("cpu"), building)
        with torch.no_grad():
            for name, held in local.sync.parameters().items():
                whole = initial_value(config.model, name, held.placement.full_shape, 1)
                held.tensor.copy_(whole[held.placement.slices()])
        optimizer = build_optimizer(local.sync.updated(), config.optimizer)
        per_rank = config.training.global_batch_size // mesh.size("dp")
        stepper = Stepper(
            decoder=local.decoder,
            sync=local.sync,
            optimizer=optimizer,
            group=group,
            mesh=mesh,
            device=torch.device("cpu"),
            num_microbatches=per_rank,
            max_norm=config.training.clip_grad,
            pipeline=local.pipeline,
        )
        found: dict[str, Any] = {}

        def look() -> None:
            updated = [held.tensor for held in local.sync.gradients().values()]
            of_model = [value.grad for value in local.decoder.parameters() if value.grad is not None]
            found["gradients"] = Amount(sum(t.numel() for t in updated), storages([*updated, *of_model]))

        def batches() -> Any:
            for number in count():
                generator = torch.Generator().manual_seed(100 * mesh.index("dp") + number)
                yield whole_sequences(torch.randint(51, (1, 16), generator=generator))

        stream = batches()
        for _ in range(2):
            local.sync.traffic.take()
            figures = stepper.step(stream, 1e-3, stop_requested=False, on_gradients=look)
        assert torch.isfinite(figures.grad_norm)
        every = [value.data for value in gc.get_objects() if isinstance(value, torch.nn.Parameter)]
        parameters = local.sync.parameters()
        moments = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
        sizes = [t.to_local().numel() if hasattr(t, "to_local") else t.numel() for t in moments]
        return {
            **found,
            "traffic": dict(local.sync.traffic.take()),
            "shapes": {name: tuple(held.tensor.shape) for name, held in parameters.items()},
            "parameters": Amount(sum(held.tensor.numel() for held in parameters.values()), storages(every)),
            "moments": Amount(sum(sizes), storages(moments)),
        }


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_eight_ranks_that_are_not_there_hold_and_hand_over_what_eight_real_ones_do(
    layout: str, tmp_path: Path
) -> None:
    config = configured(tmp_path, LAYOUTS[layout])
    expected = on_ranks(real_step, WORLD, config.model_dump_json(), timeout=300)
    world = run_dry(config, WORLD, range(WORLD))
    for one, real in zip(world.ranks, expected, strict=True):
        assert one.traffic_source == one.gradients_source == "counted"
        assert counted_figures(one) == real


@pytest.mark.parametrize("layout", ["tp2-pp2-dp2-zero3", "tp4-sp-dp2-zero2-gpt-shared-keys"])
def test_a_pass_over_fake_tensors_counts_what_the_formulas_give(layout: str, tmp_path: Path) -> None:
    config = configured(tmp_path, LAYOUTS[layout])
    counted = run_dry(config, WORLD)
    by_formula = run_dry(config, WORLD, most_operators=0)
    for one, other in zip(counted.ranks, by_formula.ranks, strict=True):
        assert (one.traffic_source, one.gradients_source, one.why_formula) == ("counted", "counted", None)
        assert other.traffic_source == other.gradients_source == "formula"
        assert "operators" in (other.why_formula or "")
        assert counted_figures(one) == counted_figures(other)
        assert all(isinstance(value, Count) and value.calls for value in one.traffic.values())
