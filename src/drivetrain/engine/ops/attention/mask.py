"""Which keys a query sees, and what is added to its scores: the specification that every backend of attention reads.

A mask is stated, never inferred: document borders come as cumulative lengths, the alignment of queries with keys where
their numbers differ is named, and a window counts the keys that are seen, the query's own among them.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from drivetrain.errors import DrivetrainError

__all__ = ["CAUSAL", "FULL", "Alignment", "Documents", "Dropout", "Mask", "Span"]

Alignment = Literal["top_left", "bottom_right"]
"""Where a document has L queries and M keys: query i stands at key i (``top_left``, torch's SDPA), or at key
i + M - L (``bottom_right``, flash-attn; the last query stands at the last key)."""


class Span(NamedTuple):
    """One document: its queries are tokens ``first_q`` to ``last_q`` - 1, its keys ``first_k`` to ``last_k`` - 1."""

    first_q: int
    last_q: int
    first_k: int
    last_k: int
    prefix: int

    @property
    def queries(self) -> int:
        """Number of queries."""
        return self.last_q - self.first_q

    @property
    def keys(self) -> int:
        """Number of keys."""
        return self.last_k - self.first_k


class Documents:
    """Where documents lie among the tokens. A query sees keys of its own document only.

    Deliberately a plain class that holds tensors: torch.compile guards on the contents of tuples, and would compile
    anew for every packing.

    Args:
        cu_seqlens: (documents + 1,) cumulative lengths with a leading 0, on the host. Documents may be empty. Tokens
            from the last border on belong to no document: their outputs and gradients are 0.
        cu_seqlens_k: of the keys, where they are not those of the queries.

    Attributes:
        cu_seqlens_q, cu_seqlens_k: int32, on the CPU.
        borders_q, borders_k: the same as numbers.
        crosses: whether a document has not as many keys as queries.
        keyless: whether a document has queries and no keys.
        equal: whether all have as many queries and as many keys: whole sequences.
    """

    def __init__(
        self, cu_seqlens: Tensor | Sequence[int], cu_seqlens_k: Tensor | Sequence[int] | None = None
    ) -> None:
        self.cu_seqlens_q = _borders("cu_seqlens", cu_seqlens)
        same = cu_seqlens_k is None
        self.cu_seqlens_k = (
            self.cu_seqlens_q if cu_seqlens_k is None else _borders("cu_seqlens_k", cu_seqlens_k)
        )
        if len(self.cu_seqlens_q) != len(self.cu_seqlens_k):
            raise DrivetrainError(
                f"cu_seqlens has {len(self.cu_seqlens_q) - 1} documents, cu_seqlens_k {len(self.cu_seqlens_k) - 1}; "
                "give both the same number"
            )
        # Read once: a layer reads them in every step.
        self.borders_q: list[int] = self.cu_seqlens_q.tolist()
        self.borders_k: list[int] = self.borders_q if same else self.cu_seqlens_k.tolist()
        lengths = list(zip(_lengths(self.borders_q), _lengths(self.borders_k), strict=True))
        self.crosses = any(queries != keys for queries, keys in lengths)
        self.keyless = any(queries > 0 and keys == 0 for queries, keys in lengths)
        self.equal = len(set(lengths)) == 1

    @classmethod
    def of_lengths(cls, lengths: Sequence[int], lengths_k: Sequence[int] | None = None) -> "Documents":
        """Documents of these lengths, one after the other."""
        return cls(_cumulated(lengths), None if lengths_k is None else _cumulated(lengths_k))

    def __len__(self) -> int:
        return len(self.cu_seqlens_q) - 1


@dataclass(frozen=True)
class Dropout:
    """Attention weights are dropped with ``probability``, the others divided by 1 - ``probability``.

    Attributes:
        probability: at least 0, below 1.
        seed: which are dropped is a function of seed, head, query and key (:mod:`.dropout`), the same for each backend
            that serves it and in a recomputed forward pass; None: the backend draws from torch's generator.
    """

    probability: float
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.probability < 1.0:
            raise DrivetrainError(f"dropout probability {self.probability} is not in [0, 1)")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise DrivetrainError(f"dropout seed {self.seed} is not in [0, 2^63)")


@dataclass(frozen=True, eq=False)
class Mask:
    """The specification. With scale s, cap c and slope m_h, the score of query i at position p for key j is

        c tanh(s q·k / c) - m_h |p - j|

    and the weights are its softmax over the keys that are seen. Positions count from 0 in each document; p = i, or as
    ``alignment`` says. A query that sees no key gives 0, and its gradients are 0.

    Two masks are equal where every backend decides alike about them, and what is fastest was measured alike: borders,
    prefix lengths, slopes and seeds are values, as the elements of a tensor are.

    Attributes:
        causal: a query at position p sees keys j ≤ p. False: all.
        window: of those, the last ``window``, the key at p included: p - j < window. Needs ``causal``.
        prefix: keys j < prefix are seen by all queries of the document, besides those that ``causal`` allows; one
            number for all documents or one for each. Excludes ``window``.
        documents: a query sees keys of its own document only. None: all tokens are one document.
        alignment: must be stated where a document has not as many keys as queries and anything depends on positions.
        slopes: (H,) fp32 of ALiBi (Press et al., arXiv:2108.12409), one for each query head. Constants: slopes that
            require a gradient are refused, no kernel has one for them.
        softcap: c (Gemma 2, arXiv:2408.00118); above 0.
        dropout: of the weights.
    """

    causal: bool = True
    window: int | None = None
    prefix: int | Sequence[int] | None = None
    documents: Documents | None = None
    alignment: Alignment | None = None
    slopes: Tensor | None = None
    softcap: float | None = None
    dropout: Dropout | None = None

    def __post_init__(self) -> None:
        if self.window is not None:
            self._check_window(self.window)
        if self.prefix is not None:
            self._check_prefix(self.prefix)
        if self.alignment is not None and self.alignment not in get_args(Alignment):
            raise DrivetrainError(
                f"alignment {self.alignment!r} is neither {' nor '.join(get_args(Alignment))}"
            )
        if self.softcap is not None and not self.softcap > 0.0:
            raise DrivetrainError(f"softcap {self.softcap} is not above 0; None leaves scores uncapped")
        if self.slopes is not None:
            _check_slopes(self.slopes)

    def _check_window(self, window: int) -> None:
        if window < 1:
            raise DrivetrainError(
                f"window {window} is below 1: it counts the keys that a query sees, its own included; None has no limit"
            )
        if not self.causal:
            raise DrivetrainError(
                "a window needs causal = True: of keys on both sides of a query it says nothing"
            )

    def _check_prefix(self, prefix: int | Sequence[int]) -> None:
        if not self.causal:
            raise DrivetrainError("a prefix needs causal = True: without it all keys are seen already")
        if self.window is not None:
            raise DrivetrainError(
                "prefix and window exclude each other: which of the two wins is not defined"
            )
        lengths = [prefix] if isinstance(prefix, int) else list(prefix)
        if any(length < 0 for length in lengths):
            raise DrivetrainError(f"a prefix of {min(lengths)} keys; the least is 0")
        if not isinstance(prefix, int):
            documents = 1 if self.documents is None else len(self.documents)
            if len(lengths) != documents:
                raise DrivetrainError(
                    f"{len(lengths)} prefix lengths for {documents} documents; give one for each"
                )

    @property
    def kinds(self) -> tuple[str, ...]:
        """What it is made of, by name."""
        return (
            "causal" if self.causal else "full",
            *(["prefix"] if self.prefix is not None else []),
            *([f"window {self.window}"] if self.window is not None else []),
            *(["documents"] if self.documents is not None else []),
            *([self.alignment] if self.alignment is not None else []),
            *(["alibi"] if self.slopes is not None else []),
            *([f"softcap {self.softcap:g}"] if self.softcap is not None else []),
            *([f"dropout {self.dropout.probability:g}"] if self.dropout is not None else []),
            *(["seeded"] if self.seeded else []),
        )

    @property
    def seeded(self) -> bool:
        """Whether the seed of dropout is given."""
        return self.dropout is not None and self.dropout.seed is not None

    def __str__(self) -> str:
        return " + ".join(self.kinds)

    def _facts(self) -> Hashable:
        documents = self.documents
        return (
            *self.kinds,
            documents is not None and (documents.crosses, documents.keyless, documents.equal),
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mask) and self._facts() == other._facts()

    def __hash__(self) -> int:
        return hash(self._facts())

    def packed(self, documents: Documents) -> "Mask":
        """The same for these documents."""
        return replace(self, documents=documents)

    def crosses(self, tokens_q: int, tokens_k: int) -> bool:
        """Whether a document has not as many keys as queries."""
        return tokens_q != tokens_k if self.documents is None else self.documents.crosses

    def spans(self, tokens_q: int, tokens_k: int) -> list[Span]:
        """The documents among that many queries and keys, in order, empty ones included.

        Raises:
            DrivetrainError: borders lie beyond the tokens, or ``alignment`` is not stated where it matters.
        """
        borders_q, borders_k = [0, tokens_q], [0, tokens_k]
        if self.documents is not None:
            borders_q, borders_k = self.documents.borders_q, self.documents.borders_k
        for borders, tokens, what in ((borders_q, tokens_q, "queries"), (borders_k, tokens_k, "keys")):
            if borders[-1] > tokens:
                raise DrivetrainError(f"documents end at {borders[-1]}, but there are {tokens} {what}")
        documents = len(borders_q) - 1
        prefix = self.prefix or 0
        prefixes = [prefix] * documents if isinstance(prefix, int) else list(prefix)
        spans = [
            Span(*queries, *keys, length)
            for queries, keys, length in zip(pairwise(borders_q), pairwise(borders_k), prefixes, strict=True)
        ]
        if (self.causal or self.slopes is not None) and self.alignment is None:
            for number, span in enumerate(spans):
                if span.queries != span.keys:
                    raise DrivetrainError(
                        f"document {number} has {span.queries} queries and {span.keys} keys: state alignment, "
                        f"{' or '.join(get_args(Alignment))}"
                    )
        return spans


def _borders(name: str, given: Tensor | Sequence[int]) -> Tensor:
    borders = given if isinstance(given, Tensor) else torch.tensor(list(given), dtype=torch.int64)
    if borders.device.type != "cpu":
        raise DrivetrainError(
            f"{name} is on {borders.device}; give it on the CPU: the host cuts documents by it"
        )
    if borders.dtype not in (torch.int32, torch.int64) or borders.dim() != 1:
        raise DrivetrainError(
            f"{name} is {borders.dtype} {tuple(borders.shape)}; give one dimension of int32"
        )
    if len(borders) < 2 or int(borders[0]) != 0:
        raise DrivetrainError(
            f"{name} begins {borders[:2].tolist()}: it needs a leading 0 and the end of each document"
        )
    if int(borders.diff().min()) < 0:
        where = int((borders.diff() < 0).nonzero()[0])
        raise DrivetrainError(
            f"{name} falls from {int(borders[where])} to {int(borders[where + 1])} at document {where}"
        )
    if int(borders[-1]) >= 2**31:
        raise DrivetrainError(f"{name} ends at {int(borders[-1])}; int32 holds at most {2**31 - 1}")
    return borders.to(torch.int32).contiguous()


def _lengths(borders: Sequence[int]) -> list[int]:
    return [last - first for first, last in pairwise(borders)]


def _cumulated(lengths: Sequence[int]) -> list[int]:
    borders = [0]
    for length in lengths:
        borders.append(borders[-1] + length)
    return borders


def _check_slopes(slopes: Tensor) -> None:
    if slopes.requires_grad:
        raise DrivetrainError("slopes require a gradient, and no kernel computes one; give slopes.detach()")
    if slopes.dim() != 1 or slopes.dtype not in (torch.float32, torch.float64):
        raise DrivetrainError(
            f"slopes are {slopes.dtype} {tuple(slopes.shape)}; give fp32, one for each query head"
        )


CAUSAL = Mask()
FULL = Mask(causal=False)
