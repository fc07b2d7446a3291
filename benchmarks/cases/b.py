"""B: data and communication in the way, and recomputation that pays for a larger batch."""

from collections.abc import Mapping

from cases.case import BAKED, RATE, Case, Parameter, Share, common
from harness.packed_text import VOCABULARY

__all__ = ["B"]

PASSES = "transform_passes"


def _configure(parameters: Mapping[str, float]) -> list[str]:
    return [f"data.transform=cases.transforms:scrub_{parameters[PASSES]:.0f}"]


_BY_HAND = (BAKED, "precision.params_dtype=bf16", "fusion.level=all", "overlap.bucket_size_mb=2")

B = Case(
    name="b",
    source="B7 to B9",
    told=(
        "12.8% of a step waits for data (a regular expression), 28.5% is communication; then an indexed file, buckets, "
        "gradients in half precision, and recomputation for a larger batch"
    ),
    ratio=1.18,
    ratio_told="53,600 to 63,200 tokens/s by recomputation for a larger batch, the last of its steps",
    hosts=2,
    overrides=(
        *common(VOCABULARY, 128, 4, 8),
        "parallelism.data_parallel_size=2",
        "overlap.bucket_size_mb=0",
    ),
    parameters={PASSES: Parameter(200, 1, 200_000), RATE: Parameter(600, 5, 20_000, falls=True)},
    configure=_configure,
    shares=(
        Share("data", ("data.loader",), 0.128, PASSES),
        Share("communication", ("communication",), 0.285, RATE),
    ),
    hand_tuned={
        "baked, bf16, fused, buckets of 2 MB": _BY_HAND,
        "the same with bf16 on the wire": (*_BY_HAND, "precision.grad_reduce_dtype=bf16"),
    },
    entries=("bake_transforms", "data_workers", "ddp_bucket", "grad_reduce_dtype", "recompute", "bf16"),
    fixed=(
        "the tokens of the run (the global batch may grow, with the square root as the rule of its learning rate), the "
        "model, the seed and the memory limit"
    ),
    differs=(
        "two ranks and a memory limit that is a quarter above what the baseline's step needs; the source's whole path "
        "(9.1 to 8.2 s a step, then 1.18 more tokens/s) is held against its last ratio"
    ),
    limit_over_peak=1.25,
    tune=("--grow-batch", "sqrt"),
)
