"""Time that is paid for memory which nobody needs.

Not here: an allocator whose free memory lies in pieces (on a CPU that is the system's own allocator, which no record
follows), and copies between host and device (a CPU's device memory is the host's).
"""

from scenario import Scenario

__all__ = ["SCENARIOS"]

SCENARIOS = (
    Scenario(
        "memory.recompute_without_need",
        ("memory.recompute_without_need",),
        ("memory.recompute_without_need",),
        "process",
        lambda place: place.job("memory.recompute_granularity=full"),
        lambda place: place.job(),
        "every layer is computed again in backward, on a machine whose memory is nearly all free",
    ),
    Scenario(
        "memory.stalling_offload",
        ("memory.stalling_offload",),
        ("memory.stalling_offload",),
        "process",
        lambda place: place.job(
            "memory.optimizer_offload_fraction=1.0",
            "training.micro_batch_size=1",
            "training.global_batch_size=1",
            "model.seq_length=64",
        ),
        lambda place: place.job(
            "training.micro_batch_size=1", "training.global_batch_size=1", "model.seq_length=64"
        ),
        "all of the optimizer's state is fetched and sent back in every step",
    ),
)
