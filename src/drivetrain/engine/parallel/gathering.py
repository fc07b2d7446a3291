"""Whole tensors out of the parts that the ranks hold, for what looks at a model and does not train it."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from drivetrain.config.model import ModelConfig
from drivetrain.engine.model.huggingface_state import expected_shapes
from drivetrain.engine.parallel.gradient_norm import counts_here
from drivetrain.engine.parallel.gradient_sync import Held
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.process_group import ProcessGroup

__all__ = ["whole_tensors"]

_EVERY_DIMENSION = ("tp", "cp", "pp", "dp_shard", "dp_replicate")


@torch.no_grad()
def whole_tensors(
    model: ModelConfig, held: Mapping[str, Held], mesh: Mesh, group: ProcessGroup
) -> Iterator[tuple[str, Tensor]]:
    """Each parameter's tensor whole, fp32 on the CPU, on every rank, one after the other. Collective.

    Every element is contributed by one rank and added to zeros: values are those that the rank holds, to the bit.
    The whole of each travels, so this is for once and not for every step.
    """
    for name, shape in expected_shapes(model).items():
        whole = torch.zeros(shape, dtype=torch.float32)
        own = held.get(name)
        if own is not None and counts_here(own.placement, mesh, _EVERY_DIMENSION):
            whole[own.placement.slices()] = own.tensor.detach().to("cpu", torch.float32)
        group.sum_(whole)
        yield name, whole
