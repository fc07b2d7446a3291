"""What this machine and this environment can do, tried where trying is cheap.

A capability's name is what the catalogue's entries require. Each answer says why not, or what was found.
Optional packages are looked up, never imported: a broken one must not take the others down.
"""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from drivetrain.config.operation import RunSectionConfig
from drivetrain.engine.devices import Device, select_device
from drivetrain.engine.memory.host import look_at_allocator
from drivetrain.engine.parallel.symmetric_memory import why_not_in_this_build
from drivetrain.measure.machine import cpu_flags

__all__ = ["CAPABILITY_NAMES", "Capability", "capabilities", "capability", "cpp_compiler"]


@dataclass(frozen=True, slots=True)
class Capability:
    """One answer."""

    name: str
    available: bool
    reason: str | None
    """Why it is not available; None where it is."""
    detail: str
    """What was found: a version, devices, a path. May be empty."""


def _yes(name: str, detail: str = "") -> Capability:
    return Capability(name, True, None, detail)


def _no(name: str, reason: str, detail: str = "") -> Capability:
    return Capability(name, False, reason, detail)


def capabilities(device: Device | None = None, deep: bool = False) -> tuple[Capability, ...]:
    """All capabilities, in the order of ``CAPABILITY_NAMES``.

    Args:
        device: where operators and ``compile`` are tried; the device a run would take when absent.
        deep: also compile a function in a process of its own (seconds), instead of only finding the compiler.
    """
    device = device or select_device(RunSectionConfig())
    found = [probe(device) for probe in _PROBES.values()]
    if deep:
        found = [_compiles(one, device) if one.name == "compile" and one.available else one for one in found]
    assert tuple(one.name for one in found) == CAPABILITY_NAMES
    return tuple(found)


def capability(name: str, device: Device) -> Capability:
    """The one called ``name``, tried on ``device``."""
    return _PROBES[name](device)


# -- the processor --


def _isa(name: str, *flags: str) -> Callable[[Device], Capability]:
    def probe(_: Device) -> Capability:
        missing = [flag for flag in flags if flag not in cpu_flags()]
        if missing:
            return _no(name, f"the processor lacks {', '.join(missing)}")
        return _yes(name, f"torch uses {torch.backends.cpu.get_cpu_capability()}")

    return probe


# -- devices and communication --


def _cuda(_: Device) -> Capability:
    if not torch.cuda.is_available():
        build = torch.version.cuda or torch.version.hip
        if build is None:
            return _no("cuda", f"torch {torch.__version__} is a CPU build")
        return _no("cuda", f"torch was built for {build} but sees no device")
    devices = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        gib = properties.total_memory / 2**30
        devices.append(f"{properties.name} (compute {properties.major}.{properties.minor}, {gib:.1f} GiB)")
    return _yes("cuda", f"{'; '.join(devices)}; built for {torch.version.cuda or torch.version.hip}")


def _nccl(_: Device) -> Capability:
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return _no("nccl", f"torch {torch.__version__} was built without it")
    version = ".".join(str(part) for part in torch.cuda.nccl.version())
    if not torch.cuda.is_available():
        return _no("nccl", "there is no CUDA device", version)
    return _yes("nccl", version)


def _gloo(_: Device) -> Capability:
    if torch.distributed.is_available() and torch.distributed.is_gloo_available():
        return _yes("gloo")
    return _no("gloo", f"torch {torch.__version__} was built without it")


def _symmetric_memory(device: Device) -> Capability:
    name = "symmetric_memory"
    if device.type != "cuda":
        return _no(
            name, f"torch's fused operators over it are for CUDA tensors, not for those of a {device.type}"
        )
    if (why := why_not_in_this_build()) is not None:
        return _no(name, why)
    devices = range(torch.cuda.device_count())
    apart = [
        (one, other)
        for one in devices
        for other in devices
        if one < other and not torch.cuda.can_device_access_peer(one, other)
    ]
    if apart:
        return _no(name, f"devices {apart[0][0]} and {apart[0][1]} cannot read each other's memory")
    if len(devices) == 1:
        return _yes(name, "one device is visible: whether ranks can share memory shows when they meet")
    return _yes(name, f"{len(devices)} devices read each other's memory")


# -- operators on the device --


def _tried(name: str, run: Callable[[], str]) -> Capability:
    """Available if `run` finishes; its result is the detail. torch says why not as an error or a warning."""
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        try:
            return _yes(name, run())
        except RuntimeError as error:
            reasons = [str(one.message).split(" (Triggered")[0] for one in raised]
            return _no(name, "; ".join([str(error).splitlines()[0], *reasons]))


def _fused_adamw(device: Device) -> Capability:
    def run() -> str:
        parameter = torch.nn.Parameter(torch.ones(4, device=device.torch_device))
        parameter.grad = torch.ones_like(parameter)
        torch.optim.AdamW([parameter], fused=True).step()
        return f"on {device.type}"

    return _tried("fused_adamw", run)


def _sdpa_flash(device: Device) -> Capability:
    def run() -> str:
        shape = (1, 2, 16, 64)  # (batch, heads, sequence, head size)
        query = torch.ones(shape, dtype=torch.bfloat16, device=device.torch_device, requires_grad=True)
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
            output = F.scaled_dot_product_attention(query, query, query, is_causal=True)
            torch.autograd.grad(output.sum(), query)
        return f"bf16, causal, forward and backward on {device.type}; not with dropout on a CPU"

    return _tried("sdpa_flash", run)


def _bf16_matmul(device: Device) -> Capability:
    def run() -> str:
        ones = torch.ones(64, 64, dtype=torch.bfloat16, device=device.torch_device)
        if not bool((ones @ ones == 64).all()):
            raise RuntimeError("the product of two matrices of ones is wrong")
        return f"on {device.type}"

    return _tried("bf16_matmul", run)


def _bf16_native(device: Device) -> Capability:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device.torch_device)
        if torch.version.hip is None and major < 8:
            return _no("bf16_native", f"compute capability {major}.{minor}: bf16 units came with 8.0")
        return _yes("bf16_native", device.name)
    names = ("amx_bf16", "avx512_bf16", "bf16", "svebf16")
    units = [flag for flag in names if flag in cpu_flags()]
    if not units:
        return _no(
            "bf16_native", f"the processor has none of {', '.join(names)}: bf16 is computed through fp32"
        )
    return _yes("bf16_native", ", ".join(units))


def _fp16_native(device: Device) -> Capability:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device.torch_device)
        if torch.version.hip is None and major < 7:
            return _no("fp16_native", f"compute capability {major}.{minor}: fp16 units came with 7.0")
        return _yes("fp16_native", device.name)
    names = ("amx_fp16", "asimdhp")
    units = [flag for flag in names if flag in cpu_flags()]
    if units:
        return _yes("fp16_native", ", ".join(units))
    # Measured with torch 2.13: products took as long as in fp32 with avx512_fp16, and 5 to 200 times as long with AVX2.
    slow = "no faster than" if "avx512_fp16" in cpu_flags() else "many times slower than"
    return _no(
        "fp16_native", f"the processor has none of {', '.join(names)}: fp16 products are {slow} those of fp32"
    )


# -- the allocator of host memory --


def _glibc_malloc(device: Device) -> Capability:
    if device.type != "cpu":
        return _no("glibc_malloc", f"tensors of a {device.type} device do not lie in host memory")
    seen = look_at_allocator()
    if seen.name == "other" or (seen.name is None and platform.libc_ver()[0] != "glibc"):
        return _no("glibc_malloc", seen.reason or "the allocator is not known")
    kept = {True: "keeps freed memory", False: "gives freed memory back", None: f"{seen.reason}"}
    return _yes("glibc_malloc", f"{' '.join(platform.libc_ver())}, {kept[seen.keeps_freed]}")


# -- torch.compile --


def cpp_compiler() -> tuple[str, str] | None:
    """Path and version of Inductor's C++ compiler, or None: ``$CXX``, else g++, on macOS clang++."""
    name = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    path = shutil.which(name.split()[0])
    if path is None:
        return None
    asked = [path, "-dumpfullversion", "-dumpversion"]
    answer = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=False)
    return (path, answer.stdout.strip()) if answer.returncode == 0 else None


def _compile(device: Device) -> Capability:
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            return _no("compile", "Triton is missing: pip install triton")
        return _yes("compile", f"triton {_version('triton')}; not tried, see --deep")
    compiler = cpp_compiler()
    if compiler is None:
        return _no("compile", "no C++ compiler (looked for $CXX, g++): apt install g++, or set CXX")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        return _no("compile", f"{header} is missing: install the Python headers (apt install python3-dev)")
    return _yes("compile", f"{compiler[0]} {compiler[1]}; not tried, see --deep")


_TWO_LINES = """
import torch
def function(x): return torch.nn.functional.gelu(x) * 2 + torch.softmax(x, -1)
x = torch.randn(8, 1024, device="{device}")
torch.testing.assert_close(torch.compile(function)(x), function(x))
"""


def _compiles(found: Capability, device: Device) -> Capability:
    """Compile a function and compare it with eager, in a process of its own: compilers have crashed it."""
    with tempfile.TemporaryDirectory(prefix="drivetrain-compile-") as folder:
        # A cache of its own, or a former compilation would answer for a compiler that is gone.
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder}
        program = [sys.executable, "-c", _TWO_LINES.format(device=device.torch_device)]
        try:
            done = subprocess.run(
                program, capture_output=True, text=True, timeout=300, env=environment, check=False
            )
        except subprocess.TimeoutExpired:
            return _no("compile", "compiling two lines took more than 5 minutes", found.detail)
    detail = found.detail.replace("; not tried, see --deep", "")
    if done.returncode == 0:
        return _yes("compile", f"{detail}; a function was compiled and agrees with eager")
    if done.returncode < 0:
        return _no(
            "compile", f"the compiled function crashed: {signal.Signals(-done.returncode).name}", detail
        )
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    # The last line is often advice of torch's; the exception's own line says what failed.
    named = [line for line in lines if "Error" in line.split(":")[0]]
    return _no("compile", (named or lines or ["no message"])[-1][:300], detail)


# -- optional packages --


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def _package(name: str, distribution: str, needs_cuda: bool) -> Callable[[Device], Capability]:
    def probe(_: Device) -> Capability:
        if importlib.util.find_spec(name) is None:
            return _no(name, "not installed")
        if needs_cuda and not torch.cuda.is_available():
            return _no(name, "installed, but there is no CUDA device for it", _version(distribution))
        return _yes(name, f"{_version(distribution)}, installed; not imported")

    return probe


_PROBES: dict[str, Callable[[Device], Capability]] = {
    "cpu.avx2": _isa("cpu.avx2", "avx2", "fma"),
    "cpu.avx512": _isa("cpu.avx512", "avx512f", "avx512bw", "avx512vl", "avx512dq"),
    "cpu.avx512_bf16": _isa("cpu.avx512_bf16", "avx512_bf16"),
    "cpu.amx_bf16": _isa("cpu.amx_bf16", "amx_tile", "amx_bf16"),
    "cuda": _cuda,
    "nccl": _nccl,
    "gloo": _gloo,
    "symmetric_memory": _symmetric_memory,
    "compile": _compile,
    "fused_adamw": _fused_adamw,
    "sdpa_flash": _sdpa_flash,
    "bf16_matmul": _bf16_matmul,
    "bf16_native": _bf16_native,
    "fp16_native": _fp16_native,
    "glibc_malloc": _glibc_malloc,
    "triton": _package("triton", "triton", needs_cuda=True),
    "flash_attn": _package("flash_attn", "flash-attn", needs_cuda=True),
    "liger_kernel": _package("liger_kernel", "liger-kernel", needs_cuda=True),
    "transformer_engine": _package("transformer_engine", "transformer-engine", needs_cuda=True),
    "torch_npu": _package("torch_npu", "torch-npu", needs_cuda=False),
}

CAPABILITY_NAMES = tuple(_PROBES)
"""Every name that may be required."""
