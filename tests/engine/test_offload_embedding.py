"""The input embedding on the host: the same numbers to the bit, the rows that travel, when they do, what is refused."""

from collections.abc import Iterator

import pytest
import torch

from drivetrain.archive.reader import open_run
from drivetrain.catalogue.rules import all_rules
from drivetrain.config import LaunchFacts, layout_of, load_config, violations
from drivetrain.engine.devices import Device
from drivetrain.engine.initial_state import initialize_weights
from drivetrain.engine.memory.offload_copies import CopyEngine
from drivetrain.engine.memory.offload_embedding import EmbeddingOffload
from drivetrain.engine.model.batch import Batch, whole_sequences
from drivetrain.engine.model.decoder import Decoder, Embedding
from drivetrain.engine.optimisations.embedding_offload import IMPLEMENTATION
from drivetrain.engine.optimisations.implementation import Building
from drivetrain.engine.optimizer import build_optimizer
from drivetrain.engine.parallel.local_model import build_local_model
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.process_group import Ranks, join
from drivetrain.engine.step import Stepper
from runs_on_the_spot import Tiny, losses_of
from tiny_training import LLAMA

CPU = torch.device("cpu")
ON = "memory.offload_embedding=true"
UNTIED = "model.untie_embeddings_and_output_weights=true"
FEW = [
    "training.micro_batch_size=2",
    "training.global_batch_size=4",
    "training.train_iters=4",
    "training.eval_interval=2",
    "training.eval_iters=1",
]
ROWS, WIDTH = 50, 8
MODEL = LLAMA.model_copy(update={"vocab_size": ROWS, "hidden_size": WIDTH})


@pytest.fixture
def engine() -> Iterator[CopyEngine]:
    engine = CopyEngine(CPU)
    yield engine
    engine.close()


def batches(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(2)
    return [whole_sequences(torch.randint(20, (2, 6), generator=generator)) for _ in range(count)]


def plain() -> Embedding:
    embedding = Embedding(ROWS, WIDTH)
    with torch.no_grad():
        embedding.weight.copy_(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)))
    return embedding


def at_home(engine: CopyEngine) -> tuple[Embedding, EmbeddingOffload]:
    decoder, offload = Decoder(MODEL, torch.float32), EmbeddingOffload(engine)
    offload.take_home(decoder)
    embedding = decoder.embedding
    assert embedding is not None
    assert embedding.weight is offload.weight
    with torch.no_grad():
        embedding.weight.copy_(plain().weight)
    return embedding, offload


@pytest.mark.parametrize("announced", [True, False])
def test_rows_and_the_sum_of_gradients_over_micro_batches_are_those_of_the_whole_matrix(
    announced: bool, engine: CopyEngine
) -> None:
    wanted, (embedding, offload) = plain(), at_home(engine)
    for batch in batches(3):
        factors = torch.randn(batch.token_ids.numel(), WIDTH)
        rows = wanted(batch.token_ids.flatten())
        (rows * factors).sum().backward()
        if announced:
            offload.announce(batch)
            offload.arrived(batch, batch)
        found = offload.look_up(batch)
        assert torch.equal(found, rows)
        (found * factors).sum().backward()
    assert wanted.weight.grad is not None
    assert embedding.weight.grad is not None
    assert not embedding.weight.grad.is_sparse
    assert torch.equal(embedding.weight.grad, wanted.weight.grad)
    assert wanted.weight.grad.abs().sum() > 0


def test_distinct_rows_travel_once_and_their_gradients_come_back(engine: CopyEngine) -> None:
    _, offload = at_home(engine)
    (batch,) = batches(1)
    distinct = batch.token_ids.unique().numel()
    assert distinct < batch.token_ids.numel()
    offload.look_up(batch).sum().backward()
    moved = engine.take()
    assert moved.to_device_bytes == distinct * WIDTH * 4 + batch.token_ids.numel() * 8
    assert moved.to_host_bytes == distinct * WIDTH * 4
    assert offload.rows_moved == distinct


def test_rows_that_were_announced_are_not_copied_again_and_serve_their_own_batch_alone(
    engine: CopyEngine,
) -> None:
    embedding, offload = at_home(engine)
    first, second = batches(2)
    offload.announce(first)
    offload.announce(second)
    begun = offload.rows_moved
    offload.arrived(second, second)
    offload.arrived(first, first)
    # Somebody else asks in between, with equal ids.
    other = whole_sequences(first.token_ids.clone())
    with torch.no_grad():
        for batch in (first, second):
            assert torch.equal(offload.look_up(batch), embedding(batch.token_ids.flatten()))
        assert offload.rows_moved == begun
        assert torch.equal(offload.look_up(other), embedding(other.token_ids.flatten()))
        # Once used, rows are of the past.
        embedding.weight.mul_(2)
        assert torch.equal(offload.look_up(first), embedding(first.token_ids.flatten()))
    assert offload.rows_moved > begun


def test_a_run_has_the_losses_of_the_plain_one_evaluations_between_its_steps_included(
    tiny: Tiny,
) -> None:
    wanted = open_run(tiny.train(UNTIED, *FEW)["run"])
    document = tiny.train(UNTIED, *FEW, ON)
    run = open_run(document["run"])
    assert losses_of(run) == losses_of(wanted)
    assert [line["eval/loss"] for line in run.metrics() if "eval/loss" in line] == [
        line["eval/loss"] for line in wanted.metrics() if "eval/loss" in line
    ]
    first, second = (
        (one.path / "checkpoints" / "step-00000004" / "model" / "model.safetensors").read_bytes()
        for one in (run, wanted)
    )
    assert first == second
    assert all(line["offload/moved_bytes"] > 0 for line in run.metrics())
    (record,) = [one for one in document["optimisations"] if one["name"] == "embedding_offload"]
    assert (record["requested"], record["active"]) == (True, True)
    assert "no memory is saved" in record["reason"]


class Recorded(EmbeddingOffload):
    """Writes down what it is told."""

    def __init__(self, engine: CopyEngine, said: list[str]) -> None:
        super().__init__(engine)
        self.said = said

    def announce(self, batch: Batch) -> None:
        self.said.append("announce")
        super().announce(batch)

    def look_up(self, batch: Batch) -> torch.Tensor:
        self.said.append("look up")
        return super().look_up(batch)


def test_rows_of_the_next_micro_batch_are_on_their_way_before_this_one_is_computed(
    engine: CopyEngine,
) -> None:
    config = load_config("llama-2m", [UNTIED, "run.device=cpu", "fusion.compile=false"]).config
    said: list[str] = []
    building = Building(config=config, device=Device("cpu", "test", CPU, 1), num_ranks=1)
    building.embedding_offload = Recorded(engine, said)
    with join(Ranks(), "cpu", 2.0) as group:
        mesh = Mesh.form(layout_of(config, 1), 0, "cpu")
        local = build_local_model(config, mesh, CPU, building)
        initialize_weights(local.sync, config)
        stepper = Stepper(
            decoder=local.decoder,
            sync=local.sync,
            optimizer=build_optimizer(local.sync.updated(), config.optimizer),
            group=group,
            mesh=mesh,
            device=CPU,
            num_microbatches=3,
            max_norm=1.0,
            pipeline=None,
            offload=engine,
            embedding=building.embedding_offload,
        )
        stepper.step(iter(batches(3)), 1e-3, stop_requested=False)
    assert said == ["announce", "announce", "look up", "announce", "look up", "look up"]


def broken(*overrides: str) -> dict[str, str]:
    config = load_config("llama-2m", overrides).config
    return {found.rule: str(found) for found in violations(config, LaunchFacts(world_size=2), all_rules())}


@pytest.mark.parametrize(
    ("overrides", "rule", "nearest"),
    [
        ([], "offloaded-embedding-is-only-looked-up", "model.untie_embeddings_and_output_weights = true"),
        (
            [UNTIED, "parallelism.tensor_model_parallel_size=2"],
            "offloaded-embedding-is-whole",
            "memory.offload_embedding = false",
        ),
        ([UNTIED, "parallelism.zero_stage=3"], "offloaded-embedding-is-whole", "zero_stage = 2"),
        (
            [UNTIED, "memory.optimizer_offload_fraction=0.5"],
            "offloaded-embedding-goes-together",
            "memory.optimizer_offload_fraction = 0",
        ),
        (
            [UNTIED, "precision.params_dtype=fp16"],
            "offloaded-embedding-goes-together",
            "precision.params_dtype = bf16",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_with_what_would(
    overrides: list[str], rule: str, nearest: str
) -> None:
    overrides = [
        f"model.untie_embeddings_and_output_weights={'true' if UNTIED in overrides else 'false'}",
        *overrides,
    ]
    assert rule not in broken(*overrides)
    found = broken(ON, *overrides)
    assert nearest in found[rule]


def test_ranks_that_sum_gradients_on_a_gpu_go_on_without_it_and_say_why() -> None:
    config = load_config("llama-2m", [ON, UNTIED]).config
    for ranks, active in ((1, True), (2, False)):
        device = Device("cuda", "no such device is asked for anything", torch.device("cuda"), 1)
        building = Building(config=config, device=device, num_ranks=ranks)
        status = IMPLEMENTATION.prepare(building)
        assert status.active is active
        assert (building.embedding_offload is not None) is active
        assert active or "on the host" in (status.reason or "")


def test_without_it_the_model_looks_up_its_own_rows() -> None:
    decoder = Decoder(load_config("llama-2m", [UNTIED]).config.model, torch.float32)
    assert decoder.look_up is None
