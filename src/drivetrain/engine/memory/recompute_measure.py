"""What a plan of recomputation makes of a rank's memory, seen on tensors without memory: no guess, the run's own code.

A whole step of the rank runs over fake tensors (:mod:`drivetrain.engine.dry_run_fake`) while its live bytes are counted
as :class:`~drivetrain.engine.memory.live.LiveBytes` counts them in a real one: weights, gradients, moments, buckets,
activations, what a repeated pass has alive at once. One layer alone tells what each choice of parts holds and costs.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from drivetrain.config import RunConfig, layout_of
from drivetrain.config.derive import microbatches_per_rank
from drivetrain.engine.dry_run_fake import FloatsAreFake, PipelineAlone, fake_group
from drivetrain.engine.dry_run_world import choices_of
from drivetrain.engine.memory.live import LiveBytes
from drivetrain.engine.memory.predict import batch_of_borders, whole_rows
from drivetrain.engine.memory.recompute import Plan, Recomputation
from drivetrain.engine.memory.recompute_choice import Choice, ChoiceCost, plan_of_choices, repeated_layers
from drivetrain.engine.model.batch import Batch, whole_sequences
from drivetrain.engine.model.decoder import Decoder
from drivetrain.engine.optimizer import build_optimizer
from drivetrain.engine.parallel.local_model import build_local_model
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.step import Stepper
from drivetrain.measure.flops import hardware_flops, model_flops

__all__ = ["cost_of_choices", "peak_of_step"]

_CPU = torch.device("cpu")


def cost_of_choices(config: RunConfig, choices: Sequence[Choice]) -> list[ChoiceCost]:
    """Each of ``choices`` for one layer of the whole model, as a rank without tensor parallelism has it.

    Tensor parallelism divides bytes and FLOPs alike, but for what every rank holds: the order of choices stays.
    """
    model = config.model.model_copy(update={"num_layers": 1})
    building = choices_of(config, 1)
    found = []
    for choice in choices:
        with FloatsAreFake():
            with torch.device("meta"):
                decoder = Decoder(model, building.compute_dtype)
            decoder.to_empty(device=_CPU)
            decoder.use_operators(building.operators)
            plan = plan_of_choices({"0": choice})
            Recomputation(decoder, plan)
            batch = _batch(config)
            entering = decoder.embed(batch).detach().requires_grad_()
            live = LiveBytes()
            with live:
                live.track("parameters", dict(decoder.named_parameters()))
                live.track("activations", {"entering": entering})
                before = live.live_bytes
                leaving = decoder.run_blocks(entering, batch)
                # What leaves it is the next layer's input, and counted there.
                held = live.live_bytes - before + entering.nbytes - leaving.nbytes
            with _ElementsWritten() as written:
                leaving.backward(torch.empty_like(leaving))
        tokens = batch.token_ids.numel()
        squares = batch.sum_squared_lengths
        repeated = repeated_layers(
            plan,
            [("0",)],
            with_last_product=building.operators.serves("linear"),
            hidden_dropout=model.hidden_dropout > 0,
        )
        products = (
            hardware_flops(model, recompute=repeated, tokens=tokens, sum_squared_lengths=squares).total
            - model_flops(model, tokens=tokens, sum_squared_lengths=squares).total
        )
        found.append(ChoiceCost(choice, held, products + written.elements))
    least = min(one.repeated_flops for one in found)
    # What backward writes in any case is no repetition.
    return [ChoiceCost(one.choice, one.held_bytes, one.repeated_flops - least) for one in found]


class _ElementsWritten(TorchDispatchMode):
    """Counts elements of what operators return, views left out."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.elements += sum(one.numel() for one in tree_iter(result) if isinstance(one, Tensor))
        return result


def peak_of_step(config: RunConfig, world_size: int, rank: int, plan: Plan) -> int:
    """Most bytes alive at once on ``rank`` in a step that ``plan`` recomputes; not while a process group is there.

    Two micro-batches stand for any number, but in a pipeline, where several are under way at once.
    """
    building = choices_of(config, world_size)
    with fake_group(rank, world_size) as group:
        mesh = Mesh.form(layout_of(config, world_size), rank)
        with FloatsAreFake():
            local = build_local_model(config, mesh, _CPU, building, pipeline_type=PipelineAlone)
            local.decoder.use_operators(building.operators)
            optimizer = build_optimizer(
                local.sync.updated(),
                config.optimizer,
                fused=building.fused_update,
                state_dtype=building.state_dtype,
            )
            _make_steps_real(optimizer)
            Recomputation(local.decoder, plan, stops_early=building.computes_in_one_piece)
            in_step = microbatches_per_rank(config, mesh.size("dp"))
            stepper = Stepper(
                decoder=local.decoder,
                sync=local.sync,
                optimizer=optimizer,
                group=group,
                mesh=mesh,
                device=_CPU,
                num_microbatches=in_step if local.pipeline is not None else min(2, in_step),
                # To scale by the norm would mean to look at its value; it is taken all the same.
                max_norm=0.0,
                pipeline=local.pipeline,
            )
            # Each a batch of its own, as a loader makes them: a limit counts what they hold, too.
            batches = [batch_of_borders(config, whole_rows(config)) for _ in range(stepper.num_microbatches)]
            if world_size > 1:
                # In the first step of all buckets are cut, by the order in which gradients come.
                stepper.step(iter(batches), config.optimizer.lr, stop_requested=False)
            live = LiveBytes()
            with live:
                live.track(
                    "parameters", {name: held.tensor for name, held in local.sync.parameters().items()}
                )
                live.track(
                    "optimizer", {name: held.tensor for name, held in local.sync.moments(optimizer).items()}
                )
                steps = (optimizer.state[parameter]["step"] for _, parameter in local.sync.updated())
                live.track("optimizer", {f"{index}/step": _plain(step) for index, step in enumerate(steps)})
                stepper.step(iter(batches), config.optimizer.lr, stop_requested=False)
            return live.peak_bytes


def _make_steps_real(optimizer: torch.optim.Optimizer) -> None:
    """Without a fused kernel the number of the update is read on the host."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not group["fused"]:
                optimizer.state[parameter]["step"] = torch.from_numpy(np.zeros((), dtype=np.float32))


def _plain(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _batch(config: RunConfig) -> Batch:
    shape = (config.training.micro_batch_size, config.model.seq_length)
    return whole_sequences(torch.zeros(shape, dtype=torch.int64))
