"""Kernels that Inductor generated, and the operators each of them holds, as far as its name tells.

A name lists the operators a kernel was made of, joined by the underscores that are in their names as well
(``triton_per_fused__to_copy_add_mean_mul_pow_rsqrt_3``): of several readings the one with the longest known names is
taken. Inductor names ten operators at most.
"""

import re
from collections.abc import Set
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from drivetrain.trace.classes import CLASSES
from drivetrain.trace.table import Category, EventTable

__all__ = ["GeneratedKernel", "generated_kernels", "operators_in"]

_GENERATED = re.compile(
    r"(^|_)(triton_[a-z]{2,4}|triton|cpp)_fused_(?P<operators>[A-Za-z0-9_]*?[A-Za-z][A-Za-z0-9_]*?)_\d+(_\d+[a-z]\w*)?$"
)
"""Of Triton and of C++, there behind the number of its graph; a suffix of Triton's tells about arguments."""

_NAMES = frozenset({
    "_fused_rms_norm", "_log_softmax", "_log_softmax_backward_data", "_softmax", "_softmax_backward_data",
    "_to_copy", "_unsafe_index", "_unsafe_index_put", "_unsafe_view", "adaptive_avg_pool2d", "as_strided",
    "bitwise_and", "bitwise_not", "bitwise_or", "constant_pad_nd", "convert_element_type",
    "embedding_dense_backward", "full_like", "gelu_backward", "index_add", "index_put", "index_select",
    "leaky_relu", "logical_and", "logical_not", "logical_or", "masked_fill", "mse_loss", "native_batch_norm",
    "native_dropout", "native_dropout_backward", "native_group_norm", "native_layer_norm",
    "native_layer_norm_backward", "new_full", "new_zeros", "nll_loss_backward", "nll_loss_forward", "ones_like",
    "rms_norm", "scalar_tensor", "scatter_add", "select_backward", "sigmoid_backward", "silu_backward",
    "slice_backward", "slice_scatter", "split_with_sizes", "tanh_backward", "threshold_backward", "var_mean",
    "zeros_like",
})  # fmt: skip
"""Operators whose names hold underscores."""


@dataclass(frozen=True)
class GeneratedKernel:
    """All calls of one generated kernel."""

    name: str
    kind: str
    """Class, of ``CLASSES``."""
    operators: tuple[str, ...]
    """Names in ``aten``, in the order of the kernel's name."""
    count: int
    total_ns: int


def operators_in(name: str, known: Set[str] = frozenset()) -> tuple[str, ...]:
    """The operators that a kernel of this name was made of; empty where it is no name of Inductor's, or tells none.

    Args:
        name: of the kernel.
        known: names with underscores to look for, beside those that are built in.
    """
    match = _GENERATED.search(name)
    if match is None:
        return ()
    parts = match["operators"].split("_")
    found, begin = [], 0
    while begin < len(parts):
        longest = max(
            (end for end in range(begin + 1, len(parts) + 1) if _is_name(parts[begin:end], known)),
            # A leading underscore is part of a name, known or not.
            default=begin + 2 if not parts[begin] and begin + 1 < len(parts) else begin + 1,
        )
        found.append("_".join(parts[begin:longest]))
        begin = longest
    return tuple(name for name in found if name)


def _is_name(parts: list[str], known: Set[str]) -> bool:
    name = "_".join(parts)
    return name in _NAMES or name in known


def generated_kernels(events: EventTable, kind: NDArray[np.uint8]) -> tuple[GeneratedKernel, ...]:
    """Generated kernels that ran, most time first: on a device, or on the host where they were named there.

    Args:
        events: the table.
        kind: its classification, shape (n,).
    """
    known = {name.removeprefix("aten::") for name in events.names if name.startswith("aten::")}
    operators = {index: operators_in(name, known) for index, name in enumerate(events.names)}
    told = np.array([bool(operators[index]) for index in range(len(events.names))], np.bool_)
    if not told.any():
        return ()
    ran = (events.category == np.uint8(Category.KERNEL)) | (events.category == np.uint8(Category.CPU_OP))
    rows = np.flatnonzero(ran & told[events.name] & (kind > 0))
    found = []
    for index in np.unique(events.name[rows]).tolist():
        mine = rows[events.name[rows] == index]
        # The class that most of its time is of: a kernel may serve several operators' regions.
        time = np.bincount(kind[mine], weights=events.duration_ns[mine], minlength=len(CLASSES))
        found.append(
            GeneratedKernel(
                name=events.names[index],
                kind=CLASSES[int(time.argmax())],
                operators=operators[index],
                count=len(mine),
                total_ns=int(events.duration_ns[mine].sum()),
            )
        )
    return tuple(sorted(found, key=lambda kernel: (-kernel.total_ns, kernel.name)))
