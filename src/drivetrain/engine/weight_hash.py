"""Weights that several ranks hold alike are compared while training goes on, bit by bit, as one number for each tensor.

Replicas drift apart without a word: a flipped bit, a collective that one rank took otherwise, a parameter that was
left out of a reduction. Losses stay plausible, and what a checkpoint keeps is one rank's version.

Which ranks hold the same follows from what they hold: tensors of one name and one region of the whole parameter, on
whatever ranks, are replicas. So data-parallel ranks are compared, norms over tensor-parallel ones, heads of keys and
values that ranks share, and a tied embedding at both ends of a pipeline, by the same few lines.

The number is a sum over the tensor's words of 32 bits (16 for two-byte dtypes), each times an odd number that belongs
to its place, modulo 2**64. A change of one word changes it in every case, since an odd factor can be divided by.
Several changes cancel out with a chance of about 2**-32 at most, also those of words that change places.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drivetrain.archive.encoding import dumps
from drivetrain.engine.checkpoint.agreement import Agreement
from drivetrain.engine.parallel.gradient_sync import Held
from drivetrain.engine.parallel.placement import Placement

__all__ = ["Disagreement", "ReplicaCheck", "TensorHash"]

_WORD_OF = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_CHUNK = 1 << 16
_WORDS_AT_ONCE = 1 << 22
_SHOWN = 3


def _odd_numbers(count: int, stream: int) -> Tensor:
    """(count,) int64: odd numbers that look random, the same everywhere; the generator is Vigna's splitmix64."""
    z = np.arange(1, count + 1, dtype=np.uint64) + np.uint64(stream << 40)
    z *= np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(z.view(np.int64))


class TensorHash:
    """Hashes tensors on their device; keeps the factors of the places, half a MiB."""

    def __init__(self) -> None:
        self._within: Tensor | None = None
        self._across = torch.empty(0, dtype=torch.int64)

    @torch.no_grad()
    def __call__(self, values: Tensor) -> Tensor:
        """The hash of the bits of ``values`` (any shape, 1 to 8 bytes an element): int64 scalar on their device.

        No host synchronisation; at most 64 MiB of temporaries whatever the size.
        """
        words = values.detach().contiguous().view(-1).view(_WORD_OF[values.element_size()])
        within, across = self._factors(-(-len(words) // _CHUNK), words.device)
        sums = []
        for first in range(0, len(words), _WORDS_AT_ONCE):
            part = words[first : first + _WORDS_AT_ONCE]
            whole = len(part) // _CHUNK * _CHUNK
            if whole:
                sums.append((part[:whole].view(-1, _CHUNK).long() * within).sum(1))
            if whole < len(part):
                rest = part[whole:].long()
                sums.append((rest * within[: len(rest)]).sum(0, keepdim=True))
        if not sums:
            return torch.zeros((), dtype=torch.int64, device=words.device)
        chunks = torch.cat(sums)
        # One to one, and no longer linear: changes in several chunks do not meet in the same sum.
        folded = chunks ^ ((chunks >> 32) & 0xFFFFFFFF)
        return (folded * across).sum()

    def _factors(self, chunks: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Odd factors of the places in a chunk, and of ``chunks`` chunks."""
        if self._within is None or self._within.device != device:
            self._within = _odd_numbers(_CHUNK, 0).to(device)
        if len(self._across) < chunks or self._across.device != device:
            self._across = _odd_numbers(chunks, 1).to(device)
        return self._within, self._across[:chunks]


@dataclass(frozen=True)
class Disagreement:
    """A tensor whose bits differ between ranks that should hold the same.

    Attributes:
        name: of the parameter, with the region that was compared where it is not all of it.
        holders: its ranks in sets that agree with each other, the smallest set first.
    """

    name: str
    holders: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        *few, most = self.holders
        differing = "; ".join(_ranks(ranks) for ranks in few)
        return f"{self.name} on {differing} differs from that on {_ranks(most)}"


class ReplicaCheck:
    """Compares what ranks hold alike. Every rank of the run has one and calls it alike.

    Attributes:
        checks: how often it has compared.
        shared: tensors held by several ranks, in the latest comparison.
        agreed_at: the last step after which all agreed; None before there is one.
    """

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        self._hash = TensorHash()
        self.checks = 0
        self.shared = 0
        self.agreed_at: int | None = None

    def compare(self, step: int, parameters: Mapping[str, Held]) -> list[Disagreement]:
        """What differs after ``step``, in the order of the model on the first rank that holds it; the same list on
        every rank. Collective: 16 bytes a tensor of each rank are gathered by all of them.

        Args:
            parameters: all of this rank's, by global name (``GradientSync.parameters``).
        """
        held = {_key(name, one): (name, one) for name, one in parameters.items() if one.tensor.numel()}
        assert len(held) == sum(one.tensor.numel() > 0 for one in parameters.values()), "two names, one key"
        hashes = [self._hash(one.tensor) for _, one in held.values()]
        values = torch.stack(hashes).cpu().numpy() if hashes else np.empty(0, dtype=np.int64)
        table = np.stack([np.array(list(held), dtype=np.int64), values], axis=1)
        gathered = self._agreement.gather(table.tobytes())
        tables = [np.frombuffer(message, dtype=np.int64).reshape(-1, 2) for message in gathered]
        holders = _holders(tables)
        self.checks += 1
        self.shared = sum(sum(map(len, ranks.values())) > 1 for ranks in holders.values())
        differing = {key: ranks for key, ranks in holders.items() if len(ranks) > 1}
        if not differing:
            self.agreed_at = step
            return []
        names = self._names({key: _words(*held[key]) for key in differing if key in held})
        return [
            Disagreement(
                names[key], tuple(sorted(map(tuple, ranks.values()), key=lambda one: (len(one), one)))
            )
            for key, ranks in differing.items()
        ]

    def _names(self, own: Mapping[int, str]) -> Mapping[int, str]:
        """The tensors that differ in words, also those that this rank does not hold. Collective."""
        found: dict[int, str] = {}
        for message in self._agreement.gather(dumps({str(key): name for key, name in own.items()})):
            found |= {int(key): name for key, name in json.loads(message).items()}
        return found

    def in_words(self, step: int, differing: Sequence[Disagreement]) -> str:
        """One sentence: what differs, on which ranks, since when."""
        shown = "; ".join(map(str, differing[:_SHOWN]))
        more = f"; and {len(differing) - _SHOWN} more tensors" if len(differing) > _SHOWN else ""
        since = (
            f"after step {self.agreed_at} all of them still agreed"
            if self.agreed_at is not None
            else "it was the first comparison"
        )
        return (
            f"weights that must be equal on several ranks are not after step {step}: {shown}{more}; {since} "
            f"({self.shared} tensors compared)"
        )


def _holders(tables: Sequence[NDArray[np.int64]]) -> dict[int, dict[int, list[int]]]:
    """Key of a tensor → its hash → the ranks that have found it."""
    found: dict[int, dict[int, list[int]]] = {}
    for rank, table in enumerate(tables):
        for key, value in table.tolist():
            found.setdefault(key, {}).setdefault(value, []).append(rank)
    return found


def _key(name: str, held: Held) -> int:
    """Names parameter, dtype and region in 64 bits: equal on ranks that must hold equal bits, and on no others."""
    place = held.placement
    region = [(part.start, part.stop) for part in place.slices()]
    text = f"{name} {held.tensor.dtype} {place.full_shape} {region}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def _words(name: str, held: Held) -> str:
    return f"{name}{_region(held.placement)}"


def _region(placement: Placement) -> str:
    """``[0:16, :]``; nothing where it is the whole parameter."""
    parts = [
        ":" if (part.start, part.stop) == (0, size) else f"{part.start}:{part.stop}"
        for part, size in zip(placement.slices(), placement.full_shape, strict=True)
    ]
    return "" if set(parts) <= {":"} else f"[{', '.join(parts)}]"


def _ranks(ranks: Sequence[int]) -> str:
    *first, last = ranks
    return f"ranks {', '.join(map(str, first))} and {last}" if first else f"rank {last}"
