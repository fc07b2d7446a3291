"""How long a large trace takes, and how much memory: read, accounted for, and read again from the cache.

A real trace (two V100, five steps, 216,000 records) is repeated ten times in time: 520 MB of text, 2.1 million
records, 50 steps; correlations and step numbers go on counting. Without the shared traces the small one of the tests
is repeated instead. Each measurement is a process of its own; memory is its high-water mark (``VmHWM``).

    python benchmarks/trace.py --quick --json
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Final

from isal import igzip

from harness.claims import Claim, claim_of_ratios, document

ROOT: Final = Path(__file__).resolve().parents[1]
REAL: Final = ROOT.parent / "shared/traces/hta/tests/data/df_index_resolver/df_index_resolver.json.gz"
OWN: Final = ROOT / "tests/trace/data/cpp_2_1.json"
FULL_BYTES: Final = 520_000_000
QUICK_BYTES: Final = 53_000_000
RANK_BYTES: Final = 53_000_000
RANKS: Final = 8

ACCOUNT_S: Final = 6.0
ACCOUNT_BYTES: Final = 350e6
CACHED_S: Final = 0.8
FLAT: Final = 0.8

PEERS: Final = (
    "published for the same file on two such cores: HTA 0.6.1 73 s and 2.2 GB, TraceLens 129 s and 7.3 GB, Perfetto "
    "trace_processor v56 7 s and 0.8 GB to read only; none of them was run here"
)

_NUMBER: Final = re.compile(rb'"(ts|correlation|External id|id)": (\d+)|(ProfilerStep#)(\d+)')

CHILD: Final = """
import json, sys, time
task, paths = sys.argv[1], sys.argv[2:]
begin = time.perf_counter()
if task == "floor":
    import msgspec
    from isal import igzip

    class Record(msgspec.Struct, gc=False):
        pass

    decoder = msgspec.json.Decoder(list[Record])
    with igzip.open(paths[0]) as file:
        rest = file.read(1 << 20)
        rest = rest[rest.index(b'"traceEvents"'):]
        rest = rest[rest.index(b"[") + 1:]
        while block := file.read(1 << 20):
            rest += block
            end = rest.rindex(b"},") + 1
            while True:
                try:
                    decoder.decode(b"[" + rest[:end] + b"]")
                    break
                except msgspec.DecodeError:
                    end = rest.rindex(b"},", 0, end - 1) + 1
            rest = rest[end + 1:]
else:
    from drivetrain.trace.read import read_trace

    traces = (read_trace(path, cache=task.endswith("cached")) for path in paths)
    if task.startswith("account"):
        from drivetrain.trace.account import account_of

        account_of(traces)
    else:
        for trace in traces:
            pass
seconds = time.perf_counter() - begin
memory = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps([seconds, int(memory.split()[1]) * 1024]))
"""
"""Prints seconds, imports of the package included, and the peak of resident memory in bytes."""


def measure(task: str, paths: Sequence[Path]) -> tuple[float, float]:
    """(seconds, bytes) of one task in a process of its own, which finds its modules compiled, as after installation."""
    command = [sys.executable, "-c", CHILD, task, *map(str, paths)]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(paths[0].parent / "bytecode")
    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    seconds, memory = json.loads(answer.stdout)
    print(f"{task}: {seconds:.2f} s, {memory / 1e6:.0f} MB", file=sys.stderr, flush=True)
    return seconds, memory


def make_trace(path: Path, size: int, rank: int | None = None) -> int:
    """Write a trace of about ``size`` bytes of text; returns its length."""
    source = REAL if REAL.exists() else OWN
    text = igzip.decompress(source.read_bytes()) if source.suffix == ".gz" else source.read_bytes()
    start = text.index(b"[", text.index(b'"traceEvents"')) + 1
    head, rest = text[:start], text[start:]
    end = rest.rindex(b"]")
    events, tail = rest[:end].rstrip(), rest[end:]
    if rank is not None:
        head = re.sub(rb'"rank": \d+', b'"rank": %d' % rank, head)
        head = re.sub(rb'"world_size": \d+', b'"world_size": %d' % RANKS, head)
    starts = [int(number) for number in re.findall(rb'"ts": (\d+)', events)]
    strides = {
        b"ts": max(starts) - min(time for time in starts if time) + 1000,
        b"ProfilerStep#": 1000,
        b"correlation": 10_000_000,
        b"External id": 10_000_000,
        b"id": 10_000_000,
    }
    length = len(head) + len(tail)
    with igzip.open(path, "wb", compresslevel=1) as file:
        file.write(head)
        for number in range(max(1, round(size / len(events)))):
            repeated = events if number == 0 else b"," + _NUMBER.sub(_shifted(strides, number), events)
            length += len(repeated)
            file.write(repeated)
        file.write(tail)
    print(
        f"{path.name}: {length / 1e6:.0f} MB, {path.stat().st_size / 1e6:.0f} MB compressed", file=sys.stderr
    )
    return length


def _shifted(strides: dict[bytes, int], number: int) -> Callable[[re.Match[bytes]], bytes]:
    def shift(found: re.Match[bytes]) -> bytes:
        if found[3] is not None:
            return b"%b%d" % (found[3], int(found[4]) + number * strides[found[3]])
        return b'"%b": %d' % (found[1], int(found[2]) + number * strides[found[1]])

    return shift


def _claim(claim: str, times: Iterable[float], ratios: Iterable[float], target: float, note: str) -> Claim:
    made = claim_of_ratios(claim, "none", "", list(ratios), target=target, note=note)
    return replace(made, a=list(times))


def run(folder: Path, size: int, repeats: int) -> list[Claim]:
    """All claims."""
    path = folder / "rank0.json.gz"
    length = make_trace(path, size, rank=0)
    small = folder / OWN.name
    shutil.copy(OWN, small)
    measure("account", [small])  # The first process compiles the modules.
    share = length / FULL_BYTES
    what = f"{length / 1e6:.0f} MB of trace"
    whole = [measure("account", [path]) for _ in range(repeats)]
    read = [measure("read", [path]) for _ in range(repeats)]
    floor = [measure("floor", [path]) for _ in range(repeats)]
    first = measure("account cached", [path])
    cached = [measure("read cached", [path]) for _ in range(repeats)]
    again = [measure("account cached", [path]) for _ in range(repeats)]
    seconds = [one for one, _ in whole]
    limit = f"limits in proportion to the size; {PEERS}" if share < 0.9 else PEERS
    claims = [
        _claim(
            f"{what}, read and accounted for: {ACCOUNT_S:g} s over the time it takes",
            seconds,
            [ACCOUNT_S * share / one for one in seconds],
            1.0,
            f"without a cache; of it reading {median(one for one, _ in read):.2f} s; with the cache written "
            f"{first[0]:.2f} s; {limit}",
        ),
        _claim(
            f"{what}, read and accounted for: {ACCOUNT_BYTES / 1e6:g} MB over the peak of memory",
            [],
            [ACCOUNT_BYTES / memory for _, memory in whole],
            1.0,
            f"peak {median(memory for _, memory in whole) / 1e6:.0f} MB, of which the table of events is 81 bytes each",
        ),
        _claim(
            f"{what}, read again from the cache: {CACHED_S:g} s over the time it takes",
            [one for one, _ in cached],
            [CACHED_S * max(share, 0.5) / one for one, _ in cached],
            1.0,
            "checking the file's SHA-256 and the columns' CRC-32 included",
        ),
        _claim(
            f"{what}, accounted for from the cache: {CACHED_S:g} s over the time it takes",
            [one for one, _ in again],
            [CACHED_S * max(share, 0.5) / one for one, _ in again],
            1.0,
            "imports of the package, reading from the cache and the account; peak of memory "
            f"{median(memory for _, memory in again) / 1e6:.0f} MB",
        ),
        _claim(
            f"{what}: time of inflating and scanning alone over that of reading",
            [one for one, _ in read],
            [base / one for (base, _), (one, _) in zip(floor, read, strict=True)],
            0.0,
            f"isal and msgspec building nothing: {median(one for one, _ in floor):.2f} s; the rest is columns",
        ),
    ]
    return [*claims, flat_memory(folder, min(size, RANK_BYTES))]


def flat_memory(folder: Path, size: int) -> Claim:
    """Memory of eight ranks against two."""
    paths = [folder / f"rank{rank}.json.gz" for rank in range(RANKS)]
    for rank, path in enumerate(paths):
        make_trace(path, size, rank)
    two, eight = measure("account", paths[:2])[1], measure("account", paths)[1]
    return _claim(
        "account of eight ranks: memory of two over memory of eight",
        [],
        [two / eight],
        FLAT,
        f"{size / 1e6:.0f} MB each; {two / 1e6:.0f} MB for two, {eight / 1e6:.0f} MB for eight",
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a tenth of the size, under a minute")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="trace-benchmark-") as name:
        claims = run(Path(name), *((QUICK_BYTES, 2) if options.quick else (FULL_BYTES, 5)))
    if options.json:
        print(document(claims))


if __name__ == "__main__":
    main()
