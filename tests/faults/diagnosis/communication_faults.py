"""Communication that costs more than it has to: on a wire of the network lab, where cores compute while bytes travel,
and over gloo, where one rank makes the others wait.

Not here: chunks of tensor parallelism and pieces of any other kind on a device's streams, and links between devices
(NVLink, PCIe): the lab has the wire between hosts alone.
"""

from scenario import Job, Place, Scenario, Wire

__all__ = ["SCENARIOS"]

FEW_STEPS = ("training.train_iters=28",)
"""Steps of a job whose step takes half a second: a dozen of them tell its mean."""
TWO_HOSTS = ("training.micro_batch_size=8", "training.global_batch_size=16", *FEW_STEPS)
"""So many tokens to each gradient that what a core spends on sending is little beside what it computes."""
_DEEP = (
    "model.num_layers=24",
    "model.hidden_size=64",
    "model.seq_length=64",
    "training.micro_batch_size=2",
    "training.global_batch_size=4",
)
_TENSOR_PARALLEL = (
    "parallelism.tensor_model_parallel_size=2",
    "parallelism.sequence_parallel=true",
    "training.micro_batch_size=8",
    "training.global_batch_size=8",
)
_BUCKETS = "overlap.bucket_size_mb=0.5"
"""A dozen buckets of the small model's gradients: they travel while backward computes."""

_STRAY_PROCESS = '''
"""Somebody's forgotten job on the second host: it takes half of the core that a rank computes on."""
import os
import subprocess
import sys

_ENDLESS = "import os\\nmine = os.getppid()\\nwhile os.getppid() == mine:\\n    sum(range(100_000))"
if os.environ["RANK"] == "1":
    subprocess.Popen([sys.executable, "-S", "-c", _ENDLESS])
'''
_SLOW_TRANSFORM = '''
"""A transform that asks somebody else for each batch."""
import time


def ask(ids):
    time.sleep(0.4)
    return ids
'''
_SLOW_DISK = '''
"""One host reads from a disk that is slower than its peers'."""
import os
import time


def read(ids):
    if os.environ["RANK"] == "1":
        time.sleep(0.3)
    return ids
'''


def _wire(rate: str, **links: str) -> Wire:
    return Wire(2, 1, rate, {int(name.removeprefix("host")): link for name, link in links.items()})


def two_hosts(place: Place, rate: str, *overrides: str, **others: object) -> Job:
    """A rank on each of two hosts, each with as many tokens."""
    return place.job(*TWO_HOSTS, *overrides, world_size=2, wire=_wire(rate), **others)


def four_hosts(place: Place, *overrides: str, slow: str | None = None, own_code: str | None = None) -> Job:
    """Tensor-parallel pairs (0, 1) and (2, 3), data-parallel pairs (0, 2) and (1, 3), a host each."""
    links = {} if slow is None else {3: slow}
    return place.job(
        "training.micro_batch_size=1",
        "training.global_batch_size=2",
        "parallelism.tensor_model_parallel_size=2",
        "model.seq_length=64",
        "monitor.log_rank_times=true",
        *FEW_STEPS,
        *overrides,
        world_size=4,
        wire=Wire(4, 1, "1gbit", links),
        own_code=own_code,
    )


SCENARIOS = (
    Scenario(
        "communication.serial",
        ("communication.serial",),
        ("communication.serial",),
        "lab",
        lambda place: two_hosts(place, "400mbit", "overlap.bucket_size_mb=0"),
        lambda place: two_hosts(place, "400mbit", _BUCKETS),
        "all gradients travel at once when backward has ended (bucket_size_mb = 0)",
    ),
    Scenario(
        "communication.buckets_too_large",
        ("communication.buckets_too_large",),
        ("communication.buckets_too_large",),
        "lab",
        lambda place: two_hosts(place, "300mbit", "overlap.bucket_size_mb=4"),
        lambda place: two_hosts(place, "300mbit", _BUCKETS),
        "two buckets hold all gradients: the second is full when backward has ended",
    ),
    Scenario(
        "communication.fp32_on_the_wire",
        ("communication.fp32_on_the_wire",),
        ("communication.fp32_on_the_wire",),
        "lab",
        lambda place: two_hosts(place, "100mbit", "precision.params_dtype=bf16", _BUCKETS),
        lambda place: two_hosts(
            place, "100mbit", "precision.params_dtype=bf16", "precision.grad_reduce_dtype=bf16", _BUCKETS
        ),
        "a model in bf16 sends its gradients in fp32 over a wire that is slower than backward",
    ),
    Scenario(
        "communication.slow_link",
        ("communication.slow_link",),
        ("communication.slow_link",),
        "lab",
        lambda place: four_hosts(place, slow="100mbit"),
        four_hosts,
        "the link of one of four hosts has a tenth of the others' rate",
    ),
    Scenario(
        "communication.slow_rank",
        ("communication.slow_rank",),
        ("communication.slow_rank",),
        "lab",
        lambda place: two_hosts(place, "10gbit", own_code=_STRAY_PROCESS, starts_training=True),
        lambda place: two_hosts(place, "10gbit"),
        "another process computes on the core of one rank",
    ),
    Scenario(
        "communication.late_rank",
        ("communication.late_rank",),
        ("communication.late_rank",),
        "ranks",
        lambda place: place.job(
            *TWO_HOSTS, "data.batch_transform=own_code:read", world_size=2, own_code=_SLOW_DISK
        ),
        lambda place: place.job(*TWO_HOSTS, world_size=2),
        "one of two ranks waits for its disk in each micro-batch",
    ),
    Scenario(
        "communication.buckets_too_small",
        ("communication.buckets_too_small",),
        ("communication.buckets_too_small",),
        "lab",
        lambda place: two_hosts(place, "1gbit", *_DEEP, "overlap.bucket_size_mb=0.001"),
        lambda place: two_hosts(place, "1gbit", *_DEEP, "overlap.bucket_size_mb=1"),
        "each small parameter of a deep, narrow model has a bucket of its own",
    ),
    Scenario(
        "communication.chunks_too_few",
        ("communication.chunks_too_few",),
        ("communication.chunks_too_few",),
        "lab",
        lambda place: two_hosts(place, "400mbit", *_TENSOR_PARALLEL),
        lambda place: two_hosts(place, "400mbit", *_TENSOR_PARALLEL, "overlap.tp_chunks=4"),
        "tensor and sequence parallelism over a wire, each collective in one piece",
    ),
    Scenario(
        "memory.recompute_without_need + communication.serial",
        ("memory.recompute_without_need", "communication.serial"),
        ("memory.recompute_without_need",),
        "lab",
        lambda place: two_hosts(
            place, "400mbit", "overlap.bucket_size_mb=0", "memory.recompute_granularity=full"
        ),
        lambda place: two_hosts(place, "400mbit", _BUCKETS),
        "whole layers are recomputed, and gradients travel when backward has ended",
    ),
    Scenario(
        "communication.fp32_on_the_wire + data.slow_transform",
        ("communication.fp32_on_the_wire", "data.slow_transform"),
        ("communication.fp32_on_the_wire",),
        "lab",
        lambda place: two_hosts(
            place,
            "100mbit",
            "precision.params_dtype=bf16",
            _BUCKETS,
            "data.batch_transform=own_code:ask",
            own_code=_SLOW_TRANSFORM,
        ),
        lambda place: two_hosts(
            place, "100mbit", "precision.params_dtype=bf16", "precision.grad_reduce_dtype=bf16", _BUCKETS
        ),
        "gradients in fp32 over a slow wire, and batches that wait for somebody else",
    ),
    Scenario(
        "communication.slow_link + data.slow_transform",
        ("communication.slow_link", "data.slow_transform"),
        ("communication.slow_link",),
        "lab",
        lambda place: four_hosts(
            place, "data.batch_transform=own_code:ask", slow="100mbit", own_code=_SLOW_TRANSFORM
        ),
        four_hosts,
        "the link of one of four hosts is slow, and so are all batches",
    ),
    Scenario(
        "communication.late_rank + maintenance.evaluation_too_often",
        ("communication.late_rank", "maintenance.evaluation_too_often"),
        ("communication.late_rank",),
        "ranks",
        lambda place: place.job(
            *TWO_HOSTS,
            "data.batch_transform=own_code:read",
            "training.eval_interval=4",
            "training.eval_iters=4",
            world_size=2,
            own_code=_SLOW_DISK,
        ),
        lambda place: place.job(*TWO_HOSTS, world_size=2),
        "one of two ranks waits for its disk, and both evaluate every four steps",
    ),
)
