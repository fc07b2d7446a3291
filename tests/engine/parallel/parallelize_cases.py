"""Modules of "a user's own" for the tests of parallelize, and one process' answer beside that of a rank."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from drivetrain.config.layout import Layout
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.parallelize import parallelize
from drivetrain.engine.parallel.parallelize_plan import Word
from drivetrain.engine.parallel.placement import Placement
from drivetrain.engine.parallel.process_group import Ranks, join
from drivetrain.engine.parallel.traffic import Traffic

BATCH, LENGTH, WIDTH, HEADS, VOCABULARY = 2, 8, 16, 4, 31
PADDING = 20
HEAD = 6
"""Wider than the width over the heads: 24 features of queries."""


class Attention(nn.Module):
    """Causal attention of heads, written with plain linear layers and the number of heads."""

    def __init__(self, qk_norm: bool) -> None:
        super().__init__()
        self.heads = HEADS
        self.query = nn.Linear(WIDTH, HEADS * HEAD)
        # Softmax does not see a bias of the keys: its gradient would be round-off and compare with nothing.
        self.key = nn.Linear(WIDTH, HEADS * HEAD, bias=False)
        self.value = nn.Linear(WIDTH, HEADS * HEAD)
        self.output = nn.Linear(HEADS * HEAD, WIDTH)
        self.query_norm = nn.LayerNorm(HEAD) if qk_norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) to the same shape."""
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        out = F.scaled_dot_product_attention(self.query_norm(q), k, v, is_causal=True)
        return self.output(out.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """Norms before, dropout after; a multilayer perceptron with biases."""

    def __init__(self, qk_norm: bool, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.attention = Attention(qk_norm)
        self.dropout = nn.Dropout(dropout)
        self.mlp_norm = nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.inner_dropout = nn.Dropout(dropout)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) to the same shape."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.down(self.inner_dropout(F.gelu(self.up(self.mlp_norm(x)))))


class Model(nn.Module):
    """Embedding of tokens and of positions, blocks, norm, and logits of every word."""

    def __init__(
        self, *, qk_norm: bool = False, dropout: float = 0.0, tied: bool = False, blocks: int = 1
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH, padding_idx=PADDING)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(qk_norm, dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=not tied)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        """(B, T) to logits (B, T, V)."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = self.through(block, x)
        return self.head(self.norm(x))

    def through(self, block: nn.Module, x: Tensor) -> Tensor:
        """(B, T, D) to the same shape."""
        return block(x)


class ByKeyword(nn.Module):
    """Gives every layer its input by the name that torch's own layers give it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.dropout = nn.Dropout(0.3)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        """(B, T) to logits (B, T, V)."""
        x = self.tokens(input=ids) + self.positions(input=torch.arange(ids.shape[1]))
        hidden = self.dropout(input=F.gelu(self.up(input=self.norm(input=x))))
        return self.head(input=x + self.down(input=hidden))


class Recomputing(Model):
    """Keeps what enters a block and computes the rest again in backward."""

    def through(self, block: nn.Module, x: Tensor) -> Tensor:
        """(B, T, D) to the same shape."""
        return checkpoint(block, x, use_reentrant=False)


MATRICES: Mapping[str, Word] = {
    "*.query": "column",
    "*.key": "column",
    "*.value": "column",
    "*.output": "row",
    "*.up": "column",
    "*.down": "row",
}
ENDS: Mapping[str, Word] = {"tokens": "row", "head": "column_gathered"}
DIVIDED = ("blocks.*.attention.heads",)
SEQUENCE: Mapping[str, Word] = {
    "positions": "sequence",
    "blocks.*.attention_norm": "sequence",
    "*.mlp_norm": "sequence",
    "norm": "sequence",
}


@dataclass(frozen=True)
class Case:
    """A module, a plan for it, and what attribute counts heads."""

    build: Callable[[], nn.Module]
    plan: Mapping[str, Word]
    divided: tuple[str, ...] = ()
    of_ids: bool = True


def mlp() -> nn.Module:
    """Two pairs of matrices, the first reading data that has no gradient."""
    return nn.Sequential(
        nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 8, bias=False), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 5)
    )


CASES: Mapping[str, Case] = {
    "mlp": Case(mlp, {"0": "column", "2": "row", "3": "column", "5": "row"}, of_ids=False),
    "attention": Case(Model, MATRICES, DIVIDED),
    "attention_ends": Case(Model, {**MATRICES, **ENDS}, DIVIDED),
    "attention_sequence": Case(Model, {**MATRICES, **ENDS, **SEQUENCE}, DIVIDED),
    "whole_table_sequence": Case(
        Model, {**MATRICES, **SEQUENCE, "tokens": "sequence", "head": "column_gathered"}, DIVIDED
    ),
    "recomputed": Case(lambda: Recomputing(blocks=2), {**MATRICES, **ENDS}, DIVIDED),
    "recomputed_sequence": Case(lambda: Recomputing(blocks=2), {**MATRICES, **ENDS, **SEQUENCE}, DIVIDED),
    "tied": Case(lambda: Model(tied=True), {**MATRICES, **ENDS}, DIVIDED),
    "tied_sequence": Case(lambda: Model(tied=True), {**MATRICES, **ENDS, **SEQUENCE}, DIVIDED),
    "head_norm": Case(lambda: Model(qk_norm=True), {**MATRICES, "*.query_norm": "shared"}, DIVIDED),
    "head_norm_sequence": Case(
        lambda: Model(qk_norm=True),
        {**MATRICES, **ENDS, **SEQUENCE, "*.query_norm": "shared"},
        DIVIDED,
    ),
    "dropout": Case(lambda: Model(dropout=0.3), {**MATRICES, "*.inner_dropout": "column"}, DIVIDED),
    "dropout_sequence": Case(
        lambda: Model(dropout=0.3),
        {**MATRICES, **ENDS, **SEQUENCE, "*.dropout": "sequence", "*.inner_dropout": "column"},
        DIVIDED,
    ),
    "dropout_in_sequence": Case(
        lambda: nn.Sequential(
            nn.Embedding(VOCABULARY, 12),
            nn.Sequential(nn.LayerNorm(12), nn.Sequential(nn.Dropout(0.3))),
            nn.Linear(12, 5),
        ),
        {"0": "row", "1": "sequence", "2": "column_gathered"},
    ),
    "by_keyword": Case(
        ByKeyword,
        {
            "tokens": "row",
            "positions": "sequence",
            "norm": "sequence",
            "up": "column",
            "dropout": "column",
            "down": "row",
            "head": "column_gathered",
        },
    ),
    "cut_embedding": Case(
        lambda: nn.Sequential(nn.Embedding(VOCABULARY, 12), nn.Linear(12, 5)), {"0": "column", "1": "row"}
    ),
}


def build(case: Case) -> nn.Module:
    """In fp64, the same on every rank, with norms and biases that are not 1 and 0."""
    torch.manual_seed(7)
    module = case.build().double()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return module


def data(case: Case, step: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one batch."""
    generator = torch.Generator().manual_seed(100 + step)
    if case.of_ids:
        ids = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
        ids[0, :2] = torch.tensor([PADDING, 0])
        return ids, torch.randint(5, (BATCH, LENGTH), generator=generator)
    inputs = torch.randn(BATCH, LENGTH, 6, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(5, (BATCH, LENGTH), generator=generator)


def backward(module: nn.Module, case: Case, step: int = 0) -> float:
    """Forward and backward of one batch; the loss per token."""
    inputs, targets = data(case, step)
    torch.manual_seed(11)
    loss = F.cross_entropy(module(inputs).flatten(0, 1), targets.flatten())
    loss.backward()
    return loss.item()


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """By name; every parameter must have one."""
    found = {}
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        found[name] = parameter.grad.detach().clone()
    return found


def worst(
    found: Mapping[str, Tensor], whole: Mapping[str, Tensor], placements: Mapping[str, Placement]
) -> float:
    """The largest ``‖g - g0‖ / ‖g0‖`` of a parameter, g0 cut as its placement says; names and shapes are equal."""
    assert list(found) == list(whole) == list(placements)
    largest = 0.0
    for name, value in found.items():
        part = whole[name][placements[name].slices()]
        assert value.shape == part.shape, name
        assert whole[name].norm() > 1e-6, f"{name}: a gradient of zero compares with nothing"
        largest = max(largest, float((value - part).norm() / whole[name].norm()))
    return largest


@contextmanager
def mesh_of_all_ranks() -> Iterator[Mesh]:
    """All ranks share the layers."""
    with join(Ranks.from_environment(), "cpu", 1.0) as group:
        yield Mesh.form(Layout(tp=group.size), group.ranks.rank)


def one_process(case: Case, step: int = 0) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the module as the user wrote it."""
    module = build(case)
    loss = backward(module, case, step)
    return loss, gradients(module)


def spread(case: Case, mesh: Mesh) -> tuple[nn.Module, Mapping[str, Placement], Traffic]:
    """The module cut by its plan."""
    module, traffic = build(case), Traffic()
    kept = copy.deepcopy(dict(case.plan))
    placements = parallelize(module, case.plan, mesh, traffic, divided=case.divided)
    assert case.plan == kept
    return module, placements, traffic
