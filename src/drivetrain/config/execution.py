"""How the same computation is executed: parallelism, overlap, fusion, memory, precision."""

from typing import Literal

from pydantic import Field

from drivetrain.config.base import Count, Section

__all__ = ["FusionConfig", "MemoryConfig", "OverlapConfig", "ParallelismConfig", "PrecisionConfig"]


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


class OverlapConfig(Section):
    """Communication while computing."""

    bucket_size_mb: float = Field(default=25.0, ge=0, le=1_048_576)
    """Gradients are reduced in buckets of this many MB (1e6 bytes) while backward runs, in a pipeline after it.
    0: all in one bucket, which is reduced when backward has ended."""


class FusionConfig(Section):
    """Fused operators."""

    compile: bool = False
    """Compile each transformer block with torch.compile (the first step takes longer)."""


class MemoryConfig(Section):
    """What may be alive at once."""

    device_memory_limit_bytes: Count | None = Field(default=None, ge=1, le=2**63 - 1)
    """Live tensor bytes above this raise OutOfMemory. Absent: the device's own limit."""


class PrecisionConfig(Section):
    """Dtypes of the computation. Master weights, gradients and optimizer state stay fp32."""

    params_dtype: Literal["fp32", "bf16"] = "bf16"
    """Compute dtype of matrix products and activations."""
