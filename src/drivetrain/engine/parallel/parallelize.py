"""Tensor parallelism for a module of the user's own, by a plan from names of submodules to words.

=================== ========================= =============================================================
word                for                       a rank holds
=================== ========================= =============================================================
``column``          ``nn.Linear``             its share of the output features; the output stays cut
``column``          ``nn.Embedding``          its share of the features; the output stays cut
``column_gathered`` ``nn.Linear``             its share of the output features; the output is joined
``row``             ``nn.Linear``             its share of the input features; the outputs are summed
``row``             ``nn.Embedding``          its share of the vocabulary; the outputs are summed
``sequence``        any, position by position all of it, for its part of the sequence; gradients are summed
``shared``          any                       all of it, for heads of its own; gradients are summed
``replicate``       any; what has no word     all of it, and computes what the other ranks compute
=================== ========================= =============================================================

``nn.Dropout`` may have ``sequence`` or ``column`` (its input is cut by features): its mask is then a part of the whole
one.

A plan that has ``sequence`` is one of sequence parallelism: what lies between the matrices is split along the sequence.
An Embedding with ``row`` or ``sequence`` splits it, each ``column`` gathers it, each ``row`` leaves a part of the sum.

Names of parameters stay as they are, parameters stay plain tensors, and after backward a rank has the whole gradient of
all that it holds. What a plan can't know is whether the module's own code, between a column and the row that follows,
works feature by feature or head by head. See ``docs/parallelize.md``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.engine.parallel.collectives import Group
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.parallelize_checks import FirstStep, require_same_module
from drivetrain.engine.parallel.parallelize_layers import (
    ColumnEmbedding,
    ColumnLinear,
    Entrance,
    Flow,
    GatheredColumnLinear,
    OwnPart,
    PartOfDropout,
    RowEmbedding,
    RowLinear,
    SequenceEmbedding,
)
from drivetrain.engine.parallel.parallelize_plan import Planned, Word, read_plan
from drivetrain.engine.parallel.placement import Placement, Shard
from drivetrain.engine.parallel.traffic import Traffic
from drivetrain.errors import ConfigurationError

__all__ = ["Word", "parallelize"]

_DIM = "tp"


def parallelize(
    module: nn.Module,
    plan: Mapping[str, Word],
    mesh: Mesh,
    traffic: Traffic,
    *,
    sequence_dim: int = 1,
    divided: Sequence[str] = (),
) -> Mapping[str, Placement]:
    """Spread ``module`` over the ranks of ``mesh``'s dimension "tp", in place.

    Call it before an optimizer is made, before anything is compiled and before hooks are set. Weights that are there
    are cut; on the meta device shapes are. Collective: every rank of the group calls it, with the same weights.

    Args:
        plan: words by patterns of dotted names of submodules (``fnmatch``: ``*`` also stands for dots).
        traffic: where the payload of every collective is counted, under "tp".
        sequence_dim: which dimension of activations is the sequence, counted from 0; 1 in (batch, sequence, features).
            Read in a plan with "sequence" alone.
        divided: patterns of dotted names of integer attributes that count what is cut (``blocks.*.attention.heads``);
            each is divided by the size of the group.

    Returns:
        The placement of each parameter by name, for :func:`~drivetrain.engine.parallel.data_parallel.gradient_sync`.

    Raises:
        ConfigurationError: the plan does not fit the module, each problem in a line; nothing has been changed then.
            Or: the ranks have different weights, plans or (in the first forward pass) inputs; in a forward pass, a cut
            output that nothing takes; in the first backward pass, a gradient that ranks should have alike and have not.
    """
    if sequence_dim < 0:
        raise ConfigurationError(
            f"sequence_dim = {sequence_dim}: it is counted from 0; nearest: 0, and 1 fits (batch, sequence, features)"
        )
    size = mesh.size(_DIM)
    planned = read_plan(module, plan, size, divided)
    process_group = mesh.group(_DIM)
    if process_group is None:
        return {name: Placement(tuple(value.shape)) for name, value in module.named_parameters()}
    group = Group(_DIM, process_group, size, mesh.index(_DIM), traffic)
    require_same_module(module, plan.items(), _device_of(module, mesh), group)
    return _Spreading(module, planned, group, sequence_dim).placements


def _device_of(module: nn.Module, mesh: Mesh) -> torch.device:
    """Where tensors of the group are."""
    for parameter in module.parameters():
        if not parameter.is_meta:
            return parameter.device
    assert mesh.device_mesh is not None
    return torch.device(mesh.device_mesh.device_type)


@dataclass(frozen=True)
class _WholeFeatures:
    """A hook before a module that reads whole features."""

    flow: Flow
    name: str
    features: int

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs.get("input")
        if isinstance(x, Tensor):
            self.flow.expect_features(self.name, x, self.features)


class _Spreading:
    """The replacement of modules, and the placements that result."""

    def __init__(self, module: nn.Module, planned: Planned, group: Group, sequence_dim: int) -> None:
        self.module = module
        self.group = group
        sequence = "sequence" in planned.words.values()
        self.flow = Flow(group, sequence_dim if sequence else None)
        self._entrances: dict[str, Entrance] = {}
        self._cut: dict[nn.Parameter, tuple[nn.Parameter, Placement]] = {}
        # Looked up before anything is replaced: two names may lead to one module.
        replaced = [
            (name, word, module.get_submodule(name))
            for name, word in planned.words.items()
            if word != "replicate"
        ]
        replacements: dict[nn.Module, nn.Module] = {}
        for name, word, old in replaced:
            if old not in replacements:
                replacements[old] = self._replacement(name, old, word)
            parent, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(parent), leaf, replacements[old])
        for owner, attribute, count in planned.divided:
            setattr(owner, attribute, count)
        self._expect_whole_features()
        module.register_forward_pre_hook(self._begin)
        module.register_forward_hook(self._end)
        placements = dict(self._cut.values())
        everywhere = frozenset({_DIM})
        self.placements = {
            name: placements.get(value, Placement(tuple(value.shape), replicated=everywhere))
            for name, value in module.named_parameters()
        }
        alike = [name for name, placement in self.placements.items() if not placement.shards]
        FirstStep(module, alike, group)

    def _begin(self, *_: object) -> None:
        self.flow.begin()

    def _end(self, *_: object) -> None:
        self.flow.end()

    def _replacement(self, name: str, old: nn.Module, word: Word) -> nn.Module:
        flow = self.flow
        if isinstance(old, nn.Dropout):
            assert word in ("sequence", "column")
            dim = -1 if flow.sequence_dim is None or word == "column" else flow.sequence_dim
            return PartOfDropout(old, name, flow, dim)
        if word == "shared" or (word == "sequence" and not isinstance(old, nn.Embedding)):
            if word == "sequence":
                self._split_dropout_in(name, old)
            return OwnPart(old, name, flow, of_sequence=word == "sequence")
        if isinstance(old, nn.Embedding):
            return self._embedding(name, old, word)
        assert isinstance(old, nn.Linear), f"{name} is {type(old).__name__}"
        if word == "row":
            return RowLinear(old, self._part(old.weight, 1), name, flow)
        weight = self._part(old.weight, 0)
        bias = None if old.bias is None else self._part(old.bias, 0)
        if word == "column_gathered":
            offset = self._share(old.out_features).offset
            return GatheredColumnLinear(old, weight, bias, name, self._entrance(name), flow, offset)
        return ColumnLinear(old, weight, bias, name, self._entrance(name), flow)

    def _split_dropout_in(self, name: str, old: nn.Module) -> None:
        """What is in a module with "sequence" has it too: dropout draws the mask of the whole sequence."""
        for inner, module in list(old.named_modules()):
            for key, child in module.named_children():
                if type(child) is nn.Dropout:
                    child_name = ".".join(filter(None, (name, inner, key)))
                    setattr(module, key, self._replacement(child_name, child, "sequence"))

    def _embedding(self, name: str, old: nn.Embedding, word: Word) -> nn.Module:
        if word == "sequence":
            return SequenceEmbedding(old, name, self.flow)
        if word == "column":
            return ColumnEmbedding(old, self._part(old.weight, 1), name, self.flow)
        offset = self._share(old.num_embeddings).offset
        return RowEmbedding(old, self._part(old.weight, 0), name, self.flow, offset)

    def _entrance(self, name: str) -> Entrance:
        """That of the module whose forward calls ``name``; lists and dicts of modules have none."""
        parent = name.rpartition(".")[0]
        while isinstance(self.module.get_submodule(parent), nn.ModuleList | nn.ModuleDict):
            parent = parent.rpartition(".")[0]
        if parent not in self._entrances:
            entrance = self._entrances[parent] = Entrance(self.flow)
            self.module.get_submodule(parent).register_forward_hook(entrance.close, always_call=True)
        return self._entrances[parent]

    def _share(self, length: int, dim: int = 0) -> Shard:
        """This rank's part of a dimension, as even as can be: the first ranks have one more where there is a rest."""
        each, more = divmod(length, self.group.size)
        index = self.group.index
        return Shard(_DIM, dim, index * each + min(index, more), each + (index < more))

    def _part(self, whole: Tensor, dim: int) -> nn.Parameter:
        """This rank's part; the same object for a parameter that several modules hold."""
        assert isinstance(whole, nn.Parameter)
        if whole not in self._cut:
            placement = Placement(tuple(whole.shape), (self._share(whole.shape[dim], dim),))
            values = whole.detach()[placement.slices()].clone(memory_format=torch.contiguous_format)
            self._cut[whole] = (nn.Parameter(values, requires_grad=whole.requires_grad), placement)
        return self._cut[whole][0]

    def _expect_whole_features(self) -> None:
        """Have those that read whole features say so, where a cut reaches them instead."""
        for name, module in self.module.named_modules():
            if isinstance(module, ColumnLinear | RowLinear):
                continue
            weight = getattr(module, "weight", None)
            if isinstance(module, nn.Linear):
                features = module.in_features
            elif isinstance(weight, nn.Parameter) and weight.dim() == 1:
                features = len(weight)
            else:
                continue
            module.register_forward_pre_hook(_WholeFeatures(self.flow, name, features), with_kwargs=True)
