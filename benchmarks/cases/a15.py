"""A15: nothing on, the core on, all on, in one process."""

from collections.abc import Mapping

from cases.case import BATCH_OF_A_STEP, Case, common
from harness.packed_text import VOCABULARY

__all__ = ["A15"]


def _configure(_parameters: Mapping[str, float]) -> list[str]:
    return []


_CORE = ("fusion.level=core", "optimizer.fused=true")
_ALL = ("fusion.level=all", "optimizer.fused=true", "precision.params_dtype=bf16")

A15 = Case(
    name="a15",
    source="A15",
    told="a step with nothing on, with the core on and with all on; activations 68, 42 and 40 GB",
    ratio=1.71,
    ratio_told="4.1 to 2.4 s a step",
    hosts=0,
    overrides=(*common(VOCABULARY, 256, 1, 8), "optimizer.fused=false"),
    parameters={},
    configure=_configure,
    shares=(),
    hand_tuned={
        "all fused, bf16, one micro-batch": (*_ALL, "training.micro_batch_size=8"),
        "the same, memory kept": (*_ALL, "training.micro_batch_size=8", "memory.keep_freed_memory=true"),
        "the same, micro-batches of 4": (
            *_ALL,
            "training.micro_batch_size=4",
            "memory.keep_freed_memory=true",
        ),
    },
    entries=("fusion_level", "fused_adamw", "keep_freed_memory", "bf16", "recompute"),
    fixed=BATCH_OF_A_STEP,
    differs=(
        "one CPU core in fp32 at the start, where the source has 32 accelerators in bf16; it states no share of "
        "a step, so that no account is held against it"
    ),
    # Enough for one micro-batch of all: without a limit nothing says what a larger one has to fit in.
    limit_over_peak=6.0,
    rows={"core": _CORE, "all": _ALL},
)
