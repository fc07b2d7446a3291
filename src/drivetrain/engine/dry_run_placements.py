"""Which part of which parameter a rank holds, as arithmetic: the closed form of what building the model would give.

Tensor parallelism cuts by the rules of :mod:`drivetrain.engine.parallel.tensor_parallel`, a pipeline deals out layers,
and the ZeRO stages cut what is left by rows. Tests hold it against ranks that were built.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from drivetrain.config import RunConfig
from drivetrain.config.layout import Layout, stage_plan
from drivetrain.config.model import ModelConfig
from drivetrain.config.stages import StagePlan
from drivetrain.engine.model.huggingface_state import expected_shapes
from drivetrain.engine.parallel.placement import Placement, Shard, even_shard

__all__ = ["PlannedModel", "tied_ends"]

_TP = "tp"
_CUT_BY_OUTPUTS = frozenset({"query", "gate", "up"})
_KEYS_AND_VALUES = frozenset({"key", "value"})
_CUT_BY_INPUTS = frozenset({"output", "down"})


def tied_ends(model: ModelConfig, plan: StagePlan | None) -> bool:
    """Whether two ranks of a pipeline hold the embedding: it is tied, and the ends lie on different ranks."""
    if plan is None or model.untie_embeddings_and_output_weights:
        return False
    first, last = plan.ranks_of_ends
    return first != last


@dataclass(frozen=True)
class PlannedModel:
    """A run's model as its layout would spread it.

    Attributes:
        layout: the sizes.
        plan: which layers lie where; None: no pipeline.
        wholes: shape of every parameter in a single process, in the order of the module.
    """

    model: ModelConfig
    layout: Layout
    plan: StagePlan | None
    wholes: Mapping[str, tuple[int, ...]]

    @staticmethod
    def of(config: RunConfig, layout: Layout) -> "PlannedModel":
        """That of ``config`` over ``layout``; the rules must hold."""
        wholes = {name: tuple(shape) for name, shape in expected_shapes(config.model).items()}
        return PlannedModel(config.model, layout, stage_plan(config) if layout.pp > 1 else None, wholes)

    def has_first(self, pp: int) -> bool:
        """Whether rank ``pp`` of the pipeline embeds tokens."""
        return self.plan is None or self.plan.ranks_of_ends[0] == pp

    def has_last(self, pp: int) -> bool:
        """Whether rank ``pp`` of the pipeline computes the loss."""
        return self.plan is None or self.plan.ranks_of_ends[1] == pp

    def layers_on(self, pp: int) -> int:
        """Number of layers on rank ``pp`` of the pipeline."""
        return self.model.num_layers if self.plan is None else len(self.plan.layers_on(pp))

    def placements(self, tp: int, pp: int) -> Mapping[str, Placement]:
        """Of every parameter on the ranks at ``tp`` and ``pp``, before data parallelism cuts by rows; in the order of
        the module."""
        layers = None if self.plan is None else frozenset(self.plan.layers_on(pp))
        return {
            name: self._placement(name, shape, tp)
            for name, shape in self.wholes.items()
            if self._is_on(name, layers, pp)
        }

    def _is_on(self, name: str, layers: frozenset[str] | None, pp: int) -> bool:
        if layers is None:
            return True
        module, _, rest = name.partition(".")
        match module:
            case "blocks":
                return rest.partition(".")[0] in layers
            case "embedding":
                tied = not self.model.untie_embeddings_and_output_weights
                return self.has_first(pp) or (tied and self.has_last(pp))
            case "position_embedding":
                return self.has_first(pp)
        assert module in ("final_norm", "output"), f"nobody said where {name} lies in a pipeline"
        return self.has_last(pp)

    def _placement(self, name: str, shape: tuple[int, ...], tp: int) -> Placement:
        whole = Placement(shape)
        if self.layout.tp > 1:
            shard = self._shard(name, shape, tp)
            whole = whole.replicated_over(_TP) if shard is None else whole.cut(shard)
        if name == "embedding.weight" and tied_ends(self.model, self.plan):
            whole = whole.replicated_over("pp")
        return whole

    def _shard(self, name: str, shape: tuple[int, ...], tp: int) -> Shard | None:
        """The part of rank ``tp``; None: all of it."""
        *path, module, kind = name.split(".")
        size = self.layout.tp
        if not path:
            return _vocabulary(shape[0], tp, size) if module in ("embedding", "output") else None
        if module in _CUT_BY_OUTPUTS:
            return even_shard(_TP, 0, shape, tp, size)
        if module in _KEYS_AND_VALUES:
            if self.model.query_groups >= size:
                return even_shard(_TP, 0, shape, tp, size)
            head, replica = divmod(tp, size // self.model.query_groups)
            width = self.model.head_size
            return Shard(_TP, 0, head * width, width, replica=replica)
        if module in _CUT_BY_INPUTS and kind == "weight":
            return even_shard(_TP, 1, shape, tp, size)
        return None


def _vocabulary(rows: int, tp: int, size: int) -> Shard:
    each, more = divmod(rows, size)
    return Shard(_TP, 0, tp * each + min(tp, more), each + (tp < more))
