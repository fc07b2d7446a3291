"""Counts one training step of a configuration, in a process of its own; prints one JSON object.

python -m harness.level_counts PRESET [SECTION.FIELD=VALUE ...]
"""

import json
import sys
from collections.abc import Sequence

import torch
from torch.autograd.profiler_util import FunctionEvent

from drivetrain.config import RunConfig, load_config
from drivetrain.engine.devices import select_device
from drivetrain.engine.memory.limit import count_step
from drivetrain.engine.model.batch import whole_sequences
from drivetrain.engine.model.decoder import Decoder
from drivetrain.engine.model.initialization import initialize
from drivetrain.engine.optimisations.implementation import Building
from drivetrain.engine.optimisations.in_effect import Optimisations
from drivetrain.engine.optimizer import build_optimizer, clip_gradients

NO_WORK = frozenset(
    f"aten::{name}"
    for name in (
        *(
            "view",
            "_unsafe_view",
            "reshape",
            "as_strided",
            "t",
            "transpose",
            "permute",
            "expand",
            "unsqueeze",
        ),
        *("squeeze", "select", "slice", "split", "chunk", "split_with_sizes", "unbind", "alias", "detach"),
        *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "flatten"),
        *(
            "unflatten",
            "item",
            "_local_scalar_dense",
            "result_type",
            "to",
            "narrow",
            "is_nonzero",
            "lift_fresh",
        ),
    )
)
"""Operators of torch that compute and copy nothing."""
WORK = ("aten::", "cpp_", "graph_", "drivetrain::")
"""Beginnings of the names of operators, of generated kernels, and of operators of our own."""


def built(config: RunConfig) -> tuple[Decoder, torch.optim.AdamW]:
    """The model with its optimisations in effect, and its optimizer, as a run builds them on one rank."""
    building = Building(config=config, device=select_device(config.run), num_ranks=1)
    optimisations = Optimisations(building)
    optimisations.prepare("choices")
    decoder = Decoder(config.model, building.compute_dtype)
    initialize(decoder, config.run.seed)
    building.decoder = decoder
    optimizer = build_optimizer(decoder, config.optimizer, fused=building.fused_update)
    optimisations.prepare("model")
    return decoder, optimizer


def working(event: FunctionEvent) -> bool:
    """Whether it is an operator, or a generated kernel, that does work and leaves none of it to another one."""
    if event.name in NO_WORK or not event.name.startswith(WORK):
        return False
    return not any(child.name.startswith(WORK) and child.name not in NO_WORK for child in event.cpu_children)


def main(arguments: Sequence[str]) -> None:
    """The command."""
    # Generated kernels show under their own names then.
    torch._inductor.config.cpp.enable_kernel_profile = True
    config = load_config(arguments[0], list(arguments[1:])).config
    torch.set_num_threads(config.run.num_threads or 1)
    decoder, optimizer = built(config)
    size = (config.training.micro_batch_size, config.model.seq_length)
    batch = whole_sequences(torch.randint(config.model.vocab_size, size))

    def step() -> None:
        (decoder.loss_sum(batch) / batch.num_valid_tokens).backward()
        clip_gradients(decoder.parameters(), config.training.clip_grad)
        optimizer.step()

    step()
    optimizer.zero_grad()
    memory = count_step(step, decoder=decoder, optimizer=optimizer, limit_bytes=None)

    def blocks_alone(layers: int) -> int:
        names = list(decoder.blocks)[:layers]
        decoder.zero_grad()
        x_TD = decoder.embed(batch).detach().requires_grad_()
        decoder.run_blocks(x_TD, batch, names).sum().backward()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
            decoder.run_blocks(x_TD, batch, names).sum().backward()
        return sum(working(event) for event in profiled.events() or ())

    # What both share (the rotation, the sum at the end) falls out of the difference.
    per_layer = blocks_alone(2) - blocks_alone(1)
    counted = {
        "live_bytes": memory.peak_bytes,
        "activation_bytes": memory.by_category.get("activations", 0),
        "operators_per_layer": per_layer,
    }
    print(json.dumps(counted))


if __name__ == "__main__":
    main(sys.argv[1:])
