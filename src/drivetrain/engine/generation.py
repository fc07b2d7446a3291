"""Text from a trained model, token by token.

The reference decoder keeps no cache of keys and values: each token costs a forward pass over the whole
context. That is right for a look at a model in training, and no inference engine.
"""

from collections.abc import Iterator, Sequence

import torch

from drivetrain.engine.model.batch import whole_sequences
from drivetrain.engine.model.decoder import Decoder
from drivetrain.errors import DrivetrainError

__all__ = ["generate"]

SMALLEST_TEMPERATURE, LARGEST_TEMPERATURE = 1e-4, 1e4
"""Beyond these, dividing the logits leaves nothing to draw from, or no difference between tokens."""


@torch.no_grad()
def generate(
    decoder: Decoder,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    context_length: int,
    temperature: float,
    top_k: int,
    seed: int,
    end_id: int | None,
    vocab_size: int,
) -> Iterator[int]:
    """Yield up to ``max_new_tokens`` token ids that follow ``prompt``.

    Args:
        context_length: the model sees at most this many of the latest tokens.
        temperature: 0 takes the likeliest token; above, logits are divided by it before sampling.
        top_k: only the k likeliest tokens are drawn from; 0 draws from all.
        end_id: generation ends before this token; None: never.
        vocab_size: ids the tokenizer knows; rows of the embedding beyond are never drawn.

    Raises:
        DrivetrainError: an empty prompt, or a temperature or k below 0.
    """
    if not prompt:
        raise DrivetrainError(
            "the prompt is empty; give at least one token, such as the end-of-document token"
        )
    if temperature != 0 and not SMALLEST_TEMPERATURE <= temperature <= LARGEST_TEMPERATURE:
        raise DrivetrainError(
            f"temperature={temperature}: 0 (always the likeliest token), or from {SMALLEST_TEMPERATURE} to "
            f"{LARGEST_TEMPERATURE:g}"
        )
    if top_k < 0:
        raise DrivetrainError(f"top_k={top_k} must not be negative; the nearest legal value is 0")
    if not 0 <= seed < 2**63:
        raise DrivetrainError(f"seed={seed}: a whole number from 0 to 2^63 - 1")
    decoder.eval()
    device = next(decoder.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(max_new_tokens):
        context = torch.tensor([tokens[-context_length:]], dtype=torch.int64, device=device)
        logits = decoder(whole_sequences(context))[0, -1, :vocab_size].float().cpu()
        token = _draw(logits, temperature, top_k, generator)
        if token == end_id:
            return
        tokens.append(token)
        yield token


def _draw(logits: torch.Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    if 0 < top_k < logits.numel():
        threshold = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < threshold, float("-inf"))
    probabilities = torch.softmax(logits / temperature, dim=-1)
    return int(torch.multinomial(probabilities, 1, generator=generator))
