"""The one registry of metric keys: unit, reduction over ranks, direction, definition.

A key's unit is in its name, bytes are bytes (no GB or GiB), shares are 0 to 1. Keys follow Composer and
Lightning where those agree. A metric that is logged but not here is a defect.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from drivetrain.errors import DrivetrainError

__all__ = ["METRICS", "Better", "Metric", "Reduce", "markdown_table", "metric"]

Reduce = Literal["sum", "mean", "max", "min", "same"]
"""How values of ranks become one. ``same``: every rank holds the job's value already."""
Better = Literal["higher", "lower", "neither"]


@dataclass(frozen=True, slots=True)
class Metric:
    """What one key means."""

    key: str
    unit: str
    reduce: Reduce
    better: Better
    definition: str


_GROUPS = (
    ("tp", "its tensor-parallel group"),
    ("cp", "its context-parallel group"),
    ("pp", "its pipeline"),
    ("dp", "all data-parallel ranks"),
    ("dp_shard", "the data-parallel ranks that share one set of shards"),
    ("dp_replicate", "the data-parallel ranks that hold the same shards"),
)
"""Dimension of the mesh → its ranks, in words."""
_LEVELS = tuple(
    (f"{dimension}_{level}", f"{ranks}, {what}")
    for dimension, ranks in _GROUPS
    if dimension.startswith("dp")
    for level, what in (("host", "inside a machine"), ("across", "between machines"))
)
"""Where collectives go in levels (``overlap.hierarchical_collectives``)."""

_ALL = (
    Metric("train/loss", "nat/token", "same", "lower",
           "Cross-entropy summed over all micro-batches and ranks, divided by the global number of tokens "
           "that carry loss; null for a batch without any."),
    Metric("train/loss_ema", "nat/token", "same", "lower",
           "Debiased exponential mean of train/loss (decay 0.98: about 50 steps); null where train/loss has no "
           "finite value."),
    Metric("train/grad_norm", "1", "same", "neither",
           "Global 2-norm of the gradient before clipping; null for a step that was skipped."),
    Metric("train/grad_clip_coef", "1", "same", "neither",
           "Factor that clipping applied to the gradient; 1 when it was not clipped, null for a skipped step."),
    Metric("optim/lr", "1", "same", "neither",
           "Learning rate used in this step."),
    Metric("optim/loss_scale", "1", "same", "neither",
           "Factor of the loss that was differentiated in this step; absent but in fp16."),
    Metric("optim/skipped_steps", "step", "same", "lower",
           "Steps of the run so far that overflowed and changed no weight; absent as optim/loss_scale."),
    Metric("throughput/tokens_per_sec", "token/s", "same", "higher",
           "Tokens processed by all ranks, padding included, over the step's wall time."),
    Metric("throughput/effective_tokens_per_sec", "token/s", "same", "higher",
           "Tokens of all ranks that carry loss, over the step's wall time."),
    Metric("throughput/device/tokens_per_sec", "token/s", "same", "higher",
           "throughput/tokens_per_sec divided by the number of devices."),
    Metric("throughput/device/flops_per_sec", "FLOP/s", "same", "higher",
           "Model FLOPs over the step's wall time and the number of devices."),
    Metric("throughput/device/mfu", "share", "same", "higher",
           "Model FLOPs over wall time x devices x peak; absent without a peak."),
    Metric("throughput/device/hfu", "share", "same", "neither",
           "As MFU with recomputed FLOPs added; never compared with an MFU."),
    Metric("throughput/device/effective_mfu", "share", "same", "higher",
           "MFU of the tokens that carry loss."),
    Metric("time/step_s", "s", "max", "lower",
           "Wall time of one optimizer step, from the request for its data to the end of its update."),
    Metric("time/data_wait_s", "s", "max", "lower",
           "Time the training process waited for the batches of the step."),
    Metric("time/data_wait_frac", "share", "max", "lower",
           "time/data_wait_s over time/step_s."),
    Metric("data/build_s", "s", "max", "lower",
           "Time it took to build the batches of the step, wherever they were built: by the training process, its "
           "thread, or worker processes, whose times are added."),
    Metric("data/read_s", "s", "max", "lower",
           "The part of data/build_s in which tokens were read from the corpus."),
    Metric("data/transform_s", "s", "max", "lower",
           "The part of data/build_s in the callables of data.transform and data.batch_transform."),
    Metric("time/comm_exposed_s", "s", "mean", "lower",
           "Time the training process stood waiting for collectives under way, its own and those of the run; absent "
           "with one process, and where it is not known (CUDA without plain data parallelism, pipelines)."),
    Metric("time/comm_exposed_frac", "share", "mean", "lower",
           "time/comm_exposed_s over time/step_s; absent where that is."),
    Metric("time/comm_overlap_frac", "share", "mean", "higher",
           "Of the time in which any collective was under way, the share in which the training process did not stand "
           "waiting; absent with one process, and where waits are not known in full."),
    Metric("time/own_work_s", "s", "max", "lower",
           "Wall time of a rank's step less its waits for data and for collectives; logged per rank."),
    Metric("time/hooks_s", "s", "max", "lower",
           "Time inside our own measuring and logging during the step."),
    Metric("time/eval_s", "s", "max", "lower",
           "Wall time of one evaluation on held-out text."),
    Metric("time/checkpoint_s", "s", "max", "lower",
           "Wall time for which training stood still for one checkpoint."),
    *(Metric(f"comm/{dimension}_bytes", "byte", "max", "lower",
             f"Payload that a rank hands to the collectives of {ranks} in one step; in metrics.jsonl that of rank 0. "
             "Absent where there are none.")
      for dimension, ranks in (*_GROUPS, *_LEVELS)),
    Metric("comm/tp_fused_calls", "1", "max", "neither",
           "Calls of torch's fused operators over symmetric memory in one step (overlap.tp_symmetric_memory); in "
           "metrics.jsonl those of rank 0. Absent where they are not used."),
    *(Metric(f"comm/{dimension}_{what}_s", "s", "max", "neither" if what == "hidden" else "lower",
             f"{text} {ranks} in one step; in metrics.jsonl that of rank 0. Absent where it is not known.")
      for dimension, ranks in (*_GROUPS, ("world", "all ranks (token counts, losses, votes)"))
      for what, text in (
          ("wire", "Time in which collectives were under way in"),
          ("hidden", "Part of the time under way in which the process did not stand waiting, of"),
          ("exposed", "Part of the time under way in which the process stood waiting for them, of"),
      )),
    Metric("memory/allocated_peak_bytes", "byte", "max", "lower",
           "Largest sum of live tensor bytes; on a CPU counted in an untimed step."),
    Metric("memory/reserved_peak_bytes", "byte", "max", "lower",
           "Largest number of bytes the device allocator held; accelerators only."),
    Metric("memory/process_rss_peak_bytes", "byte", "max", "lower",
           "Largest resident set of the training process."),
    Metric("memory/params_bytes", "byte", "max", "lower",
           "Bytes of parameters, masters included."),
    Metric("memory/grads_bytes", "byte", "max", "lower",
           "Bytes of gradients at the peak."),
    Metric("memory/optim_bytes", "byte", "max", "lower",
           "Bytes of optimizer state."),
    Metric("memory/activations_bytes", "byte", "max", "lower",
           "Bytes of activations and temporaries at the peak."),
    Metric("offload/moved_bytes", "byte", "max", "lower",
           "Bytes of optimizer state and activations that were handed to copies between device and host in one step, "
           "both directions together; in metrics.jsonl those of rank 0. Absent where nothing is offloaded."),
    Metric("offload/exposed_s", "s", "max", "lower",
           "Time in one step for which the computation waited for such copies; in metrics.jsonl that of rank 0. Absent "
           "where nothing is offloaded."),
    Metric("progress/steps", "step", "same", "neither",
           "Optimizer steps done."),
    Metric("progress/samples", "sequence", "same", "neither",
           "Sequences processed by all ranks so far."),
    Metric("progress/tokens", "token", "same", "neither",
           "Tokens processed by all ranks so far, padding included."),
    Metric("progress/effective_tokens", "token", "same", "neither",
           "Tokens of all ranks that carried loss so far."),
    Metric("progress/flops", "FLOP", "same", "neither",
           "Model FLOPs of all ranks so far."),
    Metric("eval/loss", "nat/token", "same", "lower",
           "Cross-entropy per token on held-out text."),
    Metric("eval/bits_per_byte", "bit/byte", "same", "lower",
           "Cross-entropy on held-out text in bits, divided by the bytes of text that the scored tokens "
           "stand for; comparable between tokenizers."),
    Metric("eval/bigram_bits_per_byte", "bit/byte", "same", "neither",
           "The same figure of an interpolated bigram model fitted on the tokens that were trained on."),
)  # fmt: skip

METRICS: Mapping[str, Metric] = MappingProxyType({entry.key: entry for entry in _ALL})
"""All metrics by key, in the order of the documentation."""


def metric(key: str) -> Metric:
    """The entry of `key`.

    Raises:
        DrivetrainError: no such key; the message names keys of the same group.
    """
    if key in METRICS:
        return METRICS[key]
    group = key.split("/")[0]
    near = [known for known in METRICS if known.split("/")[0] == group] or list(METRICS)
    raise DrivetrainError(f"no metric {key!r}; there are: {', '.join(near)}")


def markdown_table() -> str:
    """The page ``docs/metrics.md``."""
    lines = [
        "# Metrics",
        "",
        "Every key that has a meaning; a run logs those it measures. *Over ranks* says how the values of ranks "
        "become one (`same`: each rank holds the job's value). "
        "Generated by `python -m drivetrain.measure.metrics > docs/metrics.md`.",
        "",
        "| key | unit | over ranks | better | definition |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| `{entry.key}` | {entry.unit} | {entry.reduce} | {entry.better} | {entry.definition} |"
        for entry in METRICS.values()
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(markdown_table())
