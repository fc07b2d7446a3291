"""A dry run of many ranks: what is counted without memory is what real ranks do, and what the formulas say."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.config import LaunchFacts, RunConfig, layout_of, load_config, violations
from drivetrain.engine.dry_run_formulas import Amount, Resident
from drivetrain.engine.dry_run_ranks import DryWorld, RankFigures, dry_run_of_ranks
from drivetrain.engine.dry_run_world import PlannedWorld, choices_of
from drivetrain.engine.model.batch import Batch, whole_sequences
from drivetrain.engine.model.initialization import initial_value
from drivetrain.engine.optimizer import build_optimizer
from drivetrain.engine.parallel.local_model import build_local_model
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.process_group import ProcessGroup, Ranks, join
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
global_batch_size = 8
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
    "tp4-sp-dp2-zero2-gpt-chunks": (f"{TP}=4", f"{ZERO}=2", SEQUENCE, *GPT, "overlap.tp_chunks=3"),
    "tp2-pp2-dp2-zero2-zbv-chunks": (*THREE, f"{ZERO}=2", f"{SCHEDULE}=zbv", "overlap.tp_chunks=5"),
    "tp2-dp4-hsdp2-zero3": (f"{TP}=2", f"{ZERO}=3", f"{SHARDS}=2"),
    "dp8-hsdp4-zero2-each": (f"{ZERO}=2", f"{SHARDS}=4", EACH, "training.global_batch_size=16"),
    "dp8-zero3-bf16": (f"{ZERO}=3", BF16, "training.global_batch_size=16"),
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
    "tp2-pp2-dp2-zero2-dualpipev": (*THREE, f"{ZERO}=2", f"{SCHEDULE}=dualpipev"),
    "pp2-dp4-zero3-dualpipev-untied": (
        f"{PP}=2",
        f"{ZERO}=3",
        f"{SCHEDULE}=dualpipev",
        UNTIED,
        "training.global_batch_size=16",
    ),
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


def own(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor's own part."""
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def storages(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of the storages, each once."""
    found = [own(tensor).untyped_storage() for tensor in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in found}.values())


def real_steps(configs: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """What a real rank holds and what its second step hands over, for each layout."""
    with join(Ranks.from_environment(), "cpu", 10.0) as group:
        return {
            layout: real_step(RunConfig.model_validate_json(config), group)
            for layout, config in configs.items()
        }


def real_step(config: RunConfig, group: ProcessGroup) -> dict[str, Any]:
    mesh = Mesh.form(layout_of(config, group.size), group.ranks.rank)
    local = build_local_model(config, mesh, torch.device("cpu"), choices_of(config, group.size))
    sync, decoder = local.sync, local.decoder
    with torch.no_grad():
        for name, held in sync.parameters().items():
            whole = initial_value(config.model, name, held.placement.full_shape, 1)
            held.tensor.copy_(whole[held.placement.slices()])
    optimizer = build_optimizer(sync.updated(), config.optimizer)
    stepper = Stepper(
        decoder=decoder,
        sync=sync,
        optimizer=optimizer,
        group=group,
        mesh=mesh,
        device=torch.device("cpu"),
        num_microbatches=config.training.global_batch_size // mesh.size("dp"),
        max_norm=config.training.clip_grad,
        pipeline=local.pipeline,
    )
    found: dict[str, Any] = {}

    def look() -> None:
        updated = [held.tensor for held in sync.gradients().values()]
        of_model = [value.grad for value in decoder.parameters() if value.grad is not None]
        found["gradients"] = Amount(sum(t.numel() for t in updated), storages([*updated, *of_model]))

    def batches() -> Iterator[Batch]:
        for number in count():
            generator = torch.Generator().manual_seed(100 * mesh.index("dp") + number)
            yield whole_sequences(torch.randint(51, (1, 16), generator=generator))

    stream = batches()
    for _ in range(2):
        sync.traffic.take()
        figures = stepper.step(stream, 1e-3, stop_requested=False, on_gradients=look)
        assert torch.isfinite(figures.grad_norm)
    held_by_name = sync.parameters()
    every = [*decoder.parameters(), *(value for _, value in sync.updated())]
    moments = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    return {
        **found,
        "traffic": dict(sync.traffic.take()),
        "shapes": {name: tuple(held.tensor.shape) for name, held in held_by_name.items()},
        "parameters": Amount(sum(held.tensor.numel() for held in held_by_name.values()), storages(every)),
        "moments": Amount(sum(own(value).numel() for value in moments), storages(moments)),
    }


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    """Of each of eight real ranks, by layout."""
    folder = tmp_path_factory.mktemp("layouts")
    configs = {
        layout: configured(folder, overrides).model_dump_json() for layout, overrides in LAYOUTS.items()
    }
    return on_ranks(real_steps, WORLD, configs, timeout=1700)


COUNTED = (0, 3, 7)
"""Ranks that are built and run without memory; the others are held against the formulas, to save minutes."""


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_that_are_not_there_hold_and_hand_over_what_eight_real_ones_do(
    layout: str, tmp_path: Path, real: list[dict[str, dict[str, Any]]]
) -> None:
    config = configured(tmp_path, LAYOUTS[layout])
    for one in run_dry(config, WORLD, COUNTED).ranks:
        assert one.traffic_source == one.gradients_source == "counted"
        assert counted_figures(one) == real[one.rank][layout]
    planned = PlannedWorld.of(config, WORLD)
    for rank in range(WORLD):
        resident, found = planned.resident(rank), real[rank][layout]
        assert resident == Resident(found["parameters"], found["gradients"], found["moments"])
        assert planned.traffic(rank) == found["traffic"]
        shapes = {name: placement.local_shape for name, placement in planned.held(rank).items()}
        assert shapes == found["shapes"]


@pytest.mark.parametrize(
    "layout", ["tp2-pp2-dp2-zero3", "tp4-sp-dp2-zero2-gpt-shared-keys", "tp4-sp-dp2-zero2-gpt-chunks"]
)
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
