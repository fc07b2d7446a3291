"""The causes that a diagnosis knows: one identifier each, with what it means and where an expert would look for it.

A rule of ``rules/`` finds one or several of them. What helps is the catalogue's: entries that name a cause in their
``cures``, or that treat its class. ``docs/diagnosis.md`` is generated from this list and the rules.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["CAUSES", "SEARCH", "Area", "Cause"]

Area = Literal["data", "communication", "operators", "memory", "host", "records"]

SEARCH: tuple[tuple[Area, str], ...] = (
    ("data", "data loading"),
    ("communication", "communication that nothing hides, with waiting and bubbles"),
    ("operators", "operator efficiency"),
    ("memory", "memory: recomputation, swapping, allocation"),
    ("host", "the host: launches, waiting, maintenance, settings of the machine"),
    ("records", "what the records do not explain"),
)
"""The order of search where MFU stays near 30% (SOURCES A18; the last two are what is left)."""


@dataclass(frozen=True)
class Cause:
    """One cause.

    Attributes:
        area: where in the order of search it belongs.
        symptom: what somebody sees who does not know the cause.
        meaning: what happens.
        cost: how the cost of its findings comes about.
        advice: what to do where the catalogue has nothing against it.
    """

    area: Area
    symptom: str
    meaning: str
    cost: str
    advice: str


_CLASS_TIME = "the time of its class in the account"

CAUSES: Mapping[str, Cause] = {
    "data.waiting": Cause(
        "data",
        "the device pauses at the beginning of each step",
        "the training thread waits for its batch",
        _CLASS_TIME,
        "find the slowest operation of the loader",
    ),
    "data.slow_transform": Cause(
        "data",
        "the device pauses at the beginning of each step",
        "a callable of the data pipeline takes longer than everything else that builds a batch",
        "data.loader times its share of building",
        "do its work once, before training",
    ),
    "data.slow_read": Cause(
        "data",
        "the device pauses at the beginning of each step",
        "tokens are read more slowly than they are trained on, all along the run",
        "data.loader times its share of building",
        "bring the corpus to a faster or nearer disk",
    ),
    "data.slow_collation": Cause(
        "data",
        "the device pauses at the beginning of each step",
        "joining rows to batches takes longer than everything else that builds them",
        "data.loader times its share of building",
        "keep finished sequences instead of building them",
    ),
    "data.too_few_workers": Cause(
        "data",
        "the device pauses at the beginning of each step",
        "batches are built by fewer processes than it takes to build them while the device computes",
        "data.loader",
        "more worker processes, as far as there are cores",
    ),
    "data.cold_cache": Cause(
        "data",
        "the first hundred steps, or the first epoch, are slower than the rest",
        "reading is slow at first and becomes fast once the corpus lies in memory",
        "data.loader times the share of reading that later steps do not need",
        "read the corpus once before training, so that it lies in the page cache",
    ),
    "data.padding": Cause(
        "data",
        "tokens a second look good and the loss falls slowly",
        "a part of what is computed is padding that carries no loss",
        "the time of computation without the update, times the share of padding",
        "pack several documents into a sequence",
    ),
    "communication.exposed": Cause(
        "communication",
        "devices are busy with collectives and compute nothing",
        "communication that nothing hides",
        _CLASS_TIME,
        "see whether it waits for a rank, for the wire, or starts too late",
    ),
    "communication.serial": Cause(
        "communication",
        "communication follows computation, and never runs beside it",
        "gradients travel when backward has ended, so that nothing hides them",
        "as of buckets that are too large; by a trace alone the exposed transfer of data parallelism, at most as long "
        "as half of what is computed",
        "reduce gradients in buckets while backward runs",
    ),
    "communication.buckets_too_large": Cause(
        "communication",
        "the end of backward waits for one last collective",
        "buckets of gradients are so large that most travel after backward",
        "what the training thread waited for them, at most the time in which it did not and none was under way",
        "smaller buckets",
    ),
    "communication.buckets_too_small": Cause(
        "communication",
        "hundreds of small collectives a step",
        "what a call costs whatever its size fills the wire",
        "what the training thread waited for them, at most what calls cost whatever their size",
        "larger buckets",
    ),
    "communication.chunks_too_few": Cause(
        "communication",
        "products stand while tensor parallelism communicates",
        "a collective of tensor parallelism is sent in too few pieces to travel beside products",
        "what the training thread waited for them, at most the time in which it did not and none was under way",
        "more chunks",
    ),
    "communication.chunks_too_many": Cause(
        "communication",
        "the wire is busy with very small collectives of tensor parallelism",
        "each piece costs more than it hides",
        "what the training thread waited for them, at most what calls cost whatever their size",
        "fewer chunks",
    ),
    "communication.too_much": Cause(
        "communication",
        "the wire is busy throughout the step",
        "bytes take longer than all that they could travel under",
        "what the training thread waited for them",
        "fewer bytes: a narrower dtype, more micro-batches a step, another layout",
    ),
    "communication.slow_link": Cause(
        "communication",
        "one group's collectives are slower than others of the same size",
        "bytes move slower than they do elsewhere, or at their own best",
        "transfer above that of the reference; by the ranks' own records what is waited for it above what others wait",
        "look at the link between these ranks",
    ),
    "communication.slow_rank": Cause(
        "communication",
        "all ranks but one wait",
        "a rank computes longer than its peers, which wait for it",
        "exposed waiting of the others",
        "look at that rank's own account: its clock, its share of work",
    ),
    "communication.late_rank": Cause(
        "communication",
        "all ranks but one wait",
        "a rank arrives late, without computing longer than its peers",
        "exposed waiting of the others",
        "look at that rank's own account: its data, its host",
    ),
    "communication.fp32_on_the_wire": Cause(
        "communication",
        "twice as many bytes travel as there are gradients in bf16",
        "gradients travel in fp32 although the model computes in 16 bits",
        "half of the time in which gradients move, at most what is waited for them; by a trace alone half of their "
        "part of the exposed transfer of data parallelism",
        "reduce gradients in bf16",
    ),
    "pipeline.bubble": Cause(
        "communication",
        "stages stand at the beginning and at the end of each step",
        "a pipeline stage has no work",
        _CLASS_TIME,
        "a schedule with several stages a rank, or fewer stages",
    ),
    "pipeline.too_few_micro_batches": Cause(
        "communication",
        "stages stand at the beginning and at the end of each step",
        "a step has so few micro-batches that filling and emptying the pipeline takes a tenth of it or more",
        "bubbles of warm-up and cool-down; where none are recorded their share by (p - 1)/(v m + p - 1), at most the "
        "time in which stages wait for each other, or are idle",
        "smaller micro-batches, or a larger global batch",
    ),
    "pipeline.unbalanced_stages": Cause(
        "communication",
        "one stage is always busy, and the others wait for it",
        "a stage computes longer than the mean of the stages",
        "how much longer the slowest stage computes than the mean",
        "move layers away from the slowest stage",
    ),
    "pipeline.accumulation_too_deep": Cause(
        "host",
        "the device runs dry between small pieces of work",
        "a step is cut into so many micro-batches that each costs the host more than it computes",
        "host time times the share of micro-batches beyond 8",
        "larger micro-batches, or fewer of them",
    ),
    "host.launch": Cause(
        "host",
        "the device is idle between small kernels",
        "operators and runtime calls that do no work themselves",
        _CLASS_TIME,
        "fewer, larger operators",
    ),
    "host.launch_bound": Cause(
        "host",
        "the device is idle between small kernels",
        "the device runs dry and waits until the host has launched its next piece of work",
        "waiting for launches, at most the time of host.launch and host.python",
        "fewer, larger operators",
    ),
    "host.synchronisation": Cause(
        "host",
        "the host stands in a waiting call, then the device stands",
        "the training thread waits in a synchronising call",
        _CLASS_TIME,
        "record the trace with Python functions to see the lines",
    ),
    "host.synchronisation_point": Cause(
        "host",
        "the host stands in a waiting call, then the device stands",
        "a line of code makes the host wait for the device, which stands still after it",
        "idle time of the device that the wait can have caused",
        "keep the value on the device, or read it a step later",
    ),
    "host.garbage_collection": Cause(
        "host",
        "single steps are longer than others, at no fixed place",
        "Python's garbage collector runs during steps",
        _CLASS_TIME,
        "collect at fixed steps only, with gc.disable() between them",
    ),
    "host.python": Cause(
        "host",
        "the device is idle while the interpreter is busy",
        "Python code between operators",
        _CLASS_TIME,
        "move it out of the step",
    ),
    "host.logging": Cause(
        "host",
        "a pause at the end of each step",
        "logging or printing takes time in every step",
        "time inside our own hooks, or in functions that log and print",
        "log every tenth step, or from another thread",
    ),
    "host.thread_oversubscription": Cause(
        "host",
        "the CPU is busy and everything is slow",
        "processes have more compute threads than there are cores",
        "unknown: it shows as slower computation of every class",
        "as many threads a process as cores over local processes",
    ),
    "kernels.products_below_peak": Cause(
        "operators",
        "kernel utilisation is high and MFU is low",
        "matrix products run below what the device sustains",
        "shortfall of the waterfall",
        "look at their shapes and dtypes",
    ),
    "kernels.attention_below_peak": Cause(
        "operators",
        "kernel utilisation is high and MFU is low",
        "attention runs below what the device sustains",
        "shortfall of the waterfall",
        "see which implementation ran",
    ),
    "kernels.memory_bound_operators": Cause(
        "operators",
        "much time in kernels that multiply nothing",
        "operators that move memory and compute little",
        _CLASS_TIME,
        "fuse them with their neighbours",
    ),
    "kernels.unfused_operators": Cause(
        "operators",
        "many short kernels beside each other",
        "consecutive memory-bound operators each read and write what one kernel would keep in registers",
        "time of the middle ones of three such kernels",
        "fuse them",
    ),
    "kernels.optimizer_update": Cause(
        "operators",
        "a tail of small kernels behind backward",
        "the optimizer's update",
        _CLASS_TIME,
        "one fused update",
    ),
    "kernels.other": Cause(
        "operators",
        "time in kernels that belong to no known kind",
        "other computation: embedding, sorting, kernels that no rule knows",
        _CLASS_TIME,
        "name them in a table of your own (--rules)",
    ),
    "kernels.bad_shapes": Cause(
        "operators",
        "some matrix products reach a fraction of what others reach",
        "the shapes of matrix products keep the device's units from running full",
        "their time above what the ceiling, or the trace's own best rate, would take",
        "pad the dimension that is named",
    ),
    "kernels.fallback": Cause(
        "operators",
        "no kernel of the expected name in the profile",
        "another implementation ran than was expected",
        "unknown: what the expected one would have taken was not measured",
        "see why it did not serve: dtype, shape, mask, version",
    ),
    "kernels.graph_break": Cause(
        "operators",
        "compiled code brings less than it should",
        "a line of code ends a compiled graph, so that nothing is fused across it",
        "unknown: what the whole graph would have taken was not measured",
        "rewrite that line without data-dependent shapes or branches",
    ),
    "kernels.wrong_precision": Cause(
        "operators",
        "matrix products run at the rate of fp32",
        "matrix products are computed in fp32 on a device that is faster in 16 bits",
        "time of those products times 1 - peak of their dtype / peak of bf16",
        "compute in bf16, with fp32 masters",
    ),
    "optimisation.not_in_effect": Cause(
        "operators",
        "a switch is on and nothing changes",
        "an optimisation was requested, and is not in effect",
        "unknown: what it would have saved was not measured",
        "read the reason in its record",
    ),
    "memory.recompute": Cause(
        "memory",
        "backward takes more than twice as long as forward",
        "forward work repeated in the backward pass",
        _CLASS_TIME,
        "recompute less, as far as memory allows",
    ),
    "memory.recompute_without_need": Cause(
        "memory",
        "much memory is free, and backward repeats forward",
        "recomputation frees memory that nobody uses",
        "time of recompute",
        "switch it off, or make the micro-batch larger",
    ),
    "memory.stalling_offload": Cause(
        "memory",
        "the device waits for copies to and from the host",
        "what was moved to host memory is not back when it is needed",
        "time for which computation waited for such copies",
        "move less, or fetch it earlier",
    ),
    "memory.fragmentation": Cause(
        "memory",
        "memory is free and allocation fails, or the allocator calls the device in every step",
        "free memory lies in pieces that nothing fits in",
        "calls that allocate or free device memory during steady steps, at most the time of the host's causes",
        "expandable segments of the allocator; equal shapes in every step",
    ),
    "memory.copies": Cause(
        "memory",
        "copies between host and device, and no computation beside them",
        "copies that nothing hides",
        _CLASS_TIME,
        "pinned memory, and copies one step ahead",
    ),
    "shapes.short_last_batch": Cause(
        "operators",
        "one step in an epoch is different, and all after it are slower",
        "the last batch is shorter than the others, and may make every shape dynamic",
        "unknown: what later steps lose by it does not show in one window",
        "drop it, or pad it",
    ),
    "shapes.dynamic": Cause(
        "operators",
        "steps of equal work take different times",
        "shapes of matrix products change from step to step",
        "unknown: what fixed shapes would have taken was not measured",
        "pack or pad sequences to one length",
    ),
    "shapes.recompilation": Cause(
        "operators",
        "single steps take seconds",
        "code was compiled again during the run, because a shape or a value it depends on had changed",
        "time of the steps that compiled, above the steady ones, spread over all steps",
        "keep that size or value constant",
    ),
    "maintenance.checkpoint": Cause(
        "host",
        "single steps are much longer, at a fixed interval",
        "training stands still for a checkpoint in the window",
        _CLASS_TIME,
        "save less often",
    ),
    "maintenance.checkpoint_too_often": Cause(
        "host",
        "single steps are much longer, at a fixed interval",
        "checkpoints take more than a hundredth of the run",
        "time for which training stood still for checkpoints, spread over all steps",
        "save less often",
    ),
    "maintenance.evaluation": Cause(
        "host",
        "single steps are much longer, at a fixed interval",
        "training stands still for an evaluation in the window",
        _CLASS_TIME,
        "evaluate less often",
    ),
    "maintenance.evaluation_too_often": Cause(
        "host",
        "single steps are much longer, at a fixed interval",
        "evaluations take more than a fiftieth of the run",
        "time of evaluations, spread over all steps",
        "evaluate less often, or on fewer batches",
    ),
    "maintenance.profiler": Cause(
        "host",
        "profiled steps are longer than others",
        "the profiler itself",
        _CLASS_TIME,
        "record less: no stacks, no shapes",
    ),
    "maintenance.compilation": Cause(
        "host",
        "single steps take seconds",
        "training stands still for a compilation in the window",
        _CLASS_TIME,
        "profile after warm-up",
    ),
    "environment.max_connections": Cause(
        "host",
        "collectives start later than they were launched",
        "CUDA_DEVICE_MAX_CONNECTIONS is not what the layout needs for collectives to start in order",
        "unknown: what the right value brings was not measured",
        "1 with tensor parallelism, not 1 with sharded parameters",
    ),
    "records.idle": Cause(
        "records",
        "the device is idle, and nothing says why",
        "neither work nor a cause is recorded",
        _CLASS_TIME,
        "record the host, too",
    ),
    "records.unexplained": Cause(
        "records",
        "the account has a bar without a name",
        "the records are missing, clipped or contradictory",
        _CLASS_TIME,
        "read the health findings",
    ),
    "records.unclassified": Cause(
        "records",
        "kernels of unknown names",
        "kernels of which nothing tells whether they compute or communicate",
        _CLASS_TIME,
        "name them in a table of your own (--rules)",
    ),
    "records.withheld": Cause(
        "records",
        "a figure is missing",
        "a finding of health makes a figure untrustworthy",
        "none: a figure that is withheld has no cost",
        "record the trace again",
    ),
}
"""Identifier → cause, in the order of the documentation."""
