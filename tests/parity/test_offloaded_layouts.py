"""Offload on several ranks changes no bit of losses, weights and optimizer state: ZeRO, pipelines, tensor parallelism.

Each rank takes steps without and steps with every plan, from equal weights and random numbers.
"""

from typing import Any

import pytest
import torch
from memory_layouts import COMPILED, PP, SP, Case, unequal
from parity_cases import gpt, llama, micro_batches

from drivetrain.catalogue.rules import all_rules
from drivetrain.config import RunConfig, layout_of, violations
from drivetrain.config.rules import LaunchFacts
from drivetrain.engine.checkpoint import held_state
from drivetrain.engine.devices import Device
from drivetrain.engine.initial_state import initialize_weights
from drivetrain.engine.memory.offload_optimizer import OffloadedAdamW
from drivetrain.engine.optimisations.implementation import Building
from drivetrain.engine.optimisations.in_effect import Optimisations
from drivetrain.engine.optimizer import build_optimizer
from drivetrain.engine.parallel.local_model import build_local_model
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.process_group import ProcessGroup
from drivetrain.engine.random_state import seed_everything
from drivetrain.engine.step import Stepper
from rank_processes import on_kept_ranks, on_ranks

STEPS = 3
UNTIED = {"untie_embeddings_and_output_weights": True}
PLANS: dict[str, dict[str, Any]] = {
    "states 0.3": {"optimizer_offload_fraction": 0.3},
    "states 1": {"optimizer_offload_fraction": 1.0},
    "one layer": {"cpu_offloading_num_layers": 1},
    "all layers and states": {"cpu_offloading_num_layers": 2, "optimizer_offload_fraction": 1.0},
}


CASES = {
    **{f"dp2-zero{stage}": Case(2, gpt(2, dropout=0.2), {"zero_stage": stage}) for stage in (0, 1, 2, 3)},
    "dp2-zero1-gather": Case(2, llama(2), {"zero_stage": 1}, {"overlap_param_gather": True}),
    "dp2-zero3-prefetch": Case(2, llama(4), {"zero_stage": 3}, {"prefetch_blocks": 1}),
    "pp2-1f1b": Case(2, llama(4), PP, micro_batches=4),
    "pp2-interleaved": Case(2, gpt(4, dropout=0.2), {**PP, "pipeline_schedule": "interleaved_1f1b"}),
    "pp2-zbv": Case(2, llama(4), {**PP, "pipeline_schedule": "zbv"}, micro_batches=4),
    "tp2-pp2": Case(4, llama(4), {**SP, **PP}),
}


EMBEDDING_PLANS: dict[str, dict[str, Any]] = {
    "rows": {"offload_embedding": True},
    "rows and all layers": {"offload_embedding": True, "cpu_offloading_num_layers": 2},
}
EMBEDDING_CASES = {
    **{
        f"dp2-zero{stage}": Case(2, gpt(2, dropout=0.2, **UNTIED), {"zero_stage": stage})
        for stage in (0, 1, 2)
    },
    "dp2-zero1-gather": Case(2, llama(2, untied=True), {"zero_stage": 1}, {"overlap_param_gather": True}),
    "dp2-each": Case(
        2, llama(2, untied=True), {"zero_stage": 2, "reduce_each_micro_batch": True}, micro_batches=4
    ),
    "pp2-1f1b": Case(2, llama(4, untied=True), PP, micro_batches=4),
    "pp2-zbv": Case(2, llama(4, untied=True), {**PP, "pipeline_schedule": "zbv"}, micro_batches=4),
}


def trained(config: RunConfig, group: ProcessGroup) -> dict[str, torch.Tensor]:
    """What this rank holds after some steps, copied, its losses, and how many bytes travelled in the last."""
    device = Device("cpu", "test", torch.device("cpu"), 1)
    mesh = Mesh.form(layout_of(config, group.size), group.ranks.rank, "cpu")
    building = Building(config=config, device=device, num_ranks=group.size)
    optimisations = Optimisations(building)
    optimisations.prepare("choices")
    local = build_local_model(config, mesh, device.torch_device, building)
    building.decoder = local.decoder
    optimizer = build_optimizer(
        local.sync.updated(), config.optimizer, fused=True, offload=building.state_offload
    )
    initialize_weights(local.sync, config)
    optimisations.prepare("model")
    stepper = Stepper(
        decoder=local.decoder,
        sync=local.sync,
        optimizer=optimizer,
        group=group,
        mesh=mesh,
        device=device.torch_device,
        num_microbatches=config.training.global_batch_size
        // (mesh.size("dp") * config.training.micro_batch_size),
        max_norm=0.5,
        pipeline=local.pipeline,
        offload=building.offload,
        embedding=building.embedding_offload,
    )
    found: dict[str, torch.Tensor] = {}
    moved = None
    for step in range(STEPS):
        seed_everything(5, mesh.index("dp"), mesh.index("pp"))
        batches = micro_batches(
            config.model, stepper.num_microbatches, mesh.index("dp"), mesh.size("dp"), step
        )
        figures = stepper.step(iter(batches), 1e-3, stop_requested=False)
        found[f"loss {step}"] = figures.loss_sum.detach().clone()
        moved = figures.offloaded
    state = held_state(local.sync, optimizer)
    found |= {name: held.tensor.clone() for name, held in {**state.weights, **state.optimizer}.items()}
    memory = config.memory
    if memory.optimizer_offload_fraction and not memory.cpu_offloading_num_layers:
        assert isinstance(optimizer, OffloadedAdamW)
        assert moved is not None
        assert moved.nbytes == optimizer.bytes_per_update > 0
        share = optimizer.host_bytes / sum(
            held.tensor.nbytes for name, held in state.optimizer.items() if not name.endswith("/step")
        )
        assert share == 1.0 if memory.optimizer_offload_fraction == 1 else 0 < share <= 0.3
    if building.embedding_offload is not None and local.decoder.embedding is not None:
        assert building.embedding_offload.rows_moved > 0
    if building.offload is not None:
        building.offload.close()
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_no_bit_of_weights_or_state_differs_on_any_rank(name: str) -> None:
    case = CASES[name]
    no_bit_differs(case, PLANS)


@pytest.mark.long
@pytest.mark.parametrize("name", EMBEDDING_CASES)
def test_no_bit_differs_where_the_embedding_is_on_the_host(name: str) -> None:
    no_bit_differs(EMBEDDING_CASES[name], EMBEDDING_PLANS)


def no_bit_differs(case: Case, plans: dict[str, dict[str, Any]]) -> None:
    for memory in plans.values():
        assert violations(case.config(**memory), LaunchFacts(world_size=case.world_size), all_rules()) == []
    for different in on_kept_ranks(unequal, case.world_size, trained, case, plans):
        assert different == []


@pytest.mark.long
@pytest.mark.parametrize("name", COMPILED)
def test_nor_does_one_where_blocks_are_compiled(name: str) -> None:
    plans = {name: PLANS[name] for name in ("one layer", "all layers and states")}
    for different in on_ranks(unequal, 2, trained, COMPILED[name], plans, timeout=270):
        assert different == []
