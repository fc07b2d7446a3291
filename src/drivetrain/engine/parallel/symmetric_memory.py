"""Torch's fused operators over symmetric memory: a product and the collective before or behind it in one call.

Ranks of one machine read each other's device memory. ``fused_all_gather_matmul`` multiplies a rank's rows while it
copies those of the next one; ``fused_matmul_reduce_scatter`` computes what one rank gets while another fetches what is
finished. Wang et al. 2023 (ASPLOS); "async-TP" of torch, whose compiler pass finds the two patterns inside graphs. Our
collectives are outside of graphs, so the operators are called here.

They are operators for CUDA tensors. **None of this has run on a GPU**: tests give torch's own fallbacks, which gather
and multiply one after the other, to the same operators on a CPU.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.engine.parallel.collectives import Group
from drivetrain.engine.parallel.fused_calls import FusedCalls
from drivetrain.errors import EnvironmentFault

__all__ = ["SYMMETRIC_SPAN", "SymmetricMemory", "meet", "why_not_in_this_build"]

SYMMETRIC_SPAN = "drivetrain/tp_symmetric/"
"""Begins the name of the region of a profile around a fused call; the kind of its collective follows."""
_ARGUMENTS = {
    "fused_all_gather_matmul": ["Tensor", "List[Tensor]", "int", "str", "bool"],
    "fused_matmul_reduce_scatter": ["Tensor", "Tensor", "str", "int", "str"],
}
"""Types of what the operators take, in torch 2.13, and in its sources from before 2.11 on."""


def why_not_in_this_build() -> str | None:
    """Why this torch cannot be asked for the operators; None: it can."""
    try:
        import torch.distributed._symmetric_memory  # defines them
    except (ImportError, RuntimeError) as error:
        return f"torch {torch.__version__} has no symmetric memory ({error})"
    for name, expected in _ARGUMENTS.items():
        operator = getattr(torch.ops.symm_mem, name, None)
        if operator is None:
            return f"torch {torch.__version__} has no operator symm_mem::{name}"
        found = [str(argument.type) for argument in operator.default._schema.arguments]
        if found != expected:
            return f"symm_mem::{name} of torch {torch.__version__} takes other arguments: {', '.join(found)}"
    return None


def meet(group: dist.ProcessGroup, device: torch.device) -> None:
    """Have the ranks of ``group`` find each other's memory, which the first call would do. Collective.

    Raises:
        EnvironmentFault: they cannot.
    """
    from torch.distributed import _symmetric_memory

    name = group.group_name
    enable = _symmetric_memory.enable_symm_mem_for_group
    if not hasattr(enable, "__deprecated__"):  # Later versions need no call, and warn of one.
        enable(name)
    if device.type != "cuda":
        return
    try:
        _symmetric_memory.get_symm_mem_workspace(name, min_size=1)
    except RuntimeError as error:
        first_line = str(error).strip().split("\n", 1)[0][:300]
        ranks = ", ".join(map(str, dist.get_process_group_ranks(group)))
        raise EnvironmentFault(
            f"overlap.tp_symmetric_memory = true: ranks {ranks} cannot share memory ({first_line}); nearest legal "
            "value: false"
        ) from error


class SymmetricMemory:
    """The fused operators over one group of ranks: counted, and shown in profiles.

    Args:
        calls: where they are counted.
    """

    def __init__(self, group: Group, calls: FusedCalls) -> None:
        self._group = group
        self._calls = calls
        self._name = group.process_group.group_name

    def gather_and_multiply(
        self, shard: Tensor, weights: Sequence[Tensor], *, keep: bool
    ) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        """The rows of all ranks, multiplied.

        Args:
            shard: (T / ranks, K), this rank's rows.
            weights: (K, N) each, in the dtype of the rows.
            keep: whether the gathered rows are wanted.

        Returns:
            The rows of all ranks, (T, K), or None; and a (T, N) for each weight.
        """
        self._group.traffic.record(self._group.name, "all_gather", shard.nbytes)
        self._calls.gathers += 1
        with torch.profiler.record_function(f"{SYMMETRIC_SPAN}all_gather"):
            rows, products = torch.ops.symm_mem.fused_all_gather_matmul(
                shard.contiguous(), list(weights), 0, self._name, return_A=keep
            )
        return rows, tuple(products)

    def multiply_and_scatter(self, x: Tensor, weight: Tensor) -> Tensor:
        """This rank's rows of the sum over ranks of ``x @ weight``.

        Args:
            x: (T, K); the ranks divide T.
            weight: (K, N), of the same dtype.

        Returns:
            (T / ranks, N).
        """
        assert x.shape[0] % self._group.size == 0, f"{self._group.size} ranks do not divide {x.shape[0]}"
        # What travels is the product: as many bytes as a reduce-scatter of it is handed.
        self._group.traffic.record(
            self._group.name, "reduce_scatter", x.shape[0] * weight.shape[1] * x.element_size()
        )
        self._calls.scatters += 1
        with torch.profiler.record_function(f"{SYMMETRIC_SPAN}reduce_scatter"):
            out: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(
                x.contiguous(), weight, "sum", 0, self._name
            )
        return out
