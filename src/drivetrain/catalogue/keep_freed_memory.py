"""Memory that operators on a CPU have freed stays with the process, instead of being mapped anew for the next one."""

from collections.abc import Mapping
from typing import Any

from drivetrain.catalogue.entry import Optimisation
from drivetrain.config import LaunchFacts, RunConfig
from drivetrain.measure.account import Account
from drivetrain.measure.optimisation import Evidence, Observation

__all__ = ["ENTRY"]

_FIELD = "memory.keep_freed_memory"


def _applies(config: RunConfig, _facts: LaunchFacts) -> str | None:
    if config.run.device == "cuda":
        return "tensors of a CUDA device do not lie in memory of the host's allocator"
    return None


def _on(config: RunConfig, facts: LaunchFacts) -> Mapping[str, Any] | None:
    if config.memory.keep_freed_memory or _applies(config, facts) is not None:
        return None
    return {_FIELD: True}


def _evidence(_config: RunConfig, seen: Observation, _account: Account | None) -> Evidence:
    found = seen.host_memory
    if found is None:
        return Evidence("unknown", "the trace does not tell what became of freed host memory")
    if found.keeps_freed is None:
        return Evidence("unknown", found.reason or "the trace does not tell whether freed memory was kept")
    faults = found.page_faults_per_step
    steps = "" if faults is None else f"; {faults:,.0f} page faults a step before it"
    if found.keeps_freed:
        return Evidence("shown", f"at the window a large freed block stayed with the process{steps}")
    return Evidence("absent", f"at the window a large freed block went back to the system{steps}")


ENTRY = Optimisation(
    name="keep_freed_memory",
    summary="freed memory of CPU tensors stays with the process: no page faults when the next operator takes it",
    sources=("The GNU C Library, mallopt(3)", "PyTorch tuning guide, memory allocators on CPUs"),
    field=_FIELD,
    requested=lambda config: config.memory.keep_freed_memory,
    on=_on,
    off=lambda _config: {_FIELD: False},
    numerics="exact",
    # A fault falls on whatever first writes to new memory. Products write as well, but compute far longer on each
    # element that they write.
    treats=(
        "compute.elementwise",
        "compute.activation",
        "compute.norm",
        "compute.loss",
        "compute.optimizer",
        "compute.copy_cast",
    ),
    evidence=_evidence,
    no_prediction=("what a page fault costs is not among the measured ceilings of this machine"),
    applies=_applies,
    capability="glibc_malloc",
    evidence_rule=(
        "shown: a large block that the window frees stays with the process; absent: it goes back to the system; "
        "unknown: another allocator than glibc's, or a trace that does not tell. The page faults of the steps before "
        "the window are named beside it"
    ),
)
