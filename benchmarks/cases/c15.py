"""C15: attention takes 31% of a step; then buckets, layout, data and accumulation."""

from collections.abc import Mapping

from cases.case import BAKED, BATCH_OF_A_STEP, RATE, Case, Parameter, Share, common
from harness.packed_text import VOCABULARY

__all__ = ["C15"]

LENGTH = "seq_length"


def _configure(parameters: Mapping[str, float]) -> list[str]:
    return [f"model.seq_length={parameters[LENGTH]:.0f}"]


_BY_HAND = (
    BAKED,
    "precision.params_dtype=bf16",
    "fusion.level=all",
    "training.micro_batch_size=2",
    "overlap.bucket_size_mb=2",
)

C15 = Case(
    name="c15",
    source="C15",
    told="attention 31% of a step; then buckets, tensor parallelism, pre-tokenised data, bf16 with less accumulation",
    ratio=1.59,
    ratio_told="MFU 32 to 51%",
    hosts=2,
    overrides=(
        *common(VOCABULARY, 512, 1, 8),
        "parallelism.data_parallel_size=2",
        "overlap.bucket_size_mb=0",
        # Attention reaches over document borders: of short documents it takes next to nothing, whatever the length.
        "data.reset_attention_mask=false",
        "data.reset_position_ids=false",
        "data.transform=cases.transforms:scrub_100",
    ),
    parameters={
        LENGTH: Parameter(768, 64, 8192, multiple=64),
        # No share is stated that it would be found by: a link on which communication is felt and does not rule.
        RATE: Parameter(400, 400, 400),
    },
    configure=_configure,
    shares=(Share("attention", ("compute.attention",), 0.31, LENGTH),),
    hand_tuned={
        "baked, bf16, fused, buckets of 2 MB": _BY_HAND,
        "the same with bf16 on the wire": (*_BY_HAND, "precision.grad_reduce_dtype=bf16"),
    },
    entries=(
        "attention",
        "fusion_level",
        "ddp_bucket",
        "bake_transforms",
        "data_workers",
        "bf16",
        "recompute",
    ),
    fixed=BATCH_OF_A_STEP,
    differs=(
        "the baseline is in fp32 (the source starts in bf16 and ends by switching to it); two ranks; the share of data "
        "and communication is what a fixed transform and link make of it, since the source states none"
    ),
    # Enough for less accumulation: without a limit nothing says what a larger micro-batch has to fit in.
    limit_over_peak=4.0,
)
