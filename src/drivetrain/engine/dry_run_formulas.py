"""What a rank holds and hands to collectives in a step, by the closed formulas of ``docs/parallel.md``.

They need no process, so they answer for every rank of a world, and where a pass over fake tensors would take too long.
Tests hold them against such passes and against real ones.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

import torch

from drivetrain.config import RunConfig
from drivetrain.config.derive import microbatches_per_rank
from drivetrain.config.stages import ZERO_BUBBLE
from drivetrain.engine.dry_run_placements import PlannedModel, tied_ends
from drivetrain.engine.ops._in_place_cross_entropy import LOGITS_PER_CHUNK
from drivetrain.engine.parallel.buckets import buckets_of, rows_of_part
from drivetrain.engine.parallel.pipeline import payload_bytes
from drivetrain.engine.parallel.placement import Placement
from drivetrain.engine.parallel.resident import resident_bytes
from drivetrain.engine.parallel.tensor_parallel_bytes import tensor_parallel_bytes
from drivetrain.engine.parallel.tensor_parallel_overlap import WHOLE, Chunks
from drivetrain.engine.parallel.traffic import Count

__all__ = ["Amount", "Formulas", "Resident", "Shape", "Traffic"]

Shape = tuple[int, ...]

Traffic = Mapping[tuple[str, str], Count | None]
"""Collectives of one step by (group, kind); None where there is no closed form."""

_BYTES = 4
"""Masters and gradients are fp32."""
_MOMENT_BYTES = {"fp32": 4, "bf16": 2}
_STAGES_KEPT_GATHERED = 3
"""Of the stages of a rank torch's runtime keeps so many gathered at once; with more it drops and gathers by turns."""
_PER_LAYER, _PER_CHUNK, _PER_PARAMETER = 400, 30, 30


@dataclass(frozen=True)
class Amount:
    """Elements that are this rank's, and bytes of the memory that holds them, padding of equal shares included."""

    elements: int
    bytes: int

    def __add__(self, other: "Amount") -> "Amount":
        return Amount(self.elements + other.elements, self.bytes + other.bytes)

    def times(self, count: int) -> "Amount":
        """Of ``count`` ranks that hold as much."""
        return Amount(self.elements * count, self.bytes * count)


@dataclass(frozen=True)
class Resident:
    """What is resident on a rank. Gradients: once reduced. Moments: both of AdamW's."""

    parameters: Amount
    gradients: Amount
    moments: Amount

    def __add__(self, other: "Resident") -> "Resident":
        return Resident(
            self.parameters + other.parameters,
            self.gradients + other.gradients,
            self.moments + other.moments,
        )

    def times(self, count: int) -> "Resident":
        """Of ``count`` ranks that hold as much."""
        return Resident(self.parameters.times(count), self.gradients.times(count), self.moments.times(count))

    @property
    def bytes(self) -> int:
        """All three together."""
        return self.parameters.bytes + self.gradients.bytes + self.moments.bytes


@dataclass(frozen=True)
class Formulas:
    """The formulas of one run.

    Attributes:
        compute_dtype: of activations.
        bucket_size_mb: MB (1e6 bytes) of gradients in a bucket; 0: all in one.
        tp_chunks: into how many pieces the collectives of tensor-parallel layers are cut.
    """

    config: RunConfig
    planned: PlannedModel
    compute_dtype: torch.dtype
    bucket_size_mb: float
    tp_chunks: Chunks = WHOLE

    @property
    def stage(self) -> int:
        """The ZeRO stage that is in effect: one rank shares with nobody."""
        return self.config.parallelism.zero_stage if self.planned.layout.size("dp_shard") > 1 else 0

    @property
    def num_microbatches(self) -> int:
        """Of a step, on each data-parallel rank."""
        return microbatches_per_rank(self.config, self.planned.layout.dp)

    def resident(self, shapes: Mapping[Shape, int], part: int) -> Resident:
        """Of the rank at place ``part`` along ``dp_shard``.

        Args:
            shapes: of its parameters before data parallelism cuts them, and how many there are of each.
        """
        parts, stage = self.planned.layout.size("dp_shard"), self.stage
        found = Resident(Amount(0, 0), Amount(0, 0), Amount(0, 0))
        for shape, count in shapes.items():
            whole, own = prod(shape), rows_of_part(shape[0], part, parts)[1] * prod(shape[1:])
            held = resident_bytes([shape], stage=stage, part=part, parts=parts, bytes_per_element=_BYTES)
            found += Resident(
                Amount(own if stage >= 3 else whole, held.parameters),
                Amount(own if stage >= 1 else whole, held.gradients),
                Amount(
                    2 * (own if stage >= 1 else whole),
                    held.moments * _MOMENT_BYTES[self.config.precision.optimizer_state_dtype] // _BYTES,
                ),
            ).times(count)
        return found

    def traffic(self, placements: Mapping[str, Placement], pp: int, part: int) -> Traffic:
        """Collectives of one training step on the rank at ``pp`` and at place ``part`` of ``dp_shard``."""
        found: dict[tuple[str, str], Count | None] = {}
        for counts in (
            self._tensor_parallel(pp),
            self._pipeline(placements, pp, part),
            self._data_parallel(placements, pp),
            self._norm(),
        ):
            for key, count in counts.items():
                before = found.get(key, Count())
                found[key] = None if before is None or count is None else before + count
        return found

    def _tensor_parallel(self, pp: int) -> Traffic:
        layout, model = self.planned.layout, self.config.model
        if layout.tp == 1:
            return {}
        sequence_parallel = self.config.parallelism.sequence_parallel
        layers, first, last = (
            self.planned.layers_on(pp),
            self.planned.has_first(pp),
            self.planned.has_last(pp),
        )
        bytes_of = tensor_parallel_bytes(
            model,
            layout.tp,
            sequence_parallel=sequence_parallel,
            tokens=self._tokens,
            compute_dtype=self.compute_dtype,
            layers=layers,
            first=first,
            last=last,
        )
        # What enters and what leaves attention and MLP, each once forward and once backward, one of which is a sum.
        of_layers = layers * sum(self.tp_chunks.by_product().values())
        # Norms of query and key heads, and heads of keys and values that ranks share.
        copies = 2 * layers * model.qk_layernorm
        if model.query_groups < layout.tp:
            copies += 2 * layers * (1 + model.add_bias_linear)
        if sequence_parallel:
            copies += (2 * layers + last) * (2 if model.normalization == "LayerNorm" else 1)
            copies += 2 * layers * model.add_bias_linear
            copies += first and model.position_embedding_type == "learned_absolute"
            sums = first + of_layers + last
            calls = {"all_reduce": 2 * last + copies, "reduce_scatter": sums, "all_gather": sums}
        else:
            calls = {"all_reduce": first + of_layers + 3 * last + copies}
        steps = self.num_microbatches
        # What a repeated forward pass sends again is counted, where it is.
        repeats = self.config.memory.recompute_granularity != "none"
        return {
            ("tp", kind): None if repeats else Count(steps * count, steps * bytes_of[kind])
            for kind, count in calls.items()
            if count
        }

    def _pipeline(self, placements: Mapping[str, Placement], pp: int, part: int) -> Traffic:
        plan, layout = self.planned.plan, self.planned.layout
        if plan is None:
            return {}
        shards = layout.tp if self.config.parallelism.sequence_parallel else 1
        tied, tied_bytes = tied_ends(self.config.model, plan) and pp in plan.ranks_of_ends, 0
        if tied:
            rows, width = placements["embedding.weight"].local_shape
            if self.stage == 3:
                rows = rows_of_part(rows, part, layout.size("dp_shard"))[1]
            tied_bytes = _BYTES * rows * width
        bytes_of = payload_bytes(
            plan,
            pp,
            self.num_microbatches,
            self._tokens // shards * self.config.model.hidden_size * self.compute_dtype.itemsize,
            tied_bytes,
            torch.promote_types(self.compute_dtype, torch.float32).itemsize,
        )
        # A rank whose share of the embedding is empty exchanges it all the same.
        messages = plan.messages_sent(pp, self.num_microbatches) + tied
        calls = {"all_reduce": 1, "send": messages}
        return {(group, kind): Count(calls[kind], number) for (group, kind), number in bytes_of.items()}

    def _data_parallel(self, placements: Mapping[str, Placement], pp: int) -> Traffic:
        layout, stage = self.planned.layout, self.stage
        if layout.dp == 1:
            return {}
        parts, steps = layout.size("dp_shard"), self.num_microbatches
        reductions = steps if self.config.parallelism.reduce_each_micro_batch else 1
        shapes = [placement.local_shape for placement in placements.values()]
        whole, share = _BYTES * sum(map(prod, shapes)), _share(shapes, parts)
        # Gradients may be narrower while they travel; parameters and sums over replicas never are.
        narrower = _BYTES // 2 if self.config.precision.grad_reduce_dtype == "bf16" else _BYTES
        buckets = len(buckets_of([_BYTES * prod(shape) for shape in shapes], self.bucket_size_mb))
        found: dict[tuple[str, str], Count | None] = {}
        if stage <= 1:
            found["dp", "all_reduce"] = Count(buckets * reductions, whole * reductions * narrower // _BYTES)
        if stage in (1, 2):
            found["dp_shard", "all_gather"] = Count(buckets, share)
        if stage == 3:
            blocks, roots = self._units(placements, pp)
            found["dp_shard", "all_gather"] = self._gathers(blocks, roots, parts)
            buckets = len(blocks) + len(roots)
        if stage >= 2:
            found["dp_shard", "reduce_scatter"] = Count(
                buckets * reductions, parts * share * reductions * narrower // _BYTES
            )
            if layout.size("dp_replicate") > 1:
                found["dp_replicate", "all_reduce"] = Count(buckets * reductions, share * reductions)
        return found

    def _units(
        self, placements: Mapping[str, Placement], pp: int
    ) -> tuple[list[list[Shape]], list[list[Shape]]]:
        """Shapes of what is gathered together: of each layer, and of what lies outside of layers on each stage."""
        blocks: dict[str, list[Shape]] = {}
        rest: dict[str, Shape] = {}
        for name, placement in placements.items():
            module, _, inner = name.partition(".")
            if module == "blocks":
                blocks.setdefault(inner.partition(".")[0], []).append(placement.local_shape)
            else:
                rest[name] = placement.local_shape
        first, last = self.planned.has_first(pp), self.planned.has_last(pp)
        if self.planned.plan is None or not (first and last):
            return list(blocks.values()), [list(rest.values())] if rest else []
        # A V: this rank has both ends, as two stages. (A tied embedding is refused there.)
        of_first = [shape for name, shape in rest.items() if "embedding" in name]
        of_last = [shape for name, shape in rest.items() if "embedding" not in name]
        return list(blocks.values()), [of_first, of_last]

    def _gathers(self, blocks: list[list[Shape]], roots: list[list[Shape]], parts: int) -> Count | None:
        """All-gathers of stage 3 in a step. Roots stay gathered from a micro-batch's forward to its backward."""
        plan, steps = self.planned.plan, self.num_microbatches
        memory = self.config.memory
        if (memory.recompute_num_layers or 1) > 1 and memory.recompute_method != "block":
            return None  # Layers that are repeated together are gathered for that as well.
        of_blocks, of_roots = (
            sum(_share(shapes, parts) for shapes in blocks),
            sum(_share(s, parts) for s in roots),
        )
        if plan is None:
            return Count(steps * (2 * len(blocks) + len(roots)), steps * (2 * of_blocks + of_roots))
        if plan.num_stages // plan.pp > _STAGES_KEPT_GATHERED:
            return None
        # Backward leaves a block gathered, each forward drops it: gathered at first, and after each forward.
        times = 1 if self.config.parallelism.pipeline_schedule in ZERO_BUBBLE else steps + 1
        return Count(times * len(blocks) + len(roots), times * of_blocks + of_roots)

    def _norm(self) -> Traffic:
        """One scalar for each dimension that cuts the gradients."""
        layout = self.planned.layout
        dims = [dim for dim in ("tp", "pp") if layout.size(dim) > 1]
        if self.stage >= 1:
            dims.append("dp_shard")
        return {(dim, "all_reduce"): Count(1, _BYTES) for dim in dims}

    @property
    def _tokens(self) -> int:
        """Of a micro-batch."""
        return self.config.training.micro_batch_size * self.config.model.seq_length

    def operators(self, pp: int) -> int:
        """About how many operators a pass of this rank over fake tensors takes, which is what its time goes by."""
        layers, last = self.planned.layers_on(pp), self.planned.has_last(pp)
        columns = -(-self.config.model.vocab_size // self.planned.layout.tp)
        chunks = -(-self._tokens // max(1, LOGITS_PER_CHUNK["cpu"] // columns))
        per_micro_batch = _PER_LAYER * layers + _PER_CHUNK * chunks * last
        return self.num_microbatches * per_micro_batch


def _share(shapes: Iterable[Shape], parts: int) -> int:
    """Bytes of a share of parameters of ``shapes``, padding included."""
    return _BYTES * sum(-(-shape[0] // parts) * prod(shape[1:]) for shape in shapes)
