"""What ``doctor`` reports: the machine, the installation, and what to mend. Works without torch.

Only what torch alone can answer (devices, capabilities) imports it, and only where it is installed.
"""

import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from drivetrain.engine.known_bad import Facts, KnownBad, applying, parse_version
from drivetrain.measure import machine
from drivetrain.measure.ceilings import load_ceilings

if TYPE_CHECKING:
    from drivetrain.engine.capabilities import Capability
    from drivetrain.engine.devices import Device

__all__ = [
    "MINIMUM_TORCH",
    "CeilingStatus",
    "Examination",
    "Missing",
    "Setting",
    "allocator_setting",
    "examine",
    "missing_packages",
    "thread_setting",
]

MINIMUM_TORCH = "2.11"
"""The engine is written for this version and newer."""

_DISTRIBUTIONS = (
    "torch",
    "numpy",
    "safetensors",
    "tokenizers",
    "pyarrow",
    "pydantic",
    "transformers",
    "accelerate",
    "lightning",
    "triton",
    "flash-attn",
    "liger-kernel",
    "transformer-engine",
    "torch-npu",
)


@dataclass(frozen=True, slots=True)
class Missing:
    """A package that is not there, or too old."""

    package: str
    required: bool
    """Whether training is impossible without it."""
    needed_for: str
    fix: str
    """The command that mends it."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Something the environment decides, and whether it is good."""

    name: str
    state: Literal["good", "advice"]
    found: str
    advice: str
    """What to change, and what that was measured to bring; empty where it is good."""


@dataclass(frozen=True, slots=True)
class CeilingStatus:
    """A ceiling of this machine, or how to measure it."""

    kind: Literal["matmul", "memory"]
    dtype: str
    num_threads: int | None
    value: float | None
    """FLOP/s or bytes per second."""
    note: str
    """How it was measured, or the command that measures it."""


@dataclass(frozen=True, slots=True)
class Examination:
    """Everything ``doctor`` found."""

    machine: Mapping[str, Any]
    device: Mapping[str, Any] | None
    """The device a run takes by default; None without torch."""
    versions: Mapping[str, str]
    capabilities: "tuple[Capability, ...]"
    settings: tuple[Setting, ...]
    ceilings: tuple[CeilingStatus, ...]
    known_bad: tuple[KnownBad, ...]
    missing: tuple[Missing, ...]

    @property
    def ready(self) -> bool:
        """Whether nothing that training requires is missing."""
        return not any(one.required for one in self.missing)

    def document(self) -> dict[str, Any]:
        """As one JSON document."""
        known_bad = [
            {key: getattr(one, key) for key in ("id", "effect", "concerns", "text", "remedy", "source")}
            for one in self.known_bad
        ]
        return {
            "schema": 1,
            "ready": self.ready,
            "machine": dict(self.machine),
            "device": None if self.device is None else dict(self.device),
            "versions": dict(self.versions),
            "capabilities": [asdict(one) for one in self.capabilities],
            "settings": [asdict(one) for one in self.settings],
            "ceilings": [asdict(one) for one in self.ceilings],
            "known_bad": known_bad,
            "missing": [asdict(one) for one in self.missing],
        }


def examine(deep: bool = False) -> Examination:
    """Look at everything.

    Args:
        deep: also compile a function with torch.compile (about ten seconds).

    Raises:
        EnvironmentFault: the file of measured ceilings is damaged.
    """
    versions = installed_versions()
    missing = missing_packages(versions)
    has_torch = importlib.util.find_spec("torch") is not None
    device, found = _ask_torch(deep) if has_torch else (None, ())
    cores = machine.usable_cores()
    facts = _facts(versions, has_torch)
    settings = (thread_setting(os.environ, cores), allocator_setting(os.environ, platform.libc_ver()[0]))
    return Examination(
        machine=_machine(cores),
        device=None if device is None else {"type": device.type, "name": device.name, "count": device.count},
        versions={**versions, **{key: facts.versions[key] for key in ("gcc",) if key in facts.versions}},
        capabilities=found,
        settings=settings,
        ceilings=() if device is None else _ceilings(device, cores),
        known_bad=applying(facts),
        missing=missing,
    )


def _ask_torch(deep: bool) -> "tuple[Device, tuple[Capability, ...]]":
    from drivetrain.config.operation import RunSectionConfig
    from drivetrain.engine.capabilities import capabilities
    from drivetrain.engine.devices import select_device

    device = select_device(RunSectionConfig())
    return device, capabilities(device, deep)


def installed_versions() -> dict[str, str]:
    """Python's and Drivetrain's version, and those of the distributions that matter and are importable."""
    from drivetrain import __version__

    found = {"python": platform.python_version(), "drivetrain": __version__}
    for name in _DISTRIBUTIONS:
        if importlib.util.find_spec(name.replace("-", "_")) is None:
            continue
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "unknown"
    for library in ("nccl", "cudnn"):
        for cuda in ("cu13", "cu12"):
            try:
                found.setdefault(library, importlib.metadata.version(f"nvidia-{library}-{cuda}"))
            except importlib.metadata.PackageNotFoundError:
                continue
    return found


def _facts(versions: Mapping[str, str], has_torch: bool) -> Facts:
    cuda, capability, known = False, None, dict(versions)
    if has_torch:
        import torch

        from drivetrain.engine.capabilities import cpp_compiler

        # ROCm answers to torch.cuda as well; what is known of CUDA is not known of it.
        cuda = torch.version.cuda is not None and torch.cuda.is_available()
        capability = torch.cuda.get_device_capability(0) if cuda else None
        compiler = cpp_compiler()
        if compiler is not None and "clang" not in compiler[0]:
            known["gcc"] = compiler[1]
    versions = {name: version for name, version in known.items() if version[:1].isdigit()}
    return Facts(versions, cuda, capability, machine.cpu_model(), machine.cpu_flags(), dict(os.environ))


def _machine(cores: int) -> dict[str, Any]:
    return {
        "host": platform.node(),
        "name": machine.machine_name(),
        "system": f"{platform.system()} {platform.release()}",
        "cpu": machine.cpu_model(),
        "cpus": os.cpu_count(),
        "usable_cores": cores,
        "l3_bytes": machine.total_l3_bytes(),
        "available_memory_bytes": machine.available_memory(),
        "load_average": machine.load_average(),
        "gpus": list(machine.gpu_models()),
        "cache": str(machine.cache_folder()),
    }


def missing_packages(versions: Mapping[str, str]) -> tuple[Missing, ...]:
    """What the engine needs and `versions` (names as pip writes them) does not have."""
    torch_fix = (
        f"pip install 'torch>={MINIMUM_TORCH}'   "
        "(a machine without GPU: add --index-url https://download.pytorch.org/whl/cpu)"
    )
    needed = (
        ("torch", True, "training, bench, and the capabilities of this report", torch_fix),
        ("safetensors", True, "checkpoints", "pip install 'safetensors>=0.5'"),
        ("tokenizers", True, "preparing text", "pip install 'tokenizers>=0.21'"),
        ("pyarrow", False, "Parquet files as training text", "pip install 'pyarrow>=17'"),
    )
    missing = [Missing(*one) for one in needed if one[0] not in versions]
    torch = versions.get("torch", "")
    if torch[:1].isdigit() and parse_version(torch) < parse_version(MINIMUM_TORCH):
        missing.append(
            Missing("torch", True, f"the engine: it needs {MINIMUM_TORCH}, here is {torch}", torch_fix)
        )
    return tuple(missing)


def thread_setting(environment: Mapping[str, str], cores: int) -> Setting:
    """Whether OMP_NUM_THREADS or MKL_NUM_THREADS hold back, or overload, `cores` usable cores."""
    given = {
        name: environment[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if environment.get(name)
    }
    found = ", ".join(f"{name}={value}" for name, value in given.items()) or "not set"
    differing = [name for name, value in given.items() if value != str(cores)]
    if not differing:
        return Setting("threads", "good", f"{found}; {cores} usable cores", "")
    return Setting(
        "threads",
        "advice",
        f"{found}; {cores} usable cores",
        f"unset {' '.join(differing)}, or set it to {cores} for other programs; drivetrain train sets its "
        "own threads (run.num_threads, else the usable cores divided by the local processes)",
    )


_ALLOCATORS = ("jemalloc", "tcmalloc", "mimalloc")
ALLOCATOR_VARIABLES = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000"}
"""glibc: serve large blocks from the heap, and keep freed memory instead of returning it at once."""


def allocator_setting(environment: Mapping[str, str], libc: str) -> Setting:
    """Whether large temporaries on a CPU are mapped and unmapped anew each time.

    Args:
        environment: environment variables.
        libc: ``glibc`` where that is the C library.
    """
    preloaded = [name for name in _ALLOCATORS if name in environment.get("LD_PRELOAD", "")]
    if preloaded:
        return Setting("allocator", "good", f"{preloaded[0]} is preloaded", "")
    if libc != "glibc":
        return Setting("allocator", "good", f"{libc or 'not glibc'}: no advice is known", "")
    found = {name: environment.get(name) for name in ALLOCATOR_VARIABLES}
    shown = ", ".join(f"{name}={value or 'not set'}" for name, value in found.items())
    if found["MALLOC_MMAP_MAX_"] == "0" and found["MALLOC_TRIM_THRESHOLD_"]:
        return Setting("allocator", "good", f"glibc, {shown}", "")
    wanted = " ".join(f"{name}={value}" for name, value in ALLOCATOR_VARIABLES.items())
    return Setting(
        "allocator",
        "advice",
        f"glibc, {shown}",
        f"on a CPU, train with memory.keep_freed_memory=true, or export {wanted} before Python starts: every large "
        "temporary is otherwise mapped, zeroed and unmapped anew (docs/doctor.md has what that costs; memory is kept "
        "until the process ends)",
    )


def _ceilings(device: "Device", cores: int) -> tuple[CeilingStatus, ...]:
    threads = cores if device.type == "cpu" else None
    ceilings = load_ceilings()
    found = []
    wanted: tuple[tuple[Literal["matmul", "memory"], str], ...] = (
        ("matmul", "bf16"),
        ("matmul", "fp32"),
        ("memory", "fp32"),
    )
    for kind, dtype in wanted:
        entry = ceilings.find(kind, device.name, dtype, threads)
        if entry is not None:
            note = entry.source
            found.append(CeilingStatus(kind, dtype, threads, entry.value, note))
            continue
        verb = f"gemm --dtype {dtype}" if kind == "matmul" else "memory"
        option = "" if threads is None else f" --threads {threads}"
        note = f"not measured; run: drivetrain bench {verb}{option}"
        found.append(CeilingStatus(kind, dtype, threads, None, note))
    return tuple(found)
