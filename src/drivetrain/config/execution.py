"""How the same computation is executed: parallelism, overlap, memory, precision."""

from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field

from drivetrain.config.base import Count, Section

__all__ = ["TUNED", "MemoryConfig", "OverlapConfig", "ParallelismConfig", "PrecisionConfig"]


class ParallelismConfig(Section):
    """How many processes share the work, and how. Their number is the product of all sizes."""

    tensor_model_parallel_size: Count = Field(default=1, ge=1, le=1024)
    """Ranks that share each layer: heads, columns of the MLP and rows of the vocabulary."""
    sequence_parallel: bool = False
    """Tensor-parallel ranks also share norms, dropout and residual stream: each holds a part of the tokens there."""
    pipeline_model_parallel_size: Count = Field(default=1, ge=1, le=1024)
    """Ranks, or sets of tensor-parallel ranks, that hold consecutive layers and pass micro-batches on."""
    pipeline_schedule: Literal[
        "gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"
    ] = "1f1b"
    """Order of forward and backward passes on a pipeline's ranks."""
    virtual_pipeline_model_parallel_size: Count | None = Field(default=None, ge=1, le=1024)
    """Stages on each rank of a pipeline. Absent: 2 where the schedule needs several, else 1."""
    pipeline_model_parallel_layout: str | None = Field(
        default=None, pattern="^[0-9]{1,4}(,[0-9]{1,4})*$", examples=["3,2,2,1"]
    )
    """Layers of each stage in model order, such as 3,2,2,1. Absent: the same number in each, and one more
    in the earliest where there is a rest."""
    data_parallel_size: Count | None = Field(default=None, ge=1, le=1_048_576)
    """Ranks, or sets of model-parallel ranks, that take different samples. Derived when absent: the number of
    processes over the other sizes."""
    zero_stage: Count = Field(default=0, ge=0, le=3)
    """What data-parallel ranks share instead of each holding it: 1 optimizer state, 2 also gradients, 3 also
    parameters."""
    hybrid_shard_size: Count | None = Field(default=None, ge=1, le=1_048_576)
    """Data-parallel ranks that share one set of shards (HSDP), two at least; the sets hold the same. Absent: all of
    them."""
    reduce_each_micro_batch: bool = False
    """Reduce gradients over data-parallel ranks with each micro-batch: more traffic, and with zero_stage 2 or 3 less
    memory. Off: once a step."""
    rank_order: str = Field(
        default="tp-cp-pp-dp", pattern="^(tp|cp|pp|dp)(-(tp|cp|pp|dp)){3}$", examples=["tp-cp-pp-dp"]
    )
    """Dimensions along which ranks are numbered, the innermost first: neighbours share what stands first."""
    distributed_timeout_minutes: float = Field(default=10.0, gt=0, le=1440)
    """A collective that takes longer ends the run."""


TUNED: Final = "tuned"
"""What was tuned for a product; nothing was: the plain way."""


def _text_of_number(value: Any) -> Any:
    # A user who writes a number means the number, whatever else could stand there.
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


class OverlapConfig(Section):
    """Communication while computing."""

    bucket_size_mb: float = Field(default=25.0, ge=0, le=1_048_576)
    """Gradients are reduced in buckets of this many MB (1e6 bytes) while backward runs, in a pipeline after it.
    0: all in one bucket, which is reduced when backward has ended."""
    tp_chunks: Annotated[str, BeforeValidator(_text_of_number)] = Field(
        default="1", pattern="^(tuned|[1-9][0-9]{0,3})$", examples=["4"]
    )
    """Pieces in which a tensor-parallel layer sends what enters and leaves its matrices, one while the next is
    computed. `tuned`: of each product as many as `drivetrain ops tune` found best."""
    async_tensor_model_parallel_allreduce: bool = False
    """The gradient of what enters a tensor-parallel layer's matrices travels while the gradients of their weights are
    computed. In chunks (`tp_chunks`) it does in any case."""
    tp_symmetric_memory: bool = False
    """On CUDA devices of one machine, with sequence_parallel: what enters and leaves the matrices of a tensor-parallel
    layer is gathered and scattered by the products themselves, torch's fused operators over symmetric memory."""
    overlap_param_gather: bool = False
    """With zero_stage 1 or 2, updated parameters travel to the other ranks while the next forward pass begins, and
    each block waits for its own. Off: all of them are waited for at the end of the step."""
    prefetch_blocks: Count = Field(default=0, ge=0, le=64)
    """With zero_stage 3, blocks whose parameters are gathered ahead of the one that computes, forward and backward; on
    a CPU gradients then travel behind it, too. 0: as torch does by itself, which on a CPU waits for each."""
    hierarchical_collectives: bool = False
    """Sum gradients and gather updated parameters in levels: inside each machine, between machines, inside again. Less
    crosses the links between machines then, where several of them have several data-parallel ranks each."""

    @property
    def wanted_tp_chunks(self) -> int | None:
        """``tp_chunks`` as a number; None: what was tuned."""
        return None if self.tp_chunks == TUNED else int(self.tp_chunks)


class MemoryConfig(Section):
    """What may be alive at once."""

    device_memory_limit_bytes: Count | None = Field(default=None, ge=1, le=2**63 - 1)
    """Live tensor bytes above this raise OutOfMemory. Absent: the device's own limit."""
    keep_freed_memory: bool = False
    """On a CPU with glibc: memory that tensors have freed stays with the process, so that the next large operator pays
    no page faults; the resident set does not shrink."""
    optimizer_offload_fraction: float = Field(default=0.0, ge=0, le=1)
    """Share of the optimizer's state that lives in host memory and visits the device to be updated: of whole parameters
    as many as fit. Costs 16 bytes over the link a fp32 element and step."""
    offload_embedding: bool = False
    """The input embedding, its gradient and its moments live in host memory; the rows that a micro-batch uses visit the
    device. The host updates them."""
    cpu_offloading_num_layers: Count = Field(default=0, ge=0, le=100_000)
    """So many first layers of the model have their activations wait for backward in host memory; each is fetched while
    the one after it is used."""
    recompute_granularity: Literal["none", "full", "selective", "budget"] = "none"
    """What backward computes again instead of keeping it: `full` whole layers, as recompute_method says; `selective`
    parts of every layer (recompute_modules); `budget` what is cheapest until live bytes fit budget_bytes."""
    recompute_method: Literal["uniform", "block"] | None = None
    """With `full`: `uniform` keeps one tensor of every recompute_num_layers layers, `block` recomputes the first
    recompute_num_layers layers of each stage and keeps the rest. Absent: uniform."""
    recompute_num_layers: Count | None = Field(default=None, ge=1, le=100_000)
    """With `full`: layers that are recomputed together (uniform), or are recomputed at all (block). Absent: 1."""
    recompute_modules: str | None = Field(
        default=None,
        pattern="^(core_attn|mlp|mlp_act|norm)(,(core_attn|mlp|mlp_act|norm))*$",
        examples=["core_attn,mlp_act,norm"],
    )
    """With `selective`: parts of core_attn, mlp, mlp_act and norm, such as core_attn,norm. Absent: core_attn."""
    budget_bytes: Count | None = Field(default=None, ge=1, le=2**63 - 1)
    """With recompute_granularity = "budget": live tensor bytes of a rank that are not exceeded. Absent:
    device_memory_limit_bytes, else all memory of the CUDA device."""

    @property
    def recomputed_parts(self) -> tuple[str, ...]:
        """``recompute_modules`` one by one, what is absent filled in."""
        return tuple((self.recompute_modules or "core_attn").split(","))


class PrecisionConfig(Section):
    """Dtypes of the computation and of the optimizer's state. Master weights and gradients stay fp32."""

    params_dtype: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Compute dtype of matrix products and activations. With fp16 the loss is scaled before it is differentiated, and
    a step whose gradients overflow is skipped."""
    grad_reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of gradients while they travel between data-parallel ranks. bf16: half the bytes; gradients are rounded,
    and still summed in fp32."""
    optimizer_state_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of AdamW's moments between updates. bf16: half the bytes; they are updated in fp32 and rounded at
    random."""
    loss_scale: float | None = Field(default=None, ge=1.0, le=2.0**40, examples=[2048])
    """With fp16, a constant factor of the loss, a power of two. Absent: dynamic, from initial_loss_scale on."""
    initial_loss_scale: float = Field(default=65536.0, ge=1.0, le=2.0**40)
    """With fp16, the loss scale of the first step, a power of two. 1024 to 2048 skips fewer steps at the beginning."""
    min_loss_scale: float = Field(default=1.0, ge=1.0, le=2.0**40)
    """With fp16, below this the loss scale does not fall, a power of two; steps that overflow there end the run."""
    loss_scale_window: Count = Field(default=1000, ge=1, le=1_000_000)
    """With fp16, steps in a row without overflow after which the loss scale doubles."""
    hysteresis: Count = Field(default=2, ge=1, le=1_000_000)
    """With fp16, overflows since the loss scale last grew that it takes to halve it; from then on each does."""
