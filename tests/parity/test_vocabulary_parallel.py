"""Cross-entropy over a vocabulary that is spread over ranks: values, gradients, and what could overflow."""

from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from drivetrain.engine.parallel import vocabulary_parallel
from drivetrain.engine.parallel.collectives import Group
from drivetrain.engine.parallel.process_group import Ranks, join
from drivetrain.engine.parallel.traffic import Traffic
from drivetrain.engine.parallel.vocabulary_parallel import VocabularyParallelHead
from rank_processes import on_kept_ranks

TOKENS, WIDTH, VOCABULARY = 40, 6, 31
OFFSETS = [0, 11, 21, VOCABULARY]


def example(
    scale: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = (scale * torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64)).to(dtype)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.arange(TOKENS) % VOCABULARY
    return hidden, weight, labels, torch.rand(TOKENS, generator=generator) < 0.7


def on_one_rank(
    scale: float, dtype: torch.dtype, masked: bool, per_chunk: int
) -> tuple[float, np.ndarray, np.ndarray, dict[str, int]]:
    hidden, weight, labels, mask = example(scale, dtype)
    with join(Ranks.from_environment(), "cpu", 1.0) as ranks:
        rank = ranks.ranks.rank
        group = Group("tp", dist.group.WORLD, ranks.size, rank, Traffic())
        head = VocabularyParallelHead(group, OFFSETS[rank], VOCABULARY)
        own = weight[OFFSETS[rank] : OFFSETS[rank + 1]].clone().requires_grad_()
        hidden.requires_grad_()
        with patch.object(vocabulary_parallel, "LOGITS_PER_CHUNK", {"cpu": per_chunk}):
            loss = head.cross_entropy_sum(hidden, own, labels, mask & ~torch.tensor(masked))
        sent = {kind: count.bytes for (_, kind), count in group.traffic.take().items()}
        (2 * loss).backward()
        assert not group.traffic.counts, "backward of the loss communicates"
        assert loss.dtype == torch.promote_types(dtype, torch.float32)
        return loss.item(), hidden.grad.double().numpy(), own.grad.double().numpy(), sent


def expected(scale: float, dtype: torch.dtype) -> tuple[float, np.ndarray, np.ndarray]:
    """In fp64, of the inputs as ``dtype`` rounds them."""
    hidden, weight, labels, mask = example(scale, dtype)
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    loss = F.cross_entropy((hidden @ weight.t())[mask], labels[mask], reduction="sum")
    (2 * loss).backward()
    return loss.item(), hidden.grad.numpy(), weight.grad.numpy()


@pytest.mark.parametrize(
    ("dtype", "scale", "tolerance"),
    # Logits of thousands: exp overflows unless the largest logit of all ranks is taken off first.
    [
        (torch.float64, 1.0, 1e-12),
        (torch.float64, 1e3, 1e-12),
        (torch.float32, 1.0, 1e-5),
        (torch.bfloat16, 1.0, 2e-2),
    ],
)
@pytest.mark.parametrize("per_chunk", [1, 60, 1 << 19])
def test_loss_and_gradients(dtype: torch.dtype, scale: float, tolerance: float, per_chunk: int) -> None:
    loss, hidden_gradient, weight_gradient = expected(scale, dtype)
    found = on_kept_ranks(on_one_rank, 3, scale, dtype, False, per_chunk)
    assert len({rank[0] for rank in found}) == 1, "ranks differ in their loss"
    assert found[0][0] == pytest.approx(loss, rel=tolerance)
    summands = sum(rank[1] for rank in found)
    rows = np.concatenate([rank[2] for rank in found])
    for value, wanted in ((summands, hidden_gradient), (rows, weight_gradient)):
        assert np.linalg.norm(value - wanted) <= tolerance * np.linalg.norm(wanted)
    statistic = torch.promote_types(dtype, torch.float32).itemsize
    # Three numbers of each token, and no logits.
    assert found[0][3] == {"all_reduce": 3 * TOKENS * statistic}


def test_a_batch_without_loss_gives_zeros() -> None:
    for loss, hidden_gradient, weight_gradient, _ in on_kept_ranks(
        on_one_rank, 3, 1.0, torch.float32, True, 60
    ):
        assert loss == 0.0
        assert not hidden_gradient.any()
        assert not weight_gradient.any()
