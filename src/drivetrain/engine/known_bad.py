"""Combinations of versions and settings that are known to go wrong, each with its source. No torch.

``doctor`` prints those that apply here, with whom they concern. An entry states what was reported for which
versions, no more: the upper bound is the first version known to be good, or the last one reported plus one.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["KNOWN_BAD", "Facts", "KnownBad", "applying", "between", "parse_version"]

_PRE_RELEASE = re.compile(r"^[._-]?(a|b|c|rc|alpha|beta|pre|preview|dev)", re.IGNORECASE)
_POST_RELEASE = re.compile(r"^[._-]?post(\d*)", re.IGNORECASE)

Version = tuple[int, int, int, int, int, int]


def parse_version(text: str) -> Version:
    """A version as numbers that compare: four of the release, -1/0/1 for pre/final/post, the post number.

    The local part (``+cpu``) is dropped; ``2.13.0a0`` comes before ``2.13.0`` before ``2.13.0.post1``.

    Raises:
        ValueError: `text` does not begin with a number.
    """
    public = text.strip().lstrip("v").split("+")[0]
    found = re.match(r"\d+(?:\.\d+)*", public)
    if found is None:
        raise ValueError(f"no version: {text!r}")
    numbers = [int(part) for part in found.group().split(".")][:4]
    release = (*numbers, *[0] * (4 - len(numbers)))
    rest = public[found.end() :]
    post = _POST_RELEASE.match(rest)
    stage = -1 if _PRE_RELEASE.match(rest) else 1 if post else 0
    return (release[0], release[1], release[2], release[3], stage, int(post.group(1) or 0) if post else 0)


@dataclass(frozen=True, slots=True)
class Facts:
    """What the predicates may look at."""

    versions: Mapping[str, str]
    """Installed distributions by name, as pip writes them; ``nccl``, ``cudnn``, ``gcc`` besides."""
    cuda: bool = False
    """Whether there is a CUDA device."""
    compute_capability: tuple[int, int] | None = None
    """Of the first CUDA device."""
    cpu_model: str = ""
    cpu_flags: frozenset[str] = frozenset()
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables."""


def between(facts: Facts, package: str, first: str | None, below: str | None) -> bool:
    """Whether `package` is installed with first <= version < below (None: no bound)."""
    text = facts.versions.get(package)
    if text is None:
        return False
    version = parse_version(text)
    return (first is None or version >= parse_version(first)) and (
        below is None or version < parse_version(below)
    )


@dataclass(frozen=True, slots=True)
class KnownBad:
    """One combination."""

    id: str
    effect: Literal["wrong results", "crash", "hang", "slow", "security"]
    concerns: str
    """Who has to care."""
    text: str
    """What happens."""
    remedy: str
    source: str
    applies: Callable[[Facts], bool]


KNOWN_BAD: tuple[KnownBad, ...] = (
    KnownBad(
        id="inductor-dropout-masks",
        effect="wrong results",
        concerns="training with dropout and fusion.compile=true on CUDA",
        text="compiled dropout repeats its mask in groups of four elements; with recomputation the backward "
        "mask differs from the forward one",
        remedy="fusion.compile=false, or no dropout, or torch._inductor.config.align_random_eager=True",
        source="https://github.com/pytorch/pytorch/issues/198333",
        applies=lambda facts: facts.cuda and between(facts, "torch", "2.13", "2.14"),
    ),
    KnownBad(
        id="cudnn-sdpa-backward-nan",
        effect="wrong results",
        concerns="attention with a mask tensor on H100 and H200, sequences 64 longer than a multiple of 128",
        text="the cuDNN backward of scaled_dot_product_attention gives NaN in the gradient of the queries",
        remedy="torch.backends.cuda.enable_cudnn_sdp(False)",
        source="https://github.com/pytorch/pytorch/issues/196678",
        applies=lambda facts: (
            facts.cuda
            and facts.compute_capability is not None
            and facts.compute_capability[0] == 9
            and between(facts, "torch", "2.11", "2.14")
        ),
    ),
    KnownBad(
        id="compiled-custom-autograd",
        effect="wrong results",
        concerns="custom operators with their own backward under torch.compile",
        text="torch 2.11 traces some custom autograd functions into a graph with wrong outputs",
        remedy="update torch, or leave such operators uncompiled and compare them with eager",
        source="https://github.com/pytorch/pytorch/issues/180642",
        applies=lambda facts: between(facts, "torch", "2.11", "2.12"),
    ),
    KnownBad(
        id="inductor-gcc14-avx512",
        effect="crash",
        concerns="fusion.compile=true on an AMD processor with AVX-512 and GCC 14",
        text="a compiled softmax died of a segmentation fault (GCC 14.2 of conda-forge, Zen 4, torch 2.10)",
        remedy="install g++ 12 or 13 and set CXX to it; drivetrain doctor --deep compiles a softmax to see",
        source="https://github.com/pytorch/pytorch/issues/176279",
        applies=lambda facts: (
            "AMD" in facts.cpu_model
            and "avx512f" in facts.cpu_flags
            and between(facts, "gcc", "14", "15")
            and between(facts, "torch", "2.10", None)
        ),
    ),
    KnownBad(
        id="fsdp2-tied-uneven",
        effect="wrong results",
        concerns="FSDP2 with tied embeddings and a vocabulary that the ranks do not divide",
        text="the last rank's part of the shared matrix is never updated; torch 2.13 refuses such a set-up",
        remedy="update torch to 2.13, or shard both modules in one group: fully_shard([embedding, output])",
        source="https://github.com/pytorch/pytorch/issues/176076",
        applies=lambda facts: between(facts, "torch", None, "2.13"),
    ),
    KnownBad(
        id="ddp-bf16-hook-on-gloo",
        effect="crash",
        concerns="DistributedDataParallel with bf16_compress_hook on CPU (gloo)",
        text="torch refuses the hook without NCCL or XCCL: 'BF16 all reduce communication hook required ...'",
        remedy="reduce in fp32, or write the hook yourself: cast, all_reduce, cast back",
        source="https://github.com/pytorch/pytorch/pull/63260",
        applies=lambda facts: "torch" in facts.versions and not facts.cuda,
    ),
    KnownBad(
        id="torchrun-shared-store",
        effect="crash",
        concerns="restarts under torchrun (--max-restarts with --rdzv-backend c10d)",
        text="workers share the agent's store and meet the addresses of the former attempt: on gloo "
        "'connectFullMesh failed', on NCCL a connection to a stale port",
        remedy="export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
        source="https://github.com/pytorch/pytorch/issues/135712",
        applies=lambda facts: (
            between(facts, "torch", "2.5", None)
            and facts.environment.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1"
        ),
    ),
    KnownBad(
        id="nccl-device-id-hang",
        effect="hang",
        concerns="init_process_group(device_id=...) with NCCL",
        text="torch 2.7.0 hangs now and then in a collective (non-blocking communicators)",
        remedy="update torch to 2.7.1, or export TORCH_NCCL_USE_COMM_NONBLOCKING=0",
        source="https://github.com/pytorch/pytorch/issues/153960",
        applies=lambda facts: facts.cuda and between(facts, "torch", "2.7.0", "2.7.1"),
    ),
    KnownBad(
        id="nccl-2.29.2-hang",
        effect="hang",
        concerns="several GPUs",
        text="NCCL 2.29.2 has a regression that hangs; 2.29.3 mends it",
        remedy="pip install 'nvidia-nccl-cu13>=2.29.3' (or -cu12, as torch was built)",
        source="https://github.com/pytorch/pytorch/pull/174338",
        applies=lambda facts: between(facts, "nccl", "2.29.2", "2.29.3"),
    ),
    KnownBad(
        id="flash-attn-2.8-old-torch",
        effect="crash",
        concerns="users of flash-attn",
        text="flash-attn 2.8 wheels are built for the new C++ ABI: 'undefined symbol' with torch below 2.7",
        remedy="update torch to 2.7 or newer, or pip install flash-attn==2.7.4.post1",
        source="https://github.com/huggingface/open-r1/issues/684",
        applies=lambda facts: (
            between(facts, "flash-attn", "2.8.0", None) and between(facts, "torch", None, "2.7")
        ),
    ),
    KnownBad(
        id="flash-attn-2.7-new-torch",
        effect="crash",
        concerns="users of flash-attn",
        text="flash-attn 2.7.4.post1 wheels have the old C++ ABI: 'undefined symbol' with torch from 2.7 on",
        remedy="pip install -U flash-attn",
        source="https://github.com/Dao-AILab/flash-attention/issues/1644",
        applies=lambda facts: (
            between(facts, "flash-attn", None, "2.8.0") and between(facts, "torch", "2.7", None)
        ),
    ),
    KnownBad(
        id="numpy-2-old-torch",
        effect="crash",
        concerns="everyone",
        text="torch before 2.3 was built for NumPy 1: 'Numpy is not available', or a crash",
        remedy="update torch, or pip install 'numpy<2'",
        source="https://github.com/pytorch/pytorch/issues/132179",
        applies=lambda facts: between(facts, "numpy", "2.0", None) and between(facts, "torch", None, "2.3"),
    ),
    KnownBad(
        id="transformers-accumulation-loss",
        effect="wrong results",
        concerns="comparisons with the Hugging Face Trainer and gradient accumulation",
        text="the Trainer's loss, and in some releases its gradients, are too large by the number of "
        "accumulation steps",
        remedy="pip install -U 'transformers>=4.48.3'",
        source="https://github.com/huggingface/transformers/issues/35663",
        applies=lambda facts: between(facts, "transformers", "4.46.0", "4.48.3"),
    ),
    KnownBad(
        id="one-cuda-connection",
        effect="slow",
        concerns="data parallelism and FSDP2 on CUDA",
        text="CUDA_DEVICE_MAX_CONNECTIONS=1, which Megatron's tensor parallelism wants, puts gradient "
        "reduction and backward in one queue: they no longer overlap",
        remedy="unset CUDA_DEVICE_MAX_CONNECTIONS, or set it to 16 or 32",
        source="https://github.com/pytorch/torchtitan/issues/1147",
        applies=lambda facts: facts.cuda and facts.environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1",
    ),
    KnownBad(
        id="triton-interpreter-bf16",
        effect="wrong results",
        concerns="Triton kernels in bf16 while TRITON_INTERPRET=1 is set",
        text="the interpreter computes on the bit patterns of bf16 as integers, in silence",
        remedy="unset TRITON_INTERPRET outside of tests, or cast to fp32 inside the kernel",
        source="https://github.com/triton-lang/triton/issues/11584",
        applies=lambda facts: facts.environment.get("TRITON_INTERPRET", "0") not in ("", "0"),
    ),
    KnownBad(
        id="torch-load-memory-corruption",
        effect="security",
        concerns="whoever opens .pt and .bin files of others (Drivetrain itself reads no pickle)",
        text="a crafted file corrupts memory even with torch.load(weights_only=True)",
        remedy="update torch to 2.10 or newer, or use safetensors only",
        source="https://github.com/pytorch/pytorch/security/advisories/GHSA-63cw-57p8-fm3p",
        applies=lambda facts: between(facts, "torch", None, "2.10"),
    ),
)
"""The table."""


def applying(facts: Facts) -> tuple[KnownBad, ...]:
    """The combinations that apply to this machine and environment."""
    return tuple(entry for entry in KNOWN_BAD if entry.applies(facts))
