"""Held-out text: loss per token, and bits per byte, which does not depend on the tokenizer."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

import torch

from drivetrain.engine.model.batch import Batch
from drivetrain.engine.model.decoder import Decoder
from drivetrain.engine.parallel.pipeline import Pipeline
from drivetrain.engine.parallel.process_group import ProcessGroup

__all__ = ["Evaluation", "evaluate"]


@dataclass(frozen=True)
class Evaluation:
    """Result of one evaluation.

    Attributes:
        loss: cross-entropy in nats per valid token; None where no token carries loss.
        bits_per_byte: the same in bits, per byte of the predicted text; None where the tokenizer does not
            say how many bytes a token stands for.
        tokens: valid tokens evaluated, over all ranks.
    """

    loss: float | None
    bits_per_byte: float | None
    tokens: int


@torch.no_grad()
def evaluate(
    decoder: Decoder,
    batches: Iterable[Batch],
    group: ProcessGroup,
    device: torch.device,
    bytes_per_token: torch.Tensor | None,
    *,
    counts: bool = True,
    pipeline: Pipeline | None = None,
    batches_at_once: int = 1,
) -> Evaluation:
    """Mean loss over ``batches`` of all ranks.

    Args:
        bytes_per_token: (V,) int64 on the CPU, bytes each token id stands for; special tokens 0. A token
            of 0 bytes counts in the loss and brings no bytes, so end-of-document costs bits as it should.
        counts: False on a rank whose batches and losses are those of another one, with which it holds one model.
        pipeline: what computes losses where the decoder is a part of the model; it takes ``batches_at_once`` of them.
    """
    was_training = decoder.training
    decoder.eval()
    # fp64, so that the sum over many batches does not depend on how they are split over ranks.
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    tokens = 0
    text_bytes = 0
    upcoming = iter(batches)
    while several := list(islice(upcoming, batches_at_once)):
        on_device = [batch.to(device) for batch in several]
        if pipeline is not None:
            loss_sum += pipeline.evaluate(on_device).double()
        else:
            loss_sum += torch.stack([decoder.loss_sum(batch).double() for batch in on_device]).sum()
        for batch in several:
            tokens += batch.num_valid_tokens
            if bytes_per_token is not None:
                text_bytes += int((bytes_per_token[batch.labels] * batch.loss_mask).sum())
    decoder.train(was_training)
    if not counts:
        loss_sum, tokens, text_bytes = torch.zeros_like(loss_sum), 0, 0
    group.sum_(loss_sum)
    tokens, text_bytes = group.start_sum([tokens, text_bytes]).wait()
    nats = float(loss_sum.item())
    return Evaluation(
        loss=nats / tokens if tokens else None,
        bits_per_byte=nats / math.log(2) / text_bytes if text_bytes else None,
        tokens=tokens,
    )
