"""Which calls a configuration makes in a step: its own model, run once on tensors that have no values."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from drivetrain.config import RunConfig, operator_fields
from drivetrain.config.derive import microbatches_per_rank
from drivetrain.engine.data.corpus import ensure_corpus
from drivetrain.engine.data.loader import BatchLoader
from drivetrain.engine.data.progress import ProgressCallback, silent
from drivetrain.engine.model.batch import Batch, documents_of, whole_sequences
from drivetrain.engine.model.decoder import Decoder
from drivetrain.engine.ops.operator import Operator
from drivetrain.engine.ops.selection import Selection
from drivetrain.engine.ops.signature import Signature, signature_of
from drivetrain.engine.precision import compute_dtype
from drivetrain.errors import DrivetrainError

__all__ = [
    "LAYS_OUT",
    "Model",
    "Packing",
    "RecordedCall",
    "evaluations_per_step",
    "example_packings",
    "heaviest_first",
    "packings_of",
    "record_model",
    "recorded_as_served",
    "recorded_calls",
]

LAYS_OUT = frozenset({"qkv_product", "gate_up_product"})
"""Operators whose results lie in memory as their backend likes, and are what other operators are given."""
_DRAWN = 32
"""Micro-batches whose documents are looked at."""


class Model(Protocol):
    """What can be recorded: a decoder, or what behaves like one."""

    def use_operators(self, selection: Selection) -> None:
        """Compute by ``selection`` from here on."""

    def loss_sum(self, batch: Batch) -> Tensor:
        """One forward pass."""

    def train(self, mode: bool = True) -> Any:
        """From here on as in training, with dropout; or with False as in evaluation, without."""


@dataclass(frozen=True)
class RecordedCall:
    """A call that a configuration makes.

    Attributes:
        operator: what is computed.
        signature: on the device of the run.
        calls_per_step: on one rank, on average over micro-batches of several packings; of a call in evaluation, which
            comes once in many steps, on average over steps.
    """

    operator: Operator
    signature: Signature
    calls_per_step: float


@dataclass(frozen=True)
class Packing:
    """Micro-batches that are alike: all documents of one length, or not.

    Attributes:
        batch: one of them, on the host; its number of pairs of tokens that see each other is the middle one.
        share: of all micro-batches.
    """

    batch: Batch
    share: float


def evaluations_per_step(config: RunConfig) -> float:
    """How many evaluations a run makes, over its steps; 0: none. There is one after the last step in any case."""
    training = config.training
    if not training.eval_iters:
        return 0.0
    between = (training.train_iters - 1) // training.eval_interval if training.eval_interval else 0
    return (between + 1) / training.train_iters


def recorded_calls(
    config: RunConfig,
    device: str,
    packings: Sequence[Packing],
    chosen: Mapping[str, str],
    *,
    evaluation: bool = False,
    asked: Collection[str] | None = None,
) -> tuple[RecordedCall, ...]:
    """The calls of a step, those with most elements first; nothing is computed.

    Args:
        device: type of the device of the run.
        packings: of its micro-batches.
        chosen: backends of operators whose results are laid out as the backend likes; ``eager`` serves all others.
        evaluation: those of evaluation, which wants no gradients, instead of those of training.
        asked: operators that are asked for; None: all that a model can leave to one.

    Raises:
        DrivetrainError: layers are cut over ranks: their calls are not those of one model.
    """
    size = config.parallelism.tensor_model_parallel_size
    if size > 1:
        raise DrivetrainError(
            f"parallelism.tensor_model_parallel_size = {size}: the tuner records the calls of whole layers, and these "
            "are cut over ranks; without tensor parallelism it can: parallelism.tensor_model_parallel_size=1"
        )
    names = operator_fields() if asked is None else asked
    requested = {name: chosen.get(name, "eager") for name in names}
    with torch.device("meta"):
        decoder = Decoder(config.model, compute_dtype(config.precision))
    per_step = float(microbatches_per_rank(config, config.parallelism.data_parallel_size or 1))
    if evaluation:
        per_step *= config.training.eval_iters * evaluations_per_step(config)
    return record_model(decoder, requested, packings, per_step, device, evaluation=evaluation)


def recorded_as_served(
    config: RunConfig,
    device: str,
    packings: Sequence[Packing],
    choose: Callable[[RecordedCall], str],
    asked: Collection[str] | None = None,
) -> tuple[RecordedCall, ...]:
    """All calls of training and of evaluation, laid out in memory as the products that ``choose`` names leave them.

    Args:
        device, packings, asked: as of :func:`recorded_calls`.
        choose: the backend of a call.
    """
    calls: list[RecordedCall] = []
    for evaluation in (False, True) if evaluations_per_step(config) else (False,):
        plain = recorded_calls(config, device, packings, {}, evaluation=evaluation, asked=asked)
        chosen = {call.operator.name: choose(call) for call in plain if call.operator.name in LAYS_OUT}
        calls += recorded_calls(config, device, packings, chosen, evaluation=evaluation, asked=asked)
    return heaviest_first(calls)


def record_model(
    model: Model,
    requested: Mapping[str, str],
    packings: Sequence[Packing],
    micro_batches: float,
    device: str,
    *,
    evaluation: bool = False,
) -> tuple[RecordedCall, ...]:
    """:func:`recorded_calls` of a model on the meta device, which is left as in training.

    Args:
        requested: backend by operator, with which it is run.
        micro_batches: of a step, on one rank.
        evaluation: without gradients, and without dropout.
    """
    counts: dict[Signature, float] = {}
    operators: dict[str, Operator] = {}
    share = 0.0

    def observe(operator: Operator, given: Mapping[str, Any]) -> None:
        signature = replace(signature_of(operator.name, given), device=device)
        operators[operator.name] = operator
        counts[signature] = counts.get(signature, 0.0) + share * micro_batches

    model.use_operators(Selection(requested=dict(requested), observer=observe))
    model.train(not evaluation)
    with torch.set_grad_enabled(not evaluation):
        for packing in packings:
            share = packing.share
            model.loss_sum(packing.batch.to("meta"))
    model.train()
    return heaviest_first(
        RecordedCall(operators[signature.operator], signature, count) for signature, count in counts.items()
    )


def heaviest_first(calls: Iterable[RecordedCall]) -> tuple[RecordedCall, ...]:
    """Those with most elements in a step first."""
    return tuple(sorted(calls, key=lambda call: (-_weight(call), str(call.signature))))


def _weight(call: RecordedCall) -> float:
    return call.calls_per_step * sum(
        torch.Size(argument.shape).numel() for _, argument in call.signature.arguments
    )


def packings_of(config: RunConfig, progress: ProgressCallback = silent) -> tuple[Packing, ...]:
    """How documents lie in the micro-batches of a run, as its own data have them: one packing of each kind.

    Whole sequences where attention does not stop at the borders of documents.

    Args:
        progress: told where a corpus is prepared.

    Raises:
        DataError: the configuration's corpus cannot be read.
    """
    rows, length = config.training.micro_batch_size, config.model.seq_length
    if not config.data.reset_attention_mask:
        return (Packing(whole_sequences(torch.zeros(rows, length, dtype=torch.int64)), 1.0),)
    corpus = ensure_corpus(config.data, config.model, progress)
    with BatchLoader(config, corpus, "train", num_workers=0) as loader:
        batches = [next(loader) for _ in range(_DRAWN)]
    kinds: Sequence[Callable[[Batch], bool]] = (_is_equal, lambda batch: not _is_equal(batch))
    groups = [[batch for batch in batches if kind(batch)] for kind in kinds]
    return tuple(
        Packing(sorted(group, key=lambda one: one.sum_squared_lengths)[len(group) // 2], len(group) / _DRAWN)
        for group in groups
        if group
    )


def _is_equal(batch: Batch) -> bool:
    return len({last - first for first, last in documents_of(batch)}) == 1


def example_packings(config: RunConfig) -> tuple[Packing, ...]:
    """Micro-batches of the two kinds that a run can meet, without its data: whole sequences, and where attention stops
    at the borders of documents also sequences of two documents of unequal length."""
    rows, length = config.training.micro_batch_size, config.model.seq_length
    whole = whole_sequences(torch.zeros(rows, length, dtype=torch.int64))
    if not config.data.reset_attention_mask:
        return (Packing(whole, 1.0),)
    first = max(1, length // 3)
    starts = torch.arange(0, rows * length, length, dtype=torch.int32)
    ends = torch.stack([starts + first, starts + length], dim=1).flatten()
    borders = torch.unique(torch.cat([starts[:1], ends]))
    squares = rows * (first**2 + (length - first) ** 2)
    packed = replace(whole, cu_seqlens=borders, sum_squared_lengths=squares)
    return (Packing(whole, 0.5), Packing(packed, 0.5))
