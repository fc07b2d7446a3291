"""What operators over lists of tensors ask of their lists."""

from collections.abc import Sequence

from torch import Tensor

from drivetrain.errors import DrivetrainError

__all__ = ["check_lists"]


def check_lists(**lists: Sequence[Tensor]) -> None:
    """Refuse lists that do not belong together: tensor by tensor of one shape, and each list in one floating dtype.

    Raises:
        DrivetrainError: they do not, or there is nothing in them.
    """
    (first_name, first), *others = lists.items()
    if not first:
        raise DrivetrainError(f"{first_name} is empty; at least one tensor is needed")
    for name, tensors in others:
        if len(tensors) != len(first):
            raise DrivetrainError(
                f"there are {len(first)} {first_name} and {len(tensors)} {name}; each tensor of the one needs one of "
                "the other"
            )
        for number, (one, other) in enumerate(zip(first, tensors, strict=True)):
            if one.shape != other.shape:
                raise DrivetrainError(
                    f"{first_name}[{number}] is {tuple(one.shape)} and {name}[{number}] {tuple(other.shape)}; they "
                    "are to be alike"
                )
    for name, tensors in lists.items():
        dtype = tensors[0].dtype
        if not dtype.is_floating_point:
            raise DrivetrainError(f"{name}[0] is {dtype}; floating-point numbers are needed")
        for number, one in enumerate(tensors):
            if one.dtype != dtype:
                raise DrivetrainError(
                    f"{name}[0] is {dtype} and {name}[{number}] {one.dtype}; a call takes one dtype, so split the list"
                )
