"""When a run is watched by the profiler, and how closely."""

from pydantic import Field

from drivetrain.config.base import Count, Section

__all__ = ["ProfilerConfig"]


class ProfilerConfig(Section):
    """A window of steps recorded by torch's profiler, after warm-up."""

    profile: bool = False
    """Profile the steps from profile_step_start to before profile_step_end, once in the run."""
    profile_step_start: Count = Field(default=10, ge=4, le=1_000_000_000)
    """First profiled step; steps count from 1. Two steps are warm-up, and the one before the window is
    profiled on trial, to know how large a step's trace is."""
    profile_step_end: Count = Field(default=12, ge=5, le=1_000_000_001)
    """The step after the last profiled one."""
    profile_ranks: str = Field(default="0", pattern=r"^(all|[0-9]{1,7}(,[0-9]{1,7})*)$", examples=["0,1"])
    """Ranks that write a trace, with commas between them, or all."""
    record_shapes: bool = True
    """Traces hold the shapes of each operator's operands; achieved FLOP/s and bandwidth need them."""
    profile_memory: bool = False
    """Traces hold each allocation and its address, and marks that tell what it is for: `drivetrain memory` reads them.
    Costs time, and makes files about twice as large."""
    with_stack: bool = False
    """Traces hold the Python line of each operator. Costs time and makes files several times larger."""
    file_size_limit_bytes: Count = Field(default=64 * 2**20, ge=1, le=2**63 - 1)
    """Size of one rank's trace on the disk; the window is shortened to the steps that fit. While it is
    written the process holds about a hundred times as much memory."""

    def profiled_ranks(self, world_size: int) -> tuple[int, ...]:
        """The numbers in profile_ranks, ascending; all of ``world_size`` where it says so."""
        if self.profile_ranks == "all":
            return tuple(range(world_size))
        return tuple(sorted({int(rank) for rank in self.profile_ranks.split(",")}))
