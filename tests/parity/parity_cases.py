"""What every case of the parity matrix shares: models, one global batch, one process' answer, the comparison.

The global batch has packed documents that differ from row to row and from micro-batch to micro-batch, and rows whose
numbers of valid tokens are very unequal (one has none): a gradient that is averaged where it must be summed, or
normalised by a rank's own tokens, can't pass.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from drivetrain.config import ModelConfig, OptimizerConfig
from drivetrain.engine.model.batch import Batch
from drivetrain.engine.model.decoder import Decoder
from drivetrain.engine.model.initialization import initialize
from drivetrain.engine.optimizer import build_optimizer, clip_gradients
from drivetrain.engine.parallel.placement import Placement

Arrays = Mapping[str, np.ndarray]

ROWS = 8
SEQUENCE = 16
SEED = 3
OPTIMIZER = OptimizerConfig(lr=1e-2, weight_decay=0.1, fused=False)
MAX_NORM = 0.5


def llama(
    num_layers: int = 2, *, untied: bool = False, qk_norm: bool = False, **fields: object
) -> ModelConfig:
    """RMSNorm, SwiGLU, RoPE, two groups of keys and values for four heads of queries."""
    settings: dict[str, object] = {
        "num_layers": num_layers,
        "hidden_size": 16,
        "ffn_hidden_size": 24,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "seq_length": SEQUENCE,
        "vocab_size": 48,
        "untie_embeddings_and_output_weights": untied,
        "qk_layernorm": qk_norm,
        # Larger than in training, so that no gradient is round-off alone.
        "init_method_std": 0.2,
    }
    return ModelConfig.model_validate({**settings, **fields})


def gpt(num_layers: int = 2, *, dropout: float = 0.0, **fields: object) -> ModelConfig:
    """LayerNorm, GELU, biases, learned positions, tied embeddings."""
    settings: dict[str, object] = {
        "num_layers": num_layers,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "seq_length": SEQUENCE,
        "vocab_size": 48,
        "normalization": "LayerNorm",
        "position_embedding_type": "learned_absolute",
        "activation_func": "gelu",
        "add_bias_linear": True,
        "hidden_dropout": dropout,
        "attention_dropout": dropout,
        "init_method_std": 0.2,
    }
    return ModelConfig.model_validate({**settings, **fields})


def _document_lengths(row: int, length: int) -> list[int]:
    """Lengths of the documents of a row: another packing in every row; row 0 is one document."""
    lengths: list[int] = []
    while sum(lengths) < length:
        step = length if row == 0 else 1 + (5 * row + 3 * len(lengths)) % 7
        lengths.append(min(step, length - sum(lengths)))
    return lengths


def rows_of_global_batch(model: ModelConfig, rows: Sequence[int], step: int = 0) -> Batch:
    """Rows of the one fixed global batch of ``ROWS`` sequences; ``step`` names another batch."""
    length = model.seq_length
    generator = torch.Generator().manual_seed(5 + 1000 * step)
    ids = torch.randint(model.vocab_size, (ROWS, length + 1), generator=generator)
    # Valid tokens of the rows, in sixteenths: from all to none.
    shares = torch.tensor([16, 1, 9, 0, 4, 16, 2, 7]).roll(step)
    mask = torch.arange(length)[None] < (shares * length // 16)[:, None]
    lengths = [_document_lengths((row + step) % ROWS, length) for row in rows]
    positions = [torch.cat([torch.arange(size) for size in sizes]) for sizes in lengths]
    flat = [size for sizes in lengths for size in sizes]
    index = list(rows)
    return Batch(
        token_ids=ids[index, :-1].clone(),
        labels=ids[index, 1:].clone(),
        loss_mask=mask[index].clone(),
        position_ids=torch.stack(positions),
        cu_seqlens=torch.tensor([0, *np.cumsum(flat)], dtype=torch.int32),
        num_valid_tokens=int(mask[index].sum()),
        sum_squared_lengths=sum(size**2 for size in flat),
    )


def micro_batches(
    model: ModelConfig, num_microbatches: int, dp_index: int = 0, dp_size: int = 1, step: int = 0
) -> list[Batch]:
    """The micro-batches of one data-parallel rank, dealt out as the data loader does: slice m * dp + r."""
    per_pass = num_microbatches * dp_size
    assert ROWS % per_pass == 0, f"{ROWS} rows do not make {per_pass} micro-batches"
    count = ROWS // per_pass
    return [
        rows_of_global_batch(model, range(first, first + count), step)
        for first in ((number * dp_size + dp_index) * count for number in range(num_microbatches))
    ]


def valid_tokens(model: ModelConfig, step: int = 0) -> int:
    """Tokens with loss in the whole global batch."""
    return rows_of_global_batch(model, range(ROWS), step).num_valid_tokens


def reference_decoder(model: ModelConfig, dtype: torch.dtype = torch.float64) -> Decoder:
    """The whole model with the weights that every layout must start from."""
    decoder = Decoder(model, dtype)
    initialize(decoder, SEED)
    return decoder


def reference(
    model: ModelConfig, dtype: torch.dtype = torch.float64, num_microbatches: int = 1
) -> tuple[float, dict[str, np.ndarray]]:
    """Loss (nats per valid token of the global batch) and gradients of one plain process.

    ``num_microbatches`` matters with dropout alone, whose masks are drawn per micro-batch.
    """
    decoder = reference_decoder(model, dtype)
    total = valid_tokens(model)
    loss = 0.0
    for batch in micro_batches(model, num_microbatches):
        part = decoder.loss_sum(batch) / total
        part.backward()
        loss += part.item()
    return loss, gradients_of(decoder)


def reference_training(
    model: ModelConfig, steps: int = 3, dtype: torch.dtype = torch.float64
) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses and final parameters of ``steps`` steps of AdamW with clipping and decay, in one plain process."""
    decoder = reference_decoder(model, dtype)
    optimizer = build_optimizer(decoder, OPTIMIZER)
    losses = []
    for step in range(steps):
        batch = rows_of_global_batch(model, range(ROWS), step)
        loss = decoder.loss_sum(batch) / batch.num_valid_tokens
        loss.backward()
        clip_gradients(decoder.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: value.detach().numpy().copy() for name, value in decoder.named_parameters()}


def gradients_of(decoder: torch.nn.Module) -> dict[str, np.ndarray]:
    """The gradients a module holds, by name."""
    found = {}
    for name, parameter in decoder.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        found[name] = parameter.grad.detach().numpy().copy()
    return found


def differences(
    found: Arrays, expected: Arrays, placements: Mapping[str, Placement] | None = None
) -> dict[str, float]:
    """``‖g - g0‖ / ‖g0‖`` of each tensor a rank holds, g0 cut as its placement says, over the norm of whole g0.

    Names without a placement are whole. Shapes must be equal: nothing is broadcast. A gradient that is zero but for
    round-off (a key's bias without rope: softmax does not see it) is held against the norm of all gradients.
    """
    result = {}
    norm_of_all = float(np.sqrt(sum(np.linalg.norm(whole) ** 2 for whole in expected.values())))
    for name, value in found.items():
        whole = expected[name]
        placement = (placements or {}).get(name, Placement(whole.shape))
        assert placement.full_shape == whole.shape, f"{name}: {placement.full_shape} is not {whole.shape}"
        part = whole[placement.slices()]
        assert value.shape == part.shape, f"{name}: {value.shape} is not {part.shape}"
        norm = float(np.linalg.norm(whole))
        if norm < 100 * np.finfo(whole.dtype).eps * norm_of_all:
            assert name.endswith("attention.key.bias"), (
                f"{name}: the reference is zero and compares with nothing"
            )
            norm = norm_of_all
        result[name] = float(np.linalg.norm(value - part)) / norm
    return result


def worst_difference(per_rank: Sequence[tuple[Arrays, Mapping[str, Placement]]], expected: Arrays) -> float:
    """The largest difference on any rank; the ranks together must hold every element of every tensor."""
    covered = {name: np.zeros(whole.shape, dtype=bool) for name, whole in expected.items()}
    worst = 0.0
    for found, placements in per_rank:
        for name, difference in differences(found, expected, placements).items():
            worst = max(worst, difference)
            covered[name][placements.get(name, Placement(expected[name].shape)).slices()] = True
    missing = [name for name, held in covered.items() if not held.all()]
    assert not missing, f"no rank holds all of {', '.join(missing)}"
    return worst
