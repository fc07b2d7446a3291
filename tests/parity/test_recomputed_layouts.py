"""Recomputation on several ranks changes no bit of a gradient: tensor and pipeline parallelism, ZeRO, dropout.

Each rank takes a step without and a step with every plan, from equal weights and random numbers.
"""

from typing import Any

import pytest
import torch
from memory_layouts import COMPILED, PP, SP, TP, Case, unequal
from parity_cases import gpt, llama, micro_batches

from drivetrain.config import RunConfig, layout_of, violations
from drivetrain.config.rules import LaunchFacts
from drivetrain.engine.devices import Device
from drivetrain.engine.initial_state import initialize_weights
from drivetrain.engine.optimisations.implementation import Building
from drivetrain.engine.optimisations.in_effect import Optimisations
from drivetrain.engine.optimizer import build_optimizer
from drivetrain.engine.parallel.local_model import build_local_model
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.process_group import ProcessGroup
from drivetrain.engine.random_state import seed_everything
from drivetrain.engine.step import Stepper
from rank_processes import on_kept_ranks, on_ranks

PLANS: dict[str, dict[str, Any]] = {
    "full": {"recompute_granularity": "full"},
    "uniform, two": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 2,
    },
    "block, one": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    **{
        modules: {"recompute_granularity": "selective", "recompute_modules": modules}
        for modules in ("core_attn", "norm", "core_attn,mlp_act,norm", "core_attn,mlp,norm")
    },
}
IN_GRAPHS = ("full", "block, one", "core_attn")
"""What compiled blocks leave to recompute."""


CASES = {
    "tp2-pp2": Case(4, llama(4), {**TP, **PP}),
    "tp2-sp-pp2-gpt-dropout": Case(4, gpt(4, dropout=0.2), {**SP, **PP}),
    "tp2-sp-pp2-interleaved": Case(4, llama(8), {**SP, **PP, "pipeline_schedule": "interleaved_1f1b"}),
    "pp2-gpipe-dropout": Case(2, gpt(4, dropout=0.2), {**PP, "pipeline_schedule": "gpipe"}),
    "tp2-chunks": Case(2, llama(2), TP, {"tp_chunks": "2"}),
    "tp2-sp-chunks-dropout": Case(2, gpt(2, dropout=0.2), SP, {"tp_chunks": "2"}),
    "tp2-async": Case(2, llama(2), TP, {"async_tensor_model_parallel_allreduce": True}),
    **{f"dp2-zero{stage}": Case(2, gpt(4, dropout=0.2), {"zero_stage": stage}) for stage in (0, 1, 2, 3)},
    "dp2-zero1-gather": Case(2, llama(2), {"zero_stage": 1}, {"overlap_param_gather": True}),
    "dp2-zero3-prefetch": Case(2, llama(4), {"zero_stage": 3}, {"prefetch_blocks": 1}),
    "dp2-zero2-each": Case(2, llama(2), {"zero_stage": 2, "reduce_each_micro_batch": True}),
    "dp2-operators": Case(2, llama(2), {}, fusion={"level": "all", "linear_cross_entropy": "chunked"}),
    "tp2-dp2-zero3": Case(4, llama(4), {**TP, "zero_stage": 3}),
}


EXHAUSTIVE = {"dp2-operators", "tp2-sp-pp2-interleaved", "tp2-dp2-zero3"}
"""Each takes a quarter of a minute or more."""


def gradients(config: RunConfig, group: ProcessGroup) -> dict[str, torch.Tensor]:
    """What this rank holds of the gradients of one step, copied; and its losses."""
    device = Device("cpu", "test", torch.device("cpu"), 1)
    mesh = Mesh.form(layout_of(config, group.size), group.ranks.rank, "cpu")
    building = Building(config=config, device=device, num_ranks=group.size)
    building.operators.requested.update(_requested(config))
    optimisations = Optimisations(building)
    optimisations.prepare("choices")
    local = build_local_model(config, mesh, device.torch_device, building)
    building.decoder = local.decoder
    optimizer = build_optimizer(local.sync.updated(), config.optimizer, fused=False)
    initialize_weights(local.sync, config)
    optimisations.prepare("model")
    asked = config.memory.recompute_granularity != "none"
    assert optimisations.is_active("recompute") == asked
    stepper = Stepper(
        decoder=local.decoder,
        sync=local.sync,
        optimizer=optimizer,
        group=group,
        mesh=mesh,
        device=device.torch_device,
        num_microbatches=config.training.global_batch_size
        // (mesh.size("dp") * config.training.micro_batch_size),
        max_norm=0.0,
        pipeline=local.pipeline,
    )
    found: dict[str, torch.Tensor] = {}

    def keep() -> None:
        found.update({name: held.tensor.clone() for name, held in local.sync.gradients().items()})

    dp = mesh.index("dp"), mesh.size("dp")
    # The second step has other buckets, where their order is learned.
    for step in range(2):
        seed_everything(5, mesh.index("dp"), mesh.index("pp"))
        batches = micro_batches(config.model, stepper.num_microbatches, *dp, step)
        figures = stepper.step(iter(batches), 1e-3, stop_requested=False, on_gradients=keep)
        found[f"loss {step}"] = figures.loss_sum.detach().clone()
    found["drawn next"] = torch.rand(())
    return found


def _requested(config: RunConfig) -> dict[str, str]:
    from drivetrain.config import chosen_backend, operator_fields

    chosen = {name: chosen_backend(config.fusion, name) for name in operator_fields()}
    # By formulas that are compiled nowhere.
    return {name: "eager" if value == "auto" else value for name, value in chosen.items() if value != "off"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.exhaustive if name in EXHAUSTIVE else pytest.mark.long)
        for name in CASES
    ],
)
def test_no_bit_of_a_gradient_differs_on_any_rank(name: str) -> None:
    case = CASES[name]
    facts = LaunchFacts(world_size=case.world_size)
    for memory in PLANS.values():
        assert violations(case.config(**memory), facts) == []
    for different in on_kept_ranks(unequal, case.world_size, gradients, case, PLANS):
        assert different == []


@pytest.mark.long
@pytest.mark.parametrize("name", COMPILED)
def test_nor_does_one_where_blocks_are_compiled(name: str) -> None:
    plans = {plan: PLANS[plan] for plan in IN_GRAPHS}
    for different in on_ranks(unequal, 2, gradients, COMPILED[name], plans, timeout=270):
        assert different == []
