"""Harm, injected in code by wrapping: what a faulty optimisation of a class would do to training."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from harness.gate_trainer import Job, Wrapping

if TYPE_CHECKING:
    from drivetrain.engine.model.batch import Batch

__all__ = ["HARMS", "Harm"]

PADDING = 64
"""Places at the end of each sequence that are padding, where a harm needs padding."""
STALE_FROM = 10
"""Micro-batch from which on data is one batch old."""


@dataclass(frozen=True)
class Harm:
    """One kind.

    Attributes:
        tier: of the move that it imitates.
        wrapping: what makes the harm; None: none.
        overrides: of both sides, where the harm needs a setting to exist (dropout).
        both: wrapping of both sides, for the same reason (padding).
        word: short name for its runs.
    """

    tier: str
    wrapping: Wrapping | None = None
    overrides: tuple[str, ...] = ()
    both: Wrapping | None = None
    word: str = "plain"

    def setting(self, job: Job) -> Job:
        """The baseline in which the harm can exist."""
        if not self.overrides and self.both is None:
            return job
        return replace(
            job,
            name=f"{job.name}-{self.word}",
            overrides=(*job.overrides, *self.overrides),
            wrappings=job.wrappings if self.both is None else (*job.wrappings, self.both),
        )

    def applied(self, job: Job) -> Job:
        """``job``, a :meth:`setting`, with the harm."""
        assert self.wrapping is not None
        return replace(job, name=f"{job.name}-harm-{self.word}", wrappings=(*job.wrappings, self.wrapping))


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """``owner.name`` is ``make(what it was)`` for a block."""
    before = getattr(owner, name)
    setattr(owner, name, make(before))
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def summed_gradients() -> Iterator[None]:
    """The gradients of two ranks are added where they should be averaged."""
    from drivetrain.engine.step import Stepper

    def make(backward: Any) -> Any:
        return lambda self, loss_sum, valid_tokens: backward(self, 2 * loss_sum, valid_tokens)

    with replaced(Stepper, "backward", make):
        yield


@contextmanager
def leaking_mask() -> Iterator[None]:
    """Attention sees the whole sequence, across documents."""
    import torch

    from drivetrain.engine.model import decoder

    def make(layout: Any) -> Any:
        return lambda cu_seqlens: layout(torch.arange(0, int(cu_seqlens[-1]) + 1, 256, dtype=torch.int32))

    with replaced(decoder, "DocumentLayout", make):
        yield


@contextmanager
def no_dropout() -> Iterator[None]:
    """Blocks drop nothing, although dropout is asked for."""
    from drivetrain.engine.model.dropout import Dropout

    with replaced(Dropout, "forward", lambda _: lambda _dropout, x_TD: x_TD):
        yield


@contextmanager
def triple_rate() -> Iterator[None]:
    """The learning rate is three times what it should be."""
    from drivetrain.engine import loop

    with replaced(loop, "learning_rate", lambda rate: lambda *arguments: 3 * rate(*arguments)):
        yield


def packed(change: "Callable[[Batch], Batch]") -> Wrapping:
    """Every batch is changed as it is built."""

    @contextmanager
    def wrapping() -> Iterator[None]:
        from drivetrain.engine.data.sequences import Sequences

        def make(pack: Any) -> Any:
            return lambda self, *arguments, **options: change(pack(self, *arguments, **options))

        with replaced(Sequences, "pack", make):
            yield

    return wrapping


def _pad(batch: "Batch") -> "Batch":
    token_ids, labels, loss_mask = batch.token_ids.clone(), batch.labels.clone(), batch.loss_mask.clone()
    token_ids[:, -PADDING:] = 0
    labels[:, -PADDING - 1 :] = 0
    loss_mask[:, -PADDING - 1 :] = False
    return replace(
        batch,
        token_ids=token_ids,
        labels=labels,
        loss_mask=loss_mask,
        num_valid_tokens=int(loss_mask.sum()),
    )


def _unmask(batch: "Batch") -> "Batch":
    return replace(batch, loss_mask=batch.loss_mask | True, num_valid_tokens=batch.loss_mask.numel())


def _shift_labels(batch: "Batch") -> "Batch":
    return replace(batch, labels=batch.labels.roll(-1, dims=1))


@contextmanager
def frozen_weights() -> Iterator[None]:
    """The first half of the blocks never moves."""
    import torch

    from drivetrain.engine.step import Stepper

    def make(step: Any) -> Any:
        def stepped(self: Any, *arguments: Any, **options: Any) -> Any:
            blocks = list(self.decoder.blocks.values())
            frozen = [one for block in blocks[: len(blocks) // 2] for one in block.parameters()]
            before = [parameter.detach().clone() for parameter in frozen]
            figures = step(self, *arguments, **options)
            with torch.no_grad():
                for parameter, value in zip(frozen, before, strict=True):
                    parameter.copy_(value)
            return figures

        return stepped

    with replaced(Stepper, "step", make):
        yield


@contextmanager
def stale_data() -> Iterator[None]:
    """From some step on, each batch is the one before."""
    from drivetrain.engine.data.loader import _MicroBatches

    def make(get: Any) -> Any:
        return lambda self, index: get(self, index - 1 if index >= STALE_FROM else index)

    with replaced(_MicroBatches, "__getitem__", make):
        yield


HARMS = {
    "gradients summed": Harm("round-off", summed_gradients, word="summed"),
    "leaking mask": Harm("round-off", leaking_mask, word="leak"),
    "dropout off": Harm("round-off", no_dropout, overrides=("model.hidden_dropout=0.1",), word="dropout"),
    "learning rate x 3": Harm("statistical", triple_rate, word="rate"),
    "loss over padding": Harm("round-off", packed(_unmask), both=packed(_pad), word="padding"),
    "labels shifted": Harm("round-off", packed(_shift_labels), word="labels"),
    "weights frozen": Harm("round-off", frozen_weights, word="frozen"),
    "stale data order": Harm("exact", stale_data, word="stale"),
}
