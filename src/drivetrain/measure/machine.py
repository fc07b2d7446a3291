"""What this machine is, read from the operating system: cores, caches, memory, an identity. No torch.

Everything here reads ``/proc`` and ``/sys`` and answers None, or the coarser figure, where they are absent.
"""

import hashlib
import os
import platform
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

__all__ = [
    "available_memory",
    "cache_folder",
    "cpu_flags",
    "cpu_model",
    "gpu_models",
    "load_average",
    "machine_name",
    "total_l3_bytes",
    "usable_cores",
]

ROOT = Path("/")


def _read(path: Path) -> str:
    """Content of a small file; empty where it is missing or may not be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _cpuinfo_value(key: str, root: Path) -> str | None:
    found = re.search(rf"^{re.escape(key)}\s*:\s*(.*)$", _read(root / "proc/cpuinfo"), re.MULTILINE)
    return found.group(1).strip() if found else None


def cpu_model(root: Path = ROOT) -> str:
    """The processor's model name, as in ``/proc/cpuinfo``; the architecture where that names none."""
    return _cpuinfo_value("model name", root) or platform.processor() or platform.machine()


def cpu_flags(root: Path = ROOT) -> frozenset[str]:
    """Instruction-set flags of the processor (``avx512f``, ``amx_bf16``, on Arm ``asimd``)."""
    flags = _cpuinfo_value("flags", root) or _cpuinfo_value("Features", root) or ""
    return frozenset(flags.split())


def gpu_models(root: Path = ROOT) -> tuple[str, ...]:
    """Model names of the NVIDIA devices whose driver is loaded, in the order of their bus addresses."""
    names = []
    for information in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        found = re.search(r"^Model:\s*(.*)$", _read(information), re.MULTILINE)
        names.append(found.group(1).strip() if found else "unknown")
    return tuple(names)


def load_average() -> float | None:
    """Runnable processes over the last minute; None where the system does not tell."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return None


def available_memory(root: Path = ROOT) -> int | None:
    """Bytes that can be allocated without swapping."""
    found = re.search(r"^MemAvailable:\s*(\d+) kB$", _read(root / "proc/meminfo"), re.MULTILINE)
    return int(found.group(1)) * 1024 if found else None


def total_l3_bytes(root: Path = ROOT) -> int | None:
    """Bytes of last-level (L3) cache, all instances together."""
    instances: dict[str, int] = {}
    for cache in (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cache/index3"):
        size = re.fullmatch(r"(\d+)([KM])", _read(cache / "size").strip())
        if size:
            shared_by = _read(cache / "shared_cpu_list").strip()
            instances[shared_by] = int(size.group(1)) * {"K": 2**10, "M": 2**20}[size.group(2)]
    return sum(instances.values()) or None


def usable_cores(root: Path = ROOT, allowed: frozenset[int] | None = None) -> int:
    """Physical cores this process may use: its CPU affinity, within the quota of its control group.

    Hardware threads of one core count once, because a second thread adds nothing to a matrix product.

    Args:
        root: where ``proc`` and ``sys`` are (for tests).
        allowed: CPU numbers; the process's affinity when absent.
    """
    if allowed is None:
        affinity = getattr(os, "sched_getaffinity", None)
        allowed = frozenset(affinity(0) if affinity else range(os.cpu_count() or 1))
    cpus = root / "sys/devices/system/cpu"
    siblings = {cpu: _read(cpus / f"cpu{cpu}/topology/thread_siblings_list").strip() for cpu in allowed}
    cores = len({group or f"cpu {cpu}" for cpu, group in siblings.items()})
    quota = _cpu_quota(root)
    return max(1, cores if quota is None else min(cores, int(quota)))


def _cpu_quota(root: Path) -> float | None:
    """CPUs' worth of time the control groups allow; None without a limit."""
    limits = [limit for folder in _cpu_groups(root) if (limit := _group_limit(folder)) is not None]
    return min(limits, default=None)


def _cpu_groups(root: Path) -> Iterator[Path]:
    """Control groups (version 1 and 2) of this process that may limit its CPU time, innermost first."""
    mount = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            base = mount
        elif "cpu" in controllers.split(","):
            base = mount / controllers if (mount / controllers).is_dir() else mount / "cpu"
        else:
            continue
        # Inside a container the path may be the host's: then only the mount itself exists, and is our own.
        inner = base / path.lstrip("/")
        for folder in (inner, *inner.parents):
            yield folder
            if folder == base:
                break


def _group_limit(folder: Path) -> float | None:
    # Version 2 says "150000 100000" or "max 100000", version 1 has a file for each number.
    quota, period = [*_read(folder / "cpu.max").split(), "", ""][:2]
    if not quota:
        quota = _read(folder / "cpu.cfs_quota_us").strip()
        period = _read(folder / "cpu.cfs_period_us").strip()
    if not (quota.isdigit() and period.isdigit() and int(period)):
        return None
    return int(quota) / int(period)


def machine_name(root: Path = ROOT, host: str | None = None) -> str:
    """A folder name for what is measured here: the host's name, and a hash of host, processor and GPUs.

    Another host, or this host with another processor or other GPUs, has another name.
    """
    host = platform.node() if host is None else host
    # Virtual machines hide the model behind a family name ("AMD EPYC"); the numbers tell generations apart.
    numbers = [_cpuinfo_value(key, root) or "" for key in ("cpu family", "model", "stepping")]
    identity = "\n".join([host, cpu_model(root), *numbers, *gpu_models(root)])
    slug = re.sub(r"[^a-z0-9]+", "-", host.lower()).strip("-")[:40] or "machine"
    return f"{slug}-{hashlib.sha256(identity.encode()).hexdigest()[:8]}"


def cache_folder(environment: Mapping[str, str] | None = None) -> Path:
    """``$DRIVETRAIN_CACHE``, else ``~/.cache/drivetrain``: what may be measured or built again."""
    given = (os.environ if environment is None else environment).get("DRIVETRAIN_CACHE", "")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "drivetrain"
