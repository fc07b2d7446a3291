"""How a process that the kernel killed for want of memory is told from one that somebody else killed."""

from pathlib import Path

__all__ = ["kernel_memory_kills"]


def kernel_memory_kills() -> int:
    """Processes that this machine has killed for want of memory since boot; 0 where it does not tell (proc(5))."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
