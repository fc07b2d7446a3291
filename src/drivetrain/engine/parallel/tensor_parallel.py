"""Tensor parallelism: every matrix of a block is spread over the ranks of a group, which share each token's work.

Shoeybi et al., Megatron-LM, arXiv:1909.08053. Queries, keys, values, gate and up are cut by output features (heads),
the matrices that write into the residual stream by input features; the norm before the former and the layer of the
latter hold the collective. Parameters stay plain tensors with the names of the whole decoder, and :class:`Placement`
says which part of them a rank has.

With **sequence parallelism** (Korthikanti et al., arXiv:2205.05198) the residual stream, norms and dropout have a
rank's share of the T tokens: the sums over ranks become a reduce-scatter after a block's second matrix and an
all-gather before its first. The gathered input of a matrix is kept for backward, not gathered twice.

What every rank holds and uses for a part of the tokens or heads alone has a gradient that is summed over the group, in
each backward pass: norms (sequence parallelism), norms of query and key heads, biases added to a rank's tokens, keys
and values where several ranks share a head. So after backward a rank has the whole gradient of all that it holds.

**Dropout** equals that of one process: the ranks of a group have equal generators (seed them alike), each draws the
mask of the whole tensor, as one process would, and takes its part. On a CPU masks are equal to the last bit. On CUDA
torch draws those of attention inside its kernels, and there they are another sample of the same distribution.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from drivetrain.config.model import ModelConfig
from drivetrain.engine.model.attention import Attention
from drivetrain.engine.model.decoder import Block, Decoder
from drivetrain.engine.model.dropout import Dropout
from drivetrain.engine.model.linear import Linear
from drivetrain.engine.model.mlp import GELUMLP, SwiGLUMLP
from drivetrain.engine.model.norm import LayerNorm, RMSNorm
from drivetrain.engine.model.operators import UsesOperators
from drivetrain.engine.ops import gate_up_product, qkv_product
from drivetrain.engine.ops.selection import Selection
from drivetrain.engine.parallel.collectives import Group, copied, gathered, scattered, summed
from drivetrain.engine.parallel.fused_calls import FusedCalls
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.placement import Placement, Shard, even_shard
from drivetrain.engine.parallel.symmetric_layers import SymmetricColumns, symmetric_row_product
from drivetrain.engine.parallel.symmetric_memory import SymmetricMemory
from drivetrain.engine.parallel.tensor_parallel_overlap import (
    WHOLE,
    Chunks,
    ColumnParallelLinears,
    Together,
    row_parallel_product,
)
from drivetrain.engine.parallel.traffic import Traffic
from drivetrain.engine.parallel.vocabulary_parallel import VocabularyParallelEmbedding, VocabularyParallelHead

__all__ = ["tensor_parallel"]

_DIM = "tp"
_QUERY_KEY_VALUE = Together(qkv_product.OPERATOR, ("query", "key", "value"))
_GATE_UP = Together(gate_up_product.OPERATOR, ("gate", "up"))


def tensor_parallel(
    decoder: Decoder,
    mesh: Mesh,
    sequence_parallel: bool,
    traffic: Traffic,
    chunks: Chunks = WHOLE,
    *,
    async_input_gradient: bool = False,
    fused_calls: FusedCalls | None = None,
) -> Mapping[str, Placement]:
    """Spread ``decoder`` over the ranks of ``mesh``'s dimension "tp", in place.

    Call it before an optimizer is made, before blocks are compiled and before hooks are set. Weights that are there
    are cut; on the meta device shapes are. The decoder may be a part of the model (a pipeline stage).
    Collective: every rank of the group calls it.

    Args:
        sequence_parallel: whether what lies between the matrices is spread over the tokens. Then the number of
            tokens in each batch must be divisible by the size of the group, and hidden states outside of the
            matrices, those that enter and leave a part of the model too, are (T / size, D).
        traffic: where the payload of every collective is counted, under "tp".
        chunks: into how many the collectives of a layer are cut.
        async_input_gradient: whether the gradient of what enters matrices travels while those of the weights are
            computed; in chunks it does in any case.
        fused_calls: where calls of torch's fused operators over symmetric memory are counted, which then do what enters
            and leaves the matrices of blocks; needs ``sequence_parallel`` and no chunks. None: they are not used.

    Returns:
        The placement of each parameter of ``decoder``, by name.
    """
    process_group = mesh.group(_DIM)
    if process_group is None:
        return {name: Placement(tuple(value.shape)) for name, value in decoder.named_parameters()}
    group = Group(_DIM, process_group, mesh.size(_DIM), mesh.index(_DIM), traffic)
    _check(decoder.model, group.size)
    replicas = _key_value_replicas(decoder.model, mesh, group)
    memory = None
    if fused_calls is not None:
        assert sequence_parallel, "the fused operators gather and scatter rows"
        assert chunks == WHOLE, "the fused operators cut the rows themselves"
        fused_calls.blocks = len(decoder.blocks)
        memory = SymmetricMemory(group, fused_calls)
    spreading = _Spreading(
        decoder, group, replicas, sequence_parallel, chunks, memory, async_input_gradient=async_input_gradient
    )
    return spreading.placements


def _check(model: ModelConfig, size: int) -> None:
    heads, groups = model.num_attention_heads, model.query_groups
    assert heads % size == 0, f"{heads} heads over {size} ranks"
    assert groups % size == 0 or size % groups == 0, f"{groups} query groups over {size} ranks"
    assert model.ffn_size % size == 0, f"ffn_hidden_size {model.ffn_size} over {size} ranks"
    assert model.vocab_size >= size, f"{model.vocab_size} rows of the embedding over {size} ranks"


def _key_value_replicas(model: ModelConfig, mesh: Mesh, group: Group) -> Group | None:
    """The ranks that hold the same key and value head as this one; None where each has heads of its own."""
    if model.query_groups >= group.size:
        return None
    count = group.size // model.query_groups
    place = group.index % count
    ranks = mesh.ranks(_DIM)[group.index - place :][:count]
    replicas = dist.new_group(ranks, use_local_synchronization=True, timeout=mesh.timeout)
    return Group(_DIM, replicas, count, place, group.traffic)


class ParallelNorm(UsesOperators, nn.Module):
    """A norm whose output enters matrices that are spread over ranks, or whose input is a rank's share."""

    def __init__(
        self, norm: RMSNorm | LayerNorm, *, sum_over: Group | None, enter: Callable[[Tensor], Tensor] | None
    ) -> None:
        """``sum_over``: the ranks that normalise different features or tokens; ``enter``: applied to the output."""
        super().__init__()
        self.weight = norm.weight
        self.bias = norm.bias if isinstance(norm, LayerNorm) else None
        # Not as a module: parameters keep the names they have in the whole model.
        self._normalise: Callable[..., Tensor] = norm.normalise
        self._add_and_normalise: Callable[..., tuple[Tensor, Tensor]] = norm.add_and_normalise
        self._take_operators = norm.take_operators
        self._sum_over = sum_over
        self._enter = enter

    def forward(self, x: Tensor) -> Tensor:
        """(..., size) to the same shape; under sequence parallelism (T / ranks, D) to (T, D)."""
        out = self._normalise(x, *self._parameters_here())
        return out if self._enter is None else self._enter(out)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """``forward`` of ``x + residual``, and that sum, which stays a rank's share."""
        out, total = self._add_and_normalise(x, residual, *self._parameters_here())
        return out if self._enter is None else self._enter(out), total

    def take_operators(self, selection: Selection) -> None:
        """The norm computes by ``selection``."""
        self._take_operators(selection)

    def _parameters_here(self) -> list[Tensor]:
        parameters: list[Tensor] = [self.weight] if self.bias is None else [self.weight, self.bias]
        if self._sum_over is None:
            return parameters
        return [copied(value, self._sum_over) for value in parameters]


class RowParallelLinear(UsesOperators, nn.Module):
    """A linear layer cut by input features: each rank has a summand of the output. The bias is added to the sum."""

    def __init__(
        self,
        linear: Linear,
        group: Group,
        *,
        sequence_parallel: bool,
        chunks: int = 1,
        memory: SymmetricMemory | None = None,
    ) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.group = group
        self.sequence_parallel = sequence_parallel
        self.chunks = chunks
        self.memory = memory

    def forward(self, x: Tensor) -> Tensor:
        """(T, own input features) to (T, output features); under sequence parallelism to (T / ranks, ...)."""
        out = self._sum(x)
        if self.bias is None:
            return out
        bias = copied(self.bias, self.group) if self.sequence_parallel else self.bias
        return out + bias.to(x.dtype)

    def operands(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """The weight in ``dtype``; the bias is no part of a summand."""
        return self.weight.to(dtype), None

    def _sum(self, x: Tensor) -> Tensor:
        if self.memory is not None:
            fused: Tensor = symmetric_row_product(x, self, self.memory)
            return fused
        if self.chunks > 1:
            chunked: Tensor = row_parallel_product(
                x, self, self.group, self.chunks, sequence_parallel=self.sequence_parallel
            )
            return chunked
        summand = self.product(x, *self.operands(x.dtype))
        return scattered(summand, self.group) if self.sequence_parallel else summed(summand, self.group)


class SharedColumnsLinear(UsesOperators, nn.Module):
    """A linear layer that several ranks hold alike and whose output each uses for heads of its own."""

    def __init__(self, linear: Linear, replicas: Group) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.replicas = replicas

    def forward(self, x: Tensor) -> Tensor:
        """(T, D) to (T, output features)."""
        return self.product(x, *self.operands(x.dtype))

    def operands(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Weight and bias in ``dtype``, whose gradients are summed over those that hold them."""
        weight = copied(self.weight, self.replicas).to(dtype)
        return weight, None if self.bias is None else copied(self.bias, self.replicas).to(dtype)


class PositionsOfOwnTokens(nn.Module):
    """An embedding of this rank's share of the rows that it is asked for."""

    def __init__(self, weight: nn.Parameter, group: Group) -> None:
        super().__init__()
        self.weight = weight
        self.group = group

    def forward(self, rows_T: Tensor) -> Tensor:
        """(T,) int64 to (T / ranks, D)."""
        own_T = rows_T.chunk(self.group.size)[self.group.index]
        return F.embedding(own_T, copied(self.weight, self.group))


class DropoutOfOwnTokens(Dropout):
    """Dropout of a rank's share of the tokens, by its part of the whole mask."""

    def __init__(self, probability: float, group: Group) -> None:
        super().__init__(probability)
        self.group = group

    def forward(self, x_TD: Tensor) -> Tensor:
        """(T / ranks, D) to the same shape and dtype."""
        if not self.training or not self.probability:
            return x_TD
        ones_TD = x_TD.new_ones(self.group.size * x_TD.shape[0], *x_TD.shape[1:])
        return x_TD * F.dropout(ones_TD, self.probability).chunk(self.group.size)[self.group.index]


def _factors_of_own_heads(q_THK: Tensor, documents: int, *, probability: float, group: Group) -> Tensor:
    """This rank's heads of the factors (N, H, L, L) of all attention weights."""
    length = q_THK.shape[0] // documents
    ones_NHLL = q_THK.new_ones(documents, group.size * q_THK.shape[1], length, length)
    return F.dropout(ones_NHLL, probability).chunk(group.size, dim=1)[group.index]


class _Spreading:
    """The replacement of modules, and the placements that result."""

    def __init__(
        self,
        decoder: Decoder,
        group: Group,
        replicas: Group | None,
        sequence_parallel: bool,
        chunks: Chunks,
        memory: SymmetricMemory | None,
        *,
        async_input_gradient: bool,
    ) -> None:
        self.group = group
        self.replicas = replicas
        self.sequence_parallel = sequence_parallel
        self.chunks = chunks
        self.memory = memory
        self.async_input_gradient = async_input_gradient
        self._cut: dict[nn.Parameter, Placement] = {}
        model = decoder.model
        for block in decoder.blocks.values():
            assert isinstance(block, Block)
            self._block(block, model)
        self._ends(decoder)
        everywhere = frozenset({_DIM})
        self.placements = {
            name: self._cut.get(value, Placement(tuple(value.shape), replicated=everywhere))
            for name, value in decoder.named_parameters()
        }

    def _enter(self, x_TD: Tensor) -> Tensor:
        """From the residual stream to the input of matrices cut by output features."""
        return gathered(x_TD, self.group) if self.sequence_parallel else copied(x_TD, self.group)

    def _block(self, block: Block, model: ModelConfig) -> None:
        attention, mlp = block.attention, block.mlp
        self._columns(attention.query)
        for name in ("key", "value"):
            self._key_or_value(attention, name, model.head_size)
        for name in ("query_norm", "key_norm"):
            if getattr(attention, name) is not None:
                self._norm(attention, name, sum_over=self.group, enter=None)
        for name in ("gate", "up"):
            if hasattr(mlp, name):
                self._columns(getattr(mlp, name))
        self._rows(attention, "output", self.chunks.output)
        self._rows(mlp, "down", self.chunks.down)
        queries_keys_values = (attention.query, attention.key, attention.value)
        self._enter_matrices(
            block, "attention_norm", attention, queries_keys_values, _QUERY_KEY_VALUE, self.chunks.qkv
        )
        if isinstance(mlp, SwiGLUMLP):
            entered: tuple[nn.Module, ...] = (mlp.gate, mlp.up)
            together: Together | None = _GATE_UP
        else:
            entered, together = (mlp.up,), None
        self._enter_matrices(block, "mlp_norm", mlp, entered, together, self.chunks.gate_up)
        for name in ("after_attention", "after_mlp"):
            self._dropout(block, name)
        if block.attention_dropout:
            block.attention_factors = partial(
                _factors_of_own_heads, probability=block.attention_dropout, group=self.group
            )

    def _ends(self, decoder: Decoder) -> None:
        shard = _share_of_vocabulary(decoder.model.vocab_size, self.group)
        if decoder.embedding is not None:
            weight = self._replace_parameter(decoder.embedding, "weight", shard)
            embedding = VocabularyParallelEmbedding(
                weight, shard.offset, self.group, sequence_parallel=self.sequence_parallel
            )
            _replace(decoder, "embedding", embedding)
        if decoder.position_embedding is not None and self.sequence_parallel:
            positions = PositionsOfOwnTokens(decoder.position_embedding.weight, self.group)
            _replace(decoder, "position_embedding", positions)
        self._dropout(decoder, "after_embedding")
        if decoder.output is not None:
            self._replace_parameter(decoder.output, "weight", shard)
        if decoder.final_norm is not None:
            self._norm_into_matrices(decoder, "final_norm")
        decoder.head = VocabularyParallelHead(self.group, shard.offset, decoder.model.vocab_size)

    def _norm_into_matrices(self, parent: nn.Module, name: str) -> None:
        self._norm(parent, name, sum_over=self.group if self.sequence_parallel else None, enter=self._enter)

    def _enter_matrices(
        self,
        block: Block,
        norm: str,
        owner: Attention | SwiGLUMLP | GELUMLP,
        matrices: Sequence[nn.Module],
        together: Together | None,
        chunks: int,
    ) -> None:
        """From the output of ``norm`` to that of ``matrices``, which ``owner`` has."""
        if self.memory is None and chunks == 1 and not self.async_input_gradient:
            self._norm_into_matrices(block, norm)
            return
        self._norm(block, norm, sum_over=self.group if self.sequence_parallel else None, enter=None)
        if self.memory is not None:
            owner.joint_products = SymmetricColumns(matrices, self.memory)
            return
        owner.joint_products = ColumnParallelLinears(
            matrices, together, self.group, chunks, sequence_parallel=self.sequence_parallel
        )

    def _norm(
        self, parent: nn.Module, name: str, sum_over: Group | None, enter: Callable[[Tensor], Tensor] | None
    ) -> None:
        norm = getattr(parent, name)
        assert isinstance(norm, RMSNorm | LayerNorm), f"{name} is {type(norm).__name__}"
        _replace(parent, name, ParallelNorm(norm, sum_over=sum_over, enter=enter))

    def _dropout(self, parent: nn.Module, name: str) -> None:
        if self.sequence_parallel:
            _replace(parent, name, DropoutOfOwnTokens(getattr(parent, name).probability, self.group))

    def _columns(self, linear: Linear) -> None:
        """Cut by output features."""
        shard = even_shard(_DIM, 0, linear.weight.shape, self.group.index, self.group.size)
        self._cut_outputs(linear, shard)

    def _key_or_value(self, attention: nn.Module, name: str, head_size: int) -> None:
        linear = getattr(attention, name)
        assert isinstance(linear, Linear)
        if self.replicas is None:
            self._columns(linear)
            return
        head = self.group.index // self.replicas.size
        self._cut_outputs(linear, Shard(_DIM, 0, head * head_size, head_size, replica=self.replicas.index))
        _replace(attention, name, SharedColumnsLinear(linear, self.replicas))

    def _cut_outputs(self, linear: Linear, shard: Shard) -> None:
        self._replace_parameter(linear, "weight", shard)
        if linear.bias is not None:
            self._replace_parameter(linear, "bias", shard)

    def _rows(self, parent: nn.Module, name: str, chunks: int) -> None:
        """Cut by input features."""
        linear = getattr(parent, name)
        assert isinstance(linear, Linear)
        shard = even_shard(_DIM, 1, linear.weight.shape, self.group.index, self.group.size)
        self._replace_parameter(linear, "weight", shard)
        row_parallel = RowParallelLinear(
            linear,
            self.group,
            sequence_parallel=self.sequence_parallel,
            chunks=chunks,
            memory=self.memory,
        )
        _replace(parent, name, row_parallel)

    def _replace_parameter(self, owner: nn.Module, name: str, shard: Shard) -> nn.Parameter:
        whole = getattr(owner, name)
        placement = Placement(tuple(whole.shape), (shard,))
        part = nn.Parameter(whole.detach()[placement.slices()].clone(), requires_grad=whole.requires_grad)
        setattr(owner, name, part)
        self._cut[part] = placement
        return part


def _share_of_vocabulary(rows: int, group: Group) -> Shard:
    """Rows of the vocabulary, as even as they can be: the first ranks have one more where the ranks don't divide it."""
    each, more = divmod(rows, group.size)
    return Shard(_DIM, 0, group.index * each + min(group.index, more), each + (group.index < more))


def _replace(parent: nn.Module, name: str, module: nn.Module) -> None:
    assert isinstance(getattr(parent, name), nn.Module), f"{type(parent).__name__} has no module {name}"
    setattr(parent, name, module)
