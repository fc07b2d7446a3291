"""What a parallel run says of itself: equal weights where they are held twice, and the bytes of the closed formulas."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from test_training_layouts import COMMON, LAYOUTS

from drivetrain.archive.reader import Run, open_run
from drivetrain.cli.train_command import EXIT_OF, _has_diverged
from drivetrain.config import LaunchFacts, RunConfig, idle_fields, layout_of, load_config, num_microbatches
from drivetrain.config.layout import stage_plan
from drivetrain.engine.creation import create_run
from drivetrain.engine.data.corpus import ensure_corpus
from drivetrain.engine.model.batch import Batch
from drivetrain.engine.model.huggingface_state import expected_shapes
from drivetrain.engine.parallel.pipeline import payload_bytes
from drivetrain.engine.parallel.process_group import Ranks
from drivetrain.engine.parallel.resident import share_elements
from drivetrain.engine.parallel.tensor_parallel_bytes import tensor_parallel_bytes
from drivetrain.engine.step import StepFigures, Stepper
from drivetrain.engine.training_run import TrainingRun
from rank_processes import on_kept_ranks
from runs_on_the_spot import Tiny

INTERVAL = "monitor.check_weight_hash_across_dp_replicas_interval"
STEPS = 3
FP32 = 4


@dataclass(frozen=True)
class Flip:
    """The lowest bit of the first element of ``name`` is another on ``rank`` after ``step``; None: everywhere right."""

    name: str
    rank: int
    step: int


@dataclass(frozen=True, kw_only=True)
class FlippingStepper(Stepper):
    """Trains rightly, and then a bit of one rank's weights is another."""

    flip: Flip
    count: list[int]

    def step(self, batches: Iterator[Batch], learning_rate: float, **options: Any) -> StepFigures:
        figures = super().step(batches, learning_rate, **options)
        self.count[0] += 1
        if (self.group.ranks.rank, self.count[0]) == (self.flip.rank, self.flip.step):
            held = self.sync.parameters()[self.flip.name].tensor
            held.view(-1)[:1].view(torch.int32).bitwise_xor_(1)
        return figures


def run_rank(path: str, flip: Flip | None) -> tuple[str, str | None]:
    from drivetrain.engine import worker

    assemble: Callable[..., TrainingRun] = worker.assemble

    def flipping(*arguments: Any) -> TrainingRun:
        run = assemble(*arguments)
        if flip is None:
            return run
        from dataclasses import replace

        parts = {name: getattr(run.stepper, name) for name in run.stepper.__dataclass_fields__}
        return replace(run, stepper=FlippingStepper(**parts, flip=flip, count=[0]))

    with mock.patch.object(worker, "assemble", flipping):
        outcome = worker.work(Path(path), Ranks.from_environment()).outcome
    return outcome.status, outcome.reason


def train(
    tiny: Tiny, layout: str, *overrides: str, flip: Flip | None = None
) -> tuple[Run, list[tuple[str, str | None]]]:
    """A run of three steps that compares its weights; how it ended on each rank."""
    world_size, sizes = LAYOUTS[layout]
    more = [
        f"training.train_iters={STEPS}",
        "training.eval_iters=0",
        "monitor.log_rank_times=true",
        *overrides,
    ]
    loaded = load_config(str(tiny.file), [*COMMON, *sizes, f"{INTERVAL}=1", *more])
    corpus = ensure_corpus(loaded.config.data, loaded.config.model)
    path = create_run(loaded, corpus, world_size=world_size, argv=["drivetrain"])
    ends = on_kept_ranks(run_rank, world_size, str(path), flip)
    return open_run(path), ends


def held_on(config: RunConfig, world_size: int, rank: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a rank's parameters before data parallelism cuts them, by the rules of docs/parallel.md."""
    layout = layout_of(config, world_size)
    place = layout.coordinates(rank)
    shapes = {name: tuple(shape) for name, shape in expected_shapes(config.model).items()}
    if layout.pp > 1:
        plan = stage_plan(config)
        first, last = plan.ranks_of_ends
        ends = {"final_norm": {last}, "output": {last}, "embedding": {first}, "position_embedding": {first}}
        if not config.model.untie_embeddings_and_output_weights:
            ends["embedding"] = {first, last}
        blocks = plan.layers_on(place["pp"])
        shapes = {
            name: shape
            for name, shape in shapes.items()
            if (
                name.split(".")[1] in blocks
                if name.startswith("blocks.")
                else place["pp"] in ends[name.split(".")[0]]
            )
        }
    return {name: _cut(name, shape, config, layout.tp, place["tp"]) for name, shape in shapes.items()}


def _cut(name: str, shape: tuple[int, ...], config: RunConfig, ranks: int, index: int) -> tuple[int, ...]:
    if "norm" in name:
        return shape
    first, *rest = shape
    if name.startswith(("embedding", "output")):
        return (first // ranks + (index < first % ranks), *rest)
    if name.endswith(("attention.output.weight", "mlp.down.weight")):
        return (first, rest[0] // ranks)
    if name.endswith(("key.weight", "value.weight")):
        return (first // min(ranks, config.model.query_groups), *rest)
    return (first // ranks, *rest)


def expected_bytes(config: RunConfig, world_size: int, rank: int) -> dict[str, float]:
    """``comm/`` of a step, in closed form."""
    layout = layout_of(config, world_size)
    place = layout.coordinates(rank)
    model, count = config.model, num_microbatches(config, world_size)
    shapes = held_on(config, world_size, rank)
    stage = config.parallelism.zero_stage if layout.dp > 1 else 0
    parts = layout.size("dp_shard") if stage else 1
    reductions = count if config.parallelism.reduce_each_micro_batch else 1
    whole = FP32 * sum(map(prod, shapes.values()))
    share = FP32 * share_elements(list(shapes.values()), parts)
    tokens = config.training.micro_batch_size * model.seq_length
    found = dict.fromkeys(("tp", "pp", "dp", "dp_shard", "dp_replicate"), 0)
    if layout.dp > 1 and stage <= 1:
        found["dp"] += reductions * whole
    if stage in (1, 2):
        found["dp_shard"] += share
    if stage >= 2:
        found["dp_shard"] += reductions * parts * share
        found["dp_replicate"] += reductions * share if layout.size("dp_replicate") > 1 else 0
    if stage == 3:
        assert layout.pp == 1, "a pipeline gathers otherwise"
        blocks = FP32 * share_elements([shapes[name] for name in shapes if name.startswith("blocks.")], parts)
        found["dp_shard"] += count * (share + blocks)
    plan = stage_plan(config) if layout.pp > 1 else None
    ends = plan.ranks_of_ends if plan is not None else (0, 0)
    if layout.tp > 1:
        layers = None if plan is None else len(plan.layers_on(place["pp"]))
        found["tp"] += count * sum(
            tensor_parallel_bytes(
                model,
                layout.tp,
                sequence_parallel=config.parallelism.sequence_parallel,
                tokens=tokens,
                compute_dtype=torch.float32,
                layers=layers,
                first=place["pp"] == ends[0],
                last=place["pp"] == ends[1],
            ).values()
        )
    if plan is not None:
        hidden = tokens * model.hidden_size * FP32
        if config.parallelism.sequence_parallel:
            hidden //= layout.tp
        tied = FP32 * prod(shapes["embedding.weight"]) if place["pp"] in ends and ends[0] != ends[1] else 0
        found["pp"] += sum(payload_bytes(plan, place["pp"], count, hidden, tied, FP32).values())
    for dim, cuts in (("tp", layout.tp > 1), ("pp", layout.pp > 1), ("dp_shard", stage >= 1)):
        # One scalar of the gradient's norm.
        found[dim] += FP32 if cuts else 0
    return {f"comm/{dim}_bytes": float(value) for dim, value in found.items() if value}


def held_twice(config: RunConfig, world_size: int) -> int:
    """Tensors that several ranks hold alike between steps."""
    layout = layout_of(config, world_size)
    cut = config.parallelism.zero_stage == 3 and layout.dp > 1
    parts = layout.size("dp_shard") if cut else 1
    places: dict[object, int] = {}
    for rank in range(world_size):
        place = layout.coordinates(rank)
        for name, shape in held_on(config, world_size, rank).items():
            replicas = max(1, layout.tp // config.model.query_groups)
            of_heads = name.endswith(("key.weight", "value.weight"))
            tensor_part = 0 if "norm" in name else place["tp"] // replicas if of_heads else place["tp"]
            share = -(-shape[0] // parts)
            if share * (place["dp_shard"] if cut else 0) < shape[0]:
                key = name, tensor_part, place["dp_shard"] if cut else 0
                places[key] = places.get(key, 0) + 1
    return sum(ranks > 1 for ranks in places.values())


SHORT = ("dp2", "tp2-sp", "pp2", "zero2")
"""Each kind of parallelism; the others take minutes."""
WITHOUT_FORMULA = ("pp2-zero3", "pp2-zero3-zero-bubble", "tp2-pp2-zero3")
"""A pipeline gathers for each micro-batch or once, by its schedule."""


def logged(run: Run) -> Mapping[int, Sequence[Mapping[str, Any]]]:
    """The lines of every rank, and rank 0's in metrics.jsonl as number -1."""
    return {-1: run.metrics(), **run.ranks()}


@pytest.mark.parametrize(
    "layout", [name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in LAYOUTS]
)
def test_weights_agree_in_every_layout_and_metrics_have_the_bytes_of_the_formulas(
    layout: str, tiny: Tiny
) -> None:
    run, ends = train(tiny, layout)
    assert set(ends) == {("finished", None)}
    config, world_size = run.config(), LAYOUTS[layout][0]
    summary = run.summary()
    assert summary is not None
    shared = held_twice(config, world_size)
    assert summary["weight_hash"] == {"checks": STEPS + 1, "tensors_compared": shared, "agreed_at": STEPS}
    idle = [one.field for one in idle_fields(config, LaunchFacts(world_size))]
    assert (INTERVAL in idle) == (shared == 0), "without effect exactly where no two ranks hold the same"
    assert summary["wall"]["maintenance_s"]["weight_hash"] > 0
    if layout in WITHOUT_FORMULA:
        return
    largest: dict[str, float] = {}
    for rank, lines in logged(run).items():
        expected = expected_bytes(config, world_size, max(rank, 0))
        for line in lines:
            found = {
                key: value
                for key, value in line.items()
                if key.endswith("_bytes") and key.startswith("comm/")
            }
            assert found == expected, f"rank {rank}, step {line['step']}"
        for key, value in expected.items():
            largest[key] = max(largest.get(key, 0.0), value)
    assert len(run.ranks()) == world_size
    per_step = {f"comm/{dim}_bytes": value for dim, value in summary["communication_bytes_per_step"].items()}
    assert per_step == largest


FLIPS = {
    # Layout, flip, and what is said of it.
    "dp2": (
        Flip("blocks.0.mlp.down.weight", 1, 2),
        "blocks.0.mlp.down.weight on rank 0 differs from that on rank 1",
    ),
    # The norms are 32 long, and each of two ranks that share has 16 elements.
    "hsdp": (
        Flip("final_norm.weight", 3, 2),
        "final_norm.weight[16:32] on rank 1 differs from that on rank 3",
    ),
    "tp2": (
        Flip("blocks.3.attention_norm.weight", 1, 2),
        "blocks.3.attention_norm.weight on rank 0 differs from that on rank 1",
    ),
    "tp2-dp2": (
        Flip("blocks.3.attention_norm.weight", 2, 2),
        "blocks.3.attention_norm.weight on rank 2 differs from that on ranks 0, 1 and 3",
    ),
    # Four ranks of queries share two heads of keys.
    "tp4": (
        Flip("blocks.1.attention.key.weight", 2, 2),
        "blocks.1.attention.key.weight[8:16, :] on rank 2 differs from that on rank 3",
    ),
    "pp2": (Flip("embedding.weight", 1, 2), "embedding.weight on rank 0 differs from that on rank 1"),
    "zero2": (Flip("embedding.weight", 1, 2), "embedding.weight on rank 0 differs from that on rank 1"),
}


@pytest.mark.parametrize(
    "layout",
    [
        name if name in ("dp2", "tp2", "hsdp") else pytest.param(name, marks=pytest.mark.long)
        for name in FLIPS
    ],
)
def test_one_bit_on_one_rank_ends_the_run_on_all_and_is_named(layout: str, tiny: Tiny) -> None:
    flip, words = FLIPS[layout]
    run, ends = train(tiny, layout, "checkpoint.save_interval=1", flip=flip)
    reasons = {reason for _, reason in ends}
    assert {status for status, _ in ends} == {"diverged"}
    assert EXIT_OF["diverged"] == 1
    assert len(reasons) == 1
    reason = str(reasons.pop())
    assert reason.startswith(
        f"weights that must be equal on several ranks are not after step 2: {words}; after step 1"
    )
    end = run.end()
    assert end is not None
    assert (end["status"], end["reason"]) == ("failed", reason)
    (alarm,) = [event for event in run.events() if event["kind"] == "alarm"]
    assert (alarm["step"], alarm["agreed_at"], len(alarm["tensors"])) == (2, 1, 1)
    assert [folder.name for folder in (run.path / "checkpoints").iterdir()] == ["step-00000001"], (
        "weights of which nobody knows which are right are not kept"
    )
    assert _has_diverged(run.path, 0.0), "--max-restarts does not try it again"
    (run.path / "summary.json").unlink()
    assert not _has_diverged(run.path, 0.0), "as of a rank that has crashed, which is tried again"


# Every second step, and at the end alone.
@pytest.mark.parametrize("saving", ["checkpoint.save_interval=2", "checkpoint.save_interval=0"])
def test_no_checkpoint_keeps_weights_that_differ_however_seldom_they_are_compared(
    saving: str, tiny: Tiny
) -> None:
    run, ends = train(tiny, "dp2", f"{INTERVAL}=100", saving, flip=Flip("embedding.weight", 1, 2))
    assert {status for status, _ in ends} == {"diverged"}
    assert "embedding.weight on rank 0 differs from that on rank 1; after step 0" in str(ends[0][1])
    assert list((run.path / "checkpoints").glob("*")) == []


def test_without_an_interval_nothing_is_compared(tiny: Tiny) -> None:
    flip = Flip("embedding.weight", 1, 1)
    run, ends = train(tiny, "dp2", f"{INTERVAL}=0", flip=flip)
    assert {status for status, _ in ends} == {"finished"}, "the comparison is what finds it"
    summary = run.summary()
    assert summary is not None
    assert summary["weight_hash"] is None
