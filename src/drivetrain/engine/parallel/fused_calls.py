"""How many fused calls tensor-parallel layers make in a step, held against what they must make."""

from dataclasses import dataclass, field

__all__ = ["CALLS_OF_A_BLOCK", "FusedCalls"]

CALLS_OF_A_BLOCK = 4
"""Of each kind in forward and backward of a micro-batch. Forward two products gather (queries, keys and values; gate
and up) and two scatter (attention's output; down); backward it is the other way round."""


@dataclass
class FusedCalls:
    """Counts of one rank.

    Attributes:
        blocks: that this rank holds.
        gathers, scatters: calls so far.
        steps: that were counted.
        wrong: of the first step in which others were made than must be; None: there was none.
    """

    blocks: int = 0
    gathers: int = 0
    scatters: int = 0
    steps: int = 0
    wrong: str | None = None
    _before: tuple[int, int] = field(default=(0, 0), repr=False)

    def begin_step(self) -> None:
        """What was called before (an evaluation, a probe) is not the step's."""
        self._before = self.gathers, self.scatters

    def end_step(self, micro_batches: int) -> int:
        """Hold the step's calls against those that ``micro_batches`` must make; returns how many there were."""
        gathers, scatters = self.gathers - self._before[0], self.scatters - self._before[1]
        must = CALLS_OF_A_BLOCK * self.blocks * micro_batches
        self.steps += 1
        if (gathers, scatters) != (must, must) and self.wrong is None:
            self.wrong = (
                f"a step made {gathers} fused gathers and {scatters} fused scatters, where {self.blocks} blocks and "
                f"{micro_batches} micro-batches make {must} of each"
            )
        return gathers + scatters
