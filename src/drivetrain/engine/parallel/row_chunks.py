"""The rows of an activation in chunks, each of which is multiplied and sent by itself.

Under sequence parallelism T rows are those of the ranks behind one another, and a collective hands each rank its own: a
chunk then has rows of *every* rank, the same of each, or what arrives would be in another order than without chunks.
"""

from dataclasses import dataclass

from torch import Tensor

__all__ = ["RowChunks"]


@dataclass(frozen=True)
class RowChunks:
    """Chunk i has the rows from ``rows * i // count`` on of each of ``parts`` equal parts, so none is empty, they
    differ by at most one row of a part, and none is left over.

    Attributes:
        rows: of a part.
        parts: of the whole: ranks whose rows lie behind one another; 1 where they are not told apart.
        count: of chunks.
    """

    rows: int
    parts: int
    count: int

    @staticmethod
    def of(rows: int, parts: int, wanted: int) -> "RowChunks":
        """``wanted`` chunks; as many as there are rows where those are fewer, and one where there are none."""
        assert wanted >= 1
        return RowChunks(rows, parts, max(1, min(wanted, rows)))

    def own(self, index: int) -> slice:
        """The rows of chunk ``index`` among those of one part."""
        return slice(self.rows * index // self.count, self.rows * (index + 1) // self.count)

    def behind_one_another(self, index: int) -> slice:
        """The rows of chunk ``index`` where all parts' rows of a chunk lie together, and chunks behind one another."""
        own = self.own(index)
        return slice(self.parts * own.start, self.parts * own.stop)

    def taken(self, whole: Tensor, index: int) -> Tensor:
        """Chunk ``index`` of ``whole`` (parts * rows, ...), contiguous: the first part's rows, the second's, ..."""
        if self.count == 1:
            return whole.contiguous()
        own = self.own(index)
        if self.parts == 1:
            return whole[own].contiguous()
        parts = whole.view(self.parts, self.rows, *whole.shape[1:])
        return parts[:, own].reshape(-1, *whole.shape[1:]).contiguous()

    def put(self, whole: Tensor, index: int, chunk: Tensor) -> None:
        """Write chunk ``index`` into ``whole`` (parts * rows, ...), contiguous."""
        parts = whole.view(self.parts, self.rows, *whole.shape[1:])
        own = self.own(index)
        parts[:, own] = chunk.view(self.parts, own.stop - own.start, *whole.shape[1:])

    def in_order(self, chunked: Tensor) -> Tensor:
        """From chunks behind one another (parts * rows, ...) to parts behind one another."""
        if self.count == 1 or self.parts == 1:
            return chunked
        whole = chunked.new_empty(chunked.shape)
        for index in range(self.count):
            self.put(whole, index, chunked[self.behind_one_another(index)])
        return whole
