"""The layers that :mod:`drivetrain.engine.parallel.parallelize` puts in the place of a user's, with the same names.

Each takes over the parameters of the layer it replaces and holds the collective; its argument has the name that it has
in torch's layer, since code may pass it by keyword. They share one :class:`Flow`, which knows how far the forward pass
has come, so that a cut that nothing takes is named instead of ending in a shape error.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from drivetrain.engine.parallel.collectives import Group, copied, gathered, joined, scattered, summed
from drivetrain.engine.parallel.parallelize_text import listed, nearest_multiples
from drivetrain.errors import ConfigurationError

__all__ = [
    "ColumnEmbedding",
    "ColumnLinear",
    "Entrance",
    "Flow",
    "GatheredColumnLinear",
    "OwnPart",
    "PartOfDropout",
    "RowEmbedding",
    "RowLinear",
    "SequenceEmbedding",
]


class Flow:
    """What one forward pass of the whole module has done so far.

    Attributes:
        group: the ranks that share the layers.
        sequence_dim: dimension of activations that is split between the matrices; None: nothing is.
        open_columns: columns whose cut output no row has taken yet.
        parts: lengths of the parts into which sequences were split.
        cut_features: numbers of features that columns have left on a rank.
    """

    def __init__(self, group: Group, sequence_dim: int | None) -> None:
        self.group = group
        self.sequence_dim = sequence_dim
        self.open_columns: list[str] = []
        self.parts: set[int] = set()
        self.cut_features: set[int] = set()
        # Layers also run on their own, and once more in backward where activations are recomputed: what comes before
        # them is known in a forward pass of the whole module alone.
        self._whole_pass = False

    def begin(self) -> None:
        """The whole module's forward begins."""
        self.open_columns.clear()
        self.parts.clear()
        self.cut_features.clear()
        self._whole_pass = True

    def end(self) -> None:
        """It has ended. Raises ConfigurationError where what it returns may still be cut."""
        self._whole_pass = False
        if self.open_columns:
            columns = listed(self.open_columns)
            raise ConfigurationError(
                f"the output of {columns} is cut over {self.group.size} ranks, and until the end of the forward pass "
                "no Linear with 'row' takes it; give it 'column_gathered', or 'replicate'"
            )

    def column(self, name: str, features: int) -> None:
        """The output of ``name`` is cut: it has ``features`` on this rank."""
        self.cut_features.add(features)
        if self._whole_pass and name not in self.open_columns:
            self.open_columns.append(name)

    def row(self) -> None:
        """What was cut has been taken."""
        self.open_columns.clear()

    def split(self, name: str, length: int) -> None:
        """``name`` splits a sequence of ``length`` positions. Raises ConfigurationError if it can't be."""
        size = self.group.size
        if length % size:
            raise ConfigurationError(
                f"{name}: {length} positions of the sequence (dimension {self.sequence_dim}) are not divisible by "
                f"{size} ranks; nearest: {nearest_multiples(length, size)}"
            )
        self.parts.add(length // size)

    def expect_part(self, name: str, x: Tensor) -> None:
        """``x``, which ``name`` takes for this rank's part of a sequence, must have been split."""
        assert self.sequence_dim is not None
        if self._whole_pass and not (
            x.dim() > self.sequence_dim and x.shape[self.sequence_dim] in self.parts
        ):
            raise ConfigurationError(
                f"{name} reads {tuple(x.shape)} as a part of the sequence (dimension {self.sequence_dim}), but no "
                f"layer before it left a part of that length; in a plan with 'sequence' an Embedding with 'row' or "
                "'sequence', or a Linear with 'row', comes first and splits it"
            )

    def expect_features(self, name: str, x: Tensor, features: int) -> None:
        """``name`` reads whole features. Raises ConfigurationError if ``x`` has those of this rank alone."""
        if self.open_columns and x.dim() and x.shape[-1] * self.group.size == features:
            columns = listed(self.open_columns)
            raise ConfigurationError(
                f"{name} reads {features} features and gets {x.shape[-1]}: the output of {columns} is cut over "
                f"{self.group.size} ranks; give {name} 'row' if it is a Linear, or give {columns} 'column_gathered' or "
                "'replicate'"
            )

    def expect_cut(self, name: str, x: Tensor) -> None:
        """``name`` takes ``x`` for this rank's features. Raises ConfigurationError if no column has left as many."""
        if self._whole_pass and x.shape[-1] not in self.cut_features:
            raise ConfigurationError(
                f"{name} with 'column' takes {tuple(x.shape)} for this rank's part of cut features, and no layer with "
                f"'column' before it leaves {x.shape[-1]} of them on a rank; give it 'replicate', or 'sequence' if its "
                "input is split along the sequence"
            )

    def leave(self, summand: Tensor, name: str) -> Tensor:
        """The sum over the ranks: whole, or this rank's part of the sequence of it."""
        if self.sequence_dim is None:
            return summed(summand, self.group)
        if self.sequence_dim >= summand.dim() - 1:
            raise ConfigurationError(
                f"{name} leaves {tuple(summand.shape)}, whose dimension {self.sequence_dim} is no sequence: the last "
                f"one is features; sequence_dim is at most {summand.dim() - 2} here"
            )
        self.split(name, summand.shape[self.sequence_dim])
        return scattered(summand, self.group, self.sequence_dim)

    def parameter(self, value: Tensor) -> Tensor:
        """A parameter that all ranks hold and each uses for its part of the sequence, if there are parts."""
        return value if self.sequence_dim is None else copied(value, self.group)


class Entrance:
    """Where columns with one parent take their input from what all ranks hold alike, once for all that read one tensor.

    Without it queries, keys and values would each sum the gradient of their common input over the ranks.
    """

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._last: tuple[Tensor, tuple[int, bool] | None, Tensor] | None = None

    def open(self, x: Tensor, name: str) -> Tensor:
        """``x``, whole along the sequence, for each rank to use in its own way."""
        flow = self._flow
        # Written to in between, or read without gradients first, it is another tensor. Inference tensors don't tell.
        state = None if x.is_inference() else (x._version, torch.is_grad_enabled())
        if self._last is not None and self._last[0] is x and state is not None and self._last[1] == state:
            return self._last[2]
        if flow.sequence_dim is None:
            entered = copied(x, flow.group)
        else:
            flow.expect_part(name, x)
            entered = gathered(x, flow.group, flow.sequence_dim)
        self._last = (x, state, entered)
        return entered

    def close(self, *_: object) -> None:
        """Forget the latest tensor: a hook after the parent's forward, so that nothing outlives it."""
        self._last = None


def _enter(entrance: Entrance, x: Tensor, name: str) -> Tensor:
    return entrance.open(x, name)


def _leave(flow: Flow, summand: Tensor, name: str) -> Tensor:
    flow.row()
    return flow.leave(summand, name)


def _embedded(flow: Flow, summand: Tensor, name: str) -> Tensor:
    return flow.leave(summand, name)


def _note_column(flow: Flow, name: str, features: int) -> None:
    flow.column(name, features)


def _expect_cut(flow: Flow, name: str, x: Tensor) -> None:
    flow.expect_cut(name, x)


# What talks or remembers is left out of compiled graphs.
enter: Callable[[Entrance, Tensor, str], Tensor] = torch.compiler.disable(_enter)
leave: Callable[[Flow, Tensor, str], Tensor] = torch.compiler.disable(_leave)
embedded: Callable[[Flow, Tensor, str], Tensor] = torch.compiler.disable(_embedded)
note_column: Callable[[Flow, str, int], None] = torch.compiler.disable(_note_column)
expect_cut: Callable[[Flow, str, Tensor], None] = torch.compiler.disable(_expect_cut)


class ColumnLinear(nn.Linear):
    """A linear layer cut by output features: of its output a rank has its own, or all of them joined."""

    def __init__(
        self,
        linear: nn.Linear,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        name: str,
        entrance: Entrance,
        flow: Flow,
    ) -> None:
        """``weight``, ``bias``: this rank's rows of ``linear``'s."""
        super(nn.Linear, self).__init__()
        self.in_features = linear.in_features
        self.out_features = weight.shape[0]
        self.weight = weight
        self.bias = bias  # type: ignore[assignment]
        self._name, self._entrance, self._flow = name, entrance, flow
        self.train(linear.training)

    def forward(self, input: Tensor) -> Tensor:
        """(..., input features) to (..., own output features)."""
        out = self.own_columns(input)
        note_column(self._flow, self._name, self.out_features)
        return out

    def own_columns(self, x: Tensor) -> Tensor:
        """The same, without saying that the output is cut."""
        self._flow.expect_features(self._name, x, self.in_features)
        return F.linear(enter(self._entrance, x, self._name), self.weight, self.bias)


class GatheredColumnLinear(ColumnLinear):
    """A linear layer cut by output features whose output every rank gets whole, to compute alike from there on."""

    def __init__(
        self,
        linear: nn.Linear,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        name: str,
        entrance: Entrance,
        flow: Flow,
        offset: int,
    ) -> None:
        """``offset``: number of the first of this rank's output features."""
        super().__init__(linear, weight, bias, name, entrance, flow)
        self._offset, self._whole_features = offset, linear.out_features

    def forward(self, input: Tensor) -> Tensor:
        """(..., input features) to (..., output features of all ranks)."""
        return joined(self.own_columns(input), self._flow.group, self._offset, self._whole_features)


class RowLinear(nn.Linear):
    """A linear layer cut by input features: each rank has a summand of the output. The bias is added to the sum."""

    def __init__(self, linear: nn.Linear, weight: nn.Parameter, name: str, flow: Flow) -> None:
        """``weight``: this rank's columns of ``linear``'s."""
        super(nn.Linear, self).__init__()
        self.in_features = weight.shape[1]
        self.out_features = linear.out_features
        self.weight = weight
        self.bias = linear.bias
        self._name, self._flow = name, flow
        self.train(linear.training)

    def forward(self, input: Tensor) -> Tensor:
        """(..., own input features) to (..., output features), or to this rank's part of the sequence of them."""
        if input.shape[-1] != self.in_features:
            raise ConfigurationError(
                f"{self._name} with 'row' reads its own {self.in_features} of "
                f"{self.in_features * self._flow.group.size} features and gets {input.shape[-1]}; what comes before "
                "it must be cut: give it 'column'"
            )
        out = leave(self._flow, F.linear(input, self.weight), self._name)
        bias: Tensor | None = self.bias
        return out if bias is None else out + self._flow.parameter(bias).to(out.dtype)


class _CutEmbedding(nn.Embedding):
    """What embeddings on a rank have in common. Row ``offset + i`` of the whole table is row ``i`` here."""

    def __init__(
        self, embedding: nn.Embedding, weight: Tensor, name: str, flow: Flow, offset: int = 0
    ) -> None:
        super(nn.Embedding, self).__init__()
        self.num_embeddings, self.embedding_dim = weight.shape
        self.max_norm, self.norm_type = None, 2.0
        self.scale_grad_by_freq = self.sparse = False
        padding = embedding.padding_idx
        own = padding is not None and offset <= padding < offset + self.num_embeddings
        self.padding_idx = padding - offset if padding is not None and own else None
        assert isinstance(weight, nn.Parameter)
        self.weight = weight
        self._name, self._flow, self._offset = name, flow, offset
        self.train(embedding.training)


class RowEmbedding(_CutEmbedding):
    """An embedding cut by rows of the vocabulary: each rank has a summand of the output, zeros for others' rows."""

    def forward(self, input: Tensor) -> Tensor:
        """Integers (...) to (..., D), or to this rank's part of the sequence of them."""
        own = input - self._offset
        elsewhere = (own < 0) | (own >= self.num_embeddings)
        x = F.embedding(own.masked_fill(elsewhere, 0), self.weight, self.padding_idx)
        return embedded(self._flow, x.masked_fill(elsewhere[..., None], 0.0), self._name)


class ColumnEmbedding(_CutEmbedding):
    """An embedding cut by features: a rank has its own of each row."""

    def forward(self, input: Tensor) -> Tensor:
        """Integers (...) to (..., own features)."""
        x = F.embedding(input, self.weight, self.padding_idx)
        note_column(self._flow, self._name, self.embedding_dim)
        return x


class SequenceEmbedding(_CutEmbedding):
    """A whole embedding that looks up this rank's part of the sequence alone."""

    def __init__(self, embedding: nn.Embedding, name: str, flow: Flow) -> None:
        super().__init__(embedding, embedding.weight, name, flow)

    def forward(self, input: Tensor) -> Tensor:
        """Integers (..., T, ...) to (..., T / ranks, ..., D)."""
        return F.embedding(self._own(input), copied(self.weight, self._flow.group), self.padding_idx)

    def _own(self, rows: Tensor) -> Tensor:
        assert self._flow.sequence_dim is not None
        # Positions often come without a batch.
        dim = min(self._flow.sequence_dim, rows.dim() - 1)
        self._flow.split(self._name, rows.shape[dim])
        return rows.chunk(self._flow.group.size, dim)[self._flow.group.index]


class OwnPart(nn.Module):
    """Any module that all ranks hold alike and each uses for its part of the sequence, or for heads of its own.

    The gradients of its parameters are summed over the ranks. It holds the module's parameters, buffers and children
    under their own names; the module's code runs on what it holds by ``torch.func.functional_call``, so that whoever
    replaces parameters (FSDP2 does) replaces them here.
    """

    def __init__(self, module: nn.Module, name: str, flow: Flow, *, of_sequence: bool) -> None:
        super().__init__()
        persistent = module.state_dict(keep_vars=True).keys()
        for key, parameter in list(module.named_parameters(recurse=False)):
            self.register_parameter(key, parameter)
            empty = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
            setattr(module, key, empty)
        for key, buffer in module.named_buffers(recurse=False):
            self.register_buffer(key, buffer, persistent=key in persistent)
        for key, child in module.named_children():
            self.add_module(key, child)
        # In a tuple, so that it is not a child whose name would come before the parameters' own.
        self._code = (module,)
        self._name, self._flow, self._of_sequence = name, flow, of_sequence
        self.train(module.training)

    def train(self, mode: bool = True) -> "OwnPart":
        """As of any module; the code that runs is told too."""
        super().train(mode)
        self._code[0].training = mode
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns for this rank's part."""
        x = args[0] if args else kwargs.get("input")
        if self._of_sequence and isinstance(x, Tensor):
            self._flow.expect_part(self._name, x)
        held: dict[str, Tensor] = {
            name: copied(value, self._flow.group) for name, value in self.named_parameters()
        }
        held.update(self.named_buffers())
        return functional_call(self._code[0], held, args, kwargs)


class PartOfDropout(nn.Dropout):
    """Dropout of a rank's part of the tokens, or of the features, by its part of the whole's mask.

    The generators of the ranks must be equal, as they are where all ranks set the same seed.
    """

    def __init__(self, dropout: nn.Dropout, name: str, flow: Flow, dim: int) -> None:
        """``dim``: which dimension the rank has a part of; -1: features."""
        super().__init__(dropout.p, dropout.inplace)
        self._name, self._flow, self._dim = name, flow, dim
        self.train(dropout.training)

    def forward(self, input: Tensor) -> Tensor:
        """A rank's part to the same shape and dtype."""
        if not self.training or not self.p:
            return input
        if self._dim == -1:
            expect_cut(self._flow, self._name, input)
        shape = list(input.shape)
        shape[self._dim] *= self._flow.group.size
        factors = F.dropout(input.new_ones(shape), self.p).chunk(self._flow.group.size, self._dim)
        return input * factors[self._flow.group.index]
