"""Memory of attention at 32,768 tokens: each backend on a CPU against torch's SDPA with one S x S mask.

What is looked at is the self-attention of one Llama layer, forward and backward. Bytes of tensors are counted on
tensors without memory, so that any number of heads fits: the most that are alive at once, and those that are kept
between forward and backward, which each further layer adds. Then the same is computed, with fewer heads, in a process
for each side, and the growth of its resident memory is read from the system: that has everything, also what an operator
allocates inside. ``ratio`` is the peer's bytes over ours.

    python benchmarks/attention_memory.py --json
    python benchmarks/attention_memory.py --quick
"""

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from harness.attention_layer import (
    DTYPES,
    MASKS,
    ONE_MASK,
    Counted,
    MaskKind,
    Refused,
    Shape,
    counted,
    step_of,
)
from harness.claims import Claim, claim_of_ratios, document, verdict

PEER = "torch SDPA with one mask"
TARGET = 2.0
REFERENCE = "dense"
"""Is plain, and reported for information: it holds the scores of all heads."""
BACKENDS = ("eager", "products", "chunked", REFERENCE, "flex")
SHAPE = Shape()
RESIDENT_SHAPE = Shape(heads=1, groups=1)
RESIDENT_DTYPE = "bfloat16"
RESIDENT: tuple[tuple[MaskKind, str], ...] = (
    ("causal", ONE_MASK),
    ("causal", "eager"),
    ("causal", "chunked"),
    ("documents", ONE_MASK),
    ("documents", "eager"),
    ("documents", "products"),
    ("documents", "chunked"),
)
"""What is computed. ``dense`` would take 4 GiB for each tensor of scores."""


def mebibytes(number: int) -> str:
    return f"{number / 2**20:,.0f}"


def counted_claims(dtypes: Sequence[str], backends: Sequence[str], shape: Shape = SHAPE) -> list[Claim]:
    """Of each mask, dtype and backend that serves: the most bytes alive, and those kept for backward."""
    import torch

    claims = []
    for dtype in dtypes:
        for kind in MASKS:
            theirs = counted(ONE_MASK, kind, dtype, shape)
            assert isinstance(theirs, Counted)
            for backend in backends:
                ours = counted(backend, kind, dtype, shape)
                if isinstance(ours, Refused):
                    print(f"  {kind}, {dtype}: {backend} does not serve: {ours.why}", file=sys.stderr)
                    continue
                for what, mine, other in (
                    ("live bytes", ours.peak, theirs.peak),
                    ("bytes kept for backward", ours.kept, theirs.kept),
                ):
                    target = 0.0 if backend == REFERENCE else TARGET
                    claims.append(
                        claim_of_ratios(
                            _claim(f"{kind}, {dtype}, {backend}: {what}", shape, target),
                            PEER,
                            torch.__version__,
                            [other / mine],
                            target=target,
                            note=(
                                f"{shape}; MiB: {mebibytes(mine)} against {mebibytes(other)}; counted on tensors "
                                "without memory"
                                + (", input, weights and gradients included" if what == "live bytes" else "")
                            ),
                        )
                    )
    return claims


def resident_claims(shape: Shape = RESIDENT_SHAPE) -> list[Claim]:
    """Of real tensors: growth of a process's resident memory."""
    import torch

    found: dict[tuple[MaskKind, str], tuple[int, float]] = {}
    claims = []
    for kind, backend in RESIDENT:
        result = _measured_apart(kind, backend, shape)
        if isinstance(result, Refused):
            print(f"  {kind}: {backend} does not serve: {result.why}", file=sys.stderr)
            continue
        found[kind, backend] = result
        if backend == ONE_MASK:
            continue
        (mine, seconds), (other, their_seconds) = result, found[kind, ONE_MASK]
        claims.append(
            claim_of_ratios(
                _claim(f"{kind}, {RESIDENT_DTYPE}, {backend}: resident memory", shape, TARGET),
                PEER,
                torch.__version__,
                [other / mine],
                target=TARGET,
                note=(
                    f"{shape}; growth of a process during one step, MiB: {mebibytes(mine)} against "
                    f"{mebibytes(other)}; it took {seconds:.1f} s against {their_seconds:.1f} s, once each"
                ),
            )
        )
    return claims


def _claim(what: str, shape: Shape, target: float) -> str:
    bound = f" at most 1/{target:g} of the peer's" if target else ""
    return f"self-attention of a Llama layer, S = {shape.tokens}, {what}{bound}"


def _measured_apart(kind: MaskKind, backend: str, shape: Shape) -> tuple[int, float] | Refused:
    """In a process of its own: what others have allocated and freed before is no part of it."""
    command = [sys.executable, str(Path(__file__).resolve()), "--measure", kind, backend, str(shape.tokens)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        out, _ = process.communicate()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if process.returncode != 0:
        sys.exit(f"measuring {kind}, {backend} ended with {process.returncode}")
    said = json.loads(out)
    if "refused" in said:
        return Refused(said["refused"])
    print(f"  {kind}, {backend}: {mebibytes(said['bytes'])} MiB, {said['seconds']:.1f} s", file=sys.stderr)
    return said["bytes"], said["seconds"]


def measure(kind: MaskKind, backend: str, shape: Shape) -> dict[str, object]:
    """In the process that measures: most resident bytes during one step above those before it, and its seconds."""
    # What is loaded and started at the first call is no part of the second.
    for warming in (True, False):
        step = step_of(backend, kind, RESIDENT_DTYPE, Shape(256, 1, 1, shape.width) if warming else shape)
        if isinstance(step, Refused):
            if warming:
                continue
            return {"refused": step.why}
        # The kernel counts the peak anew from here (proc(5)).
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        before, start = _status("VmRSS"), time.perf_counter()
        gradients = step.backward(step.forward())
        seconds = time.perf_counter() - start
        grown = _status("VmHWM") - before
        del step, gradients
    return {"bytes": grown, "seconds": seconds}


def _status(field: str) -> int:
    """Bytes, of a field of this process's status."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"/proc/self/status has no {field}")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="counts alone, of bf16 and three backends")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if options.measure is not None:
        kind, backend, tokens = options.measure
        print(json.dumps(measure(kind, backend, Shape(int(tokens), heads=1, groups=1))))
        return
    if options.quick:
        claims = counted_claims(DTYPES[:1], BACKENDS[:3])
    else:
        claims = counted_claims(DTYPES, BACKENDS) + resident_claims()
    for claim in claims:
        print(f"{claim.ratio:8.2f} {verdict(claim):11} {claim.claim} | {claim.note}", file=sys.stderr)
    if options.json:
        print(document(claims))


if __name__ == "__main__":
    main()
