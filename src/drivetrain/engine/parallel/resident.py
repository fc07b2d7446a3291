"""What a rank holds between steps for each ZeRO stage, as formulas; a test counts live bytes against them.

With N elements of b bytes in the parameters that a rank has before data parallelism cuts them, n ranks in ``dp_shard``,
and S the elements of a share, the sum over parameters of ``ceil(rows / n) x (elements of a row)``, so S >= N / n:

=====  ==========  =========================  =======
stage  parameters  reduced gradients          moments
=====  ==========  =========================  =======
0      N b         N b                        2 N b
1      N b         N b                        2 R b
2      N b         S b                        2 R b
3      S b         S b                        2 R b
=====  ==========  =========================  =======

R <= S are the elements of this rank's own rows: its share without the padding. AdamW's two moments are counted, not its
step counts. Besides:

* stages 0 and 1 keep the memory of their gradients, the buckets, from step to step; with ``reduce_each_micro_batch`` a
  second N b lives during the step;
* stages 2 and 3 without ``reduce_each_micro_batch`` keep whole gradients, N b, until the last micro-batch's backward;
* in the first step gradients are whole on every rank until backward has ended, at stage 2 too, unless they are reduced
  with each micro-batch: the order in which they come decides what travels together;
* at stage 2, two buckets that are reduced have buffers of their own size; at stages 1 and 2, so have two that are
  gathered, and with ``overlap_param_gather`` all of them between the update and their first use, when neither
  activations nor whole gradients of stage 2 live;
* gradients that travel in bf16 have a copy in bf16 of each bucket under way, and what arrives of it;
* at stage 3 the gathered parameters of a block, and those outside of blocks, live while they are used; with
  ``prefetch_blocks`` those of so many more, and two buffers of gradients that travel.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from drivetrain.engine.parallel.buckets import rows_of_part

__all__ = ["Resident", "own_elements", "resident_bytes", "share_elements"]

Shapes = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Resident:
    """Bytes on one rank."""

    parameters: int
    gradients: int
    moments: int


def share_elements(shapes: Shapes, parts: int) -> int:
    """S: elements of a share of parameters of ``shapes``, padding included."""
    return sum(-(-shape[0] // parts) * prod(shape[1:]) for shape in shapes)


def own_elements(shapes: Shapes, part: int, parts: int) -> int:
    """R: elements of the rows that belong to rank ``part``."""
    return sum(rows_of_part(shape[0], part, parts)[1] * prod(shape[1:]) for shape in shapes)


def resident_bytes(
    shapes: Shapes, *, stage: int, part: int, parts: int, bytes_per_element: int = 4
) -> Resident:
    """Bytes between steps (gradients: between ``finish`` and ``step``).

    Args:
        shapes: of the parameters of this rank, after tensor and pipeline parallelism.
        part, parts: this rank's place in ``dp_shard``, and how many share.
    """
    whole = sum(prod(shape) for shape in shapes) * bytes_per_element
    share = share_elements(shapes, parts) * bytes_per_element
    own = own_elements(shapes, part, parts) * bytes_per_element
    return Resident(
        parameters=share if stage >= 3 else whole,
        gradients=share if stage >= 2 else whole,
        moments=2 * (own if stage >= 1 else whole),
    )
