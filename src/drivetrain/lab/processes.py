"""A command on every rank of a lab: started inside its host, watched, and ended whole."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal

from drivetrain.errors import DrivetrainError
from drivetrain.lab.commands import program
from drivetrain.lab.network import INTERFACE, Wiring
from drivetrain.lab.topology import Topology

__all__ = ["LabRun", "OnLine", "RankResult", "rank_environment", "run_ranks"]

MASTER_PORT = 29500
"""Free in every lab: a host of it has no other services."""

_KEPT_BYTES = 8 * 2**20
_LOOK_EVERY_S = 0.02

Stream = Literal["stdout", "stderr"]
OnLine = Callable[[int, Stream, str], None]
"""Told of each line that a rank writes: rank, stream, the line without its end. Called from several threads."""


@dataclass(frozen=True)
class RankResult:
    """How one rank ended.

    Attributes:
        rank, host: which.
        exit_code: of its process; minus the signal that ended it.
        stdout, stderr: what it wrote; of more than 8 MiB the last 8 MiB.
    """

    rank: int
    host: int
    exit_code: int
    stdout: str
    stderr: str

    @property
    def in_words(self) -> str:
        """Which rank, where, and how it ended."""
        if self.exit_code >= 0:
            how = f"ended with exit code {self.exit_code}"
        else:
            how = f"was ended by {signal.Signals(-self.exit_code).name}"
        return f"rank {self.rank} on host {self.host} {how}"


@dataclass(frozen=True)
class LabRun:
    """How a command ended.

    Attributes:
        ranks: by rank.
        first_failed: the rank that was the first to end with an exit code other than 0; None: none was.
        timed_out: the time limit came first.
        seconds: from the first start to the last end.
    """

    ranks: tuple[RankResult, ...]
    first_failed: int | None
    timed_out: bool
    seconds: float

    @property
    def exit_code(self) -> int:
        """That of the first rank that failed (128 + its signal), 124 for the time limit (as of timeout(1)), or 0."""
        if self.timed_out:
            return 124
        if self.first_failed is None:
            return 0
        code = self.ranks[self.first_failed].exit_code
        return code if code > 0 else 128 - code

    @property
    def failure(self) -> str | None:
        """What went wrong, with the last line that the rank had to say; None: nothing."""
        if self.timed_out:
            return f"the command was still running after {self.seconds:.0f} s and was ended"
        if self.first_failed is None:
            return None
        rank = self.ranks[self.first_failed]
        said = [line for line in (rank.stderr or rank.stdout).splitlines() if line.strip()]
        return rank.in_words + (f": {said[-1].strip()}" if said else "")

    def check(self) -> "LabRun":
        """Itself, where every rank ended with 0.

        Raises:
            DrivetrainError: one did not; with its last words.
        """
        failure = self.failure
        if failure is not None:
            raise DrivetrainError(f"in the lab, {failure}")
        return self


def rank_environment(id: str, topology: Topology, rank: int, threads: int) -> dict[str, str]:
    """What torchrun would tell this rank, and the interface that gloo is to use.

    Ranks of a host have neighbouring numbers, and ``LOCAL_WORLD_SIZE`` tells how many they are: with that the engine
    knows which ranks share a machine.

    Args:
        threads: of an operator, unless the caller's environment says so already.
    """
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % topology.ranks_per_host),
        "WORLD_SIZE": str(topology.world_size),
        "LOCAL_WORLD_SIZE": str(topology.ranks_per_host),
        "GROUP_RANK": str(topology.host_of(rank)),
        "GROUP_WORLD_SIZE": str(topology.hosts),
        "MASTER_ADDR": topology.address(0),
        "MASTER_PORT": str(MASTER_PORT),
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        # It cannot name the hosts, which have no names, and says so for every connection.
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        "DRIVETRAIN_LAB": id,
    }


def cores_of_hosts(hosts: int, usable: Iterable[int]) -> list[list[int]]:
    """The CPUs that each host may use: a share of its own where there are enough, else all of them."""
    cores = sorted(usable)
    each = len(cores) // hosts
    if each == 0:
        return [cores] * hosts
    return [cores[host * each : (host + 1) * each] for host in range(hosts)]


def run_ranks(
    wiring: Wiring,
    command: Callable[[int], Sequence[str]],
    *,
    environment: Mapping[str, str],
    folder: Path | None,
    time_limit_s: float | None,
    grace_s: float,
    on_line: OnLine | None,
    own_cores: bool,
) -> LabRun:
    """Run a command on every rank to its end; when this returns or raises, no process is left in any host.

    See :meth:`Lab.run <drivetrain.lab.network_lab.Lab.run>`.
    """
    began = time.monotonic()
    ranks = _Ranks(wiring, on_line)
    try:
        ranks.start(command, environment, folder, own_cores)
        first_failed, timed_out = _watch(ranks, began, time_limit_s, grace_s)
    except KeyboardInterrupt:
        ranks.ask_to_end(grace_s)
        raise
    finally:
        # Whatever happened, and whatever the ranks have started themselves.
        wiring.empty()
        ranks.reap()
    seconds = time.monotonic() - began
    return LabRun(tuple(ranks.results()), first_failed, timed_out, seconds)


def _watch(
    ranks: "_Ranks", began: float, time_limit_s: float | None, grace_s: float
) -> tuple[int | None, bool]:
    """Wait for all ranks; the first that failed, and whether time ran out."""
    first_failed: int | None = None
    failed_at = 0.0
    while running := ranks.running():
        if first_failed is None:
            first_failed = ranks.failed()
            failed_at = time.monotonic()
        elif time.monotonic() - failed_at > grace_s:
            # They wait for one that has gone.
            return first_failed, False
        if time_limit_s is not None and time.monotonic() - began > time_limit_s:
            ranks.ask_to_end(grace_s)
            return first_failed, first_failed is None
        ranks.wait_a_little(running)
    return ranks.failed() if first_failed is None else first_failed, False


class _Ranks:
    """The processes of a command."""

    def __init__(self, wiring: Wiring, on_line: OnLine | None) -> None:
        self._wiring = wiring
        self._on_line = on_line
        self._processes: list[subprocess.Popen[bytes]] = []
        self._kept: list[dict[Stream, _Kept]] = []
        self._pumps: list[threading.Thread] = []

    def start(
        self,
        command: Callable[[int], Sequence[str]],
        environment: Mapping[str, str],
        folder: Path | None,
        own_cores: bool,
    ) -> None:
        topology = self._wiring.topology
        usable = os.sched_getaffinity(0)
        cores = cores_of_hosts(topology.hosts, usable) if own_cores else [sorted(usable)] * topology.hosts
        programs = {name: program(name) for name in ("taskset", "setpriv", "ip")}
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")
        }
        for rank in range(topology.world_size):
            host = topology.host_of(rank)
            threads = max(1, len(cores[host]) // topology.ranks_per_host)
            inside = [
                *(str(programs["taskset"]), "-c", ",".join(map(str, cores[host]))),
                # Not even a rank of a caller that was killed trains on.
                *(str(programs["setpriv"]), "--pdeathsig", "KILL"),
                *(str(programs["ip"]), "netns", "exec", self._wiring.host(host)),
                *command(rank),
            ]
            process = subprocess.Popen(
                inside,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={
                    **inherited,
                    **rank_environment(self._wiring.id, topology, rank, threads),
                    **environment,
                },
                cwd=folder,
                # Ctrl-C is ours to pass on.
                start_new_session=True,
            )
            self._processes.append(process)
            assert process.stdout is not None
            assert process.stderr is not None
            self._kept.append({})
            self._pump(rank, "stdout", process.stdout)
            self._pump(rank, "stderr", process.stderr)

    def _pump(self, rank: int, stream: Stream, source: IO[bytes]) -> None:
        kept = self._kept[rank][stream] = _Kept()

        def pump() -> None:
            with source:
                for line in source:
                    kept.add(line)
                    if self._on_line is not None:
                        self._on_line(rank, stream, line.decode(errors="replace").rstrip("\n"))

        thread = threading.Thread(target=pump, name=f"lab rank {rank} {stream}", daemon=True)
        self._pumps.append(thread)
        thread.start()

    def running(self) -> list["subprocess.Popen[bytes]"]:
        return [process for process in self._processes if process.poll() is None]

    def failed(self) -> int | None:
        """The lowest rank that has failed by now."""
        codes = [process.returncode for process in self._processes]
        return next((rank for rank, code in enumerate(codes) if code not in (None, 0)), None)

    @staticmethod
    def wait_a_little(running: Sequence["subprocess.Popen[bytes]"]) -> None:
        try:
            running[0].wait(_LOOK_EVERY_S)
        except subprocess.TimeoutExpired:
            return

    def ask_to_end(self, grace_s: float) -> None:
        """SIGTERM, and some time to save in."""
        for process in self.running():
            _signal_group(process, signal.SIGTERM)
        until = time.monotonic() + grace_s
        while (running := self.running()) and time.monotonic() < until:
            self.wait_a_little(running)

    def reap(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                # It has left its namespace, or never came to it.
                _signal_group(process, signal.SIGKILL)
            process.wait()
        for pump in self._pumps:
            pump.join()

    def results(self) -> Iterable[RankResult]:
        for rank, (process, kept) in enumerate(zip(self._processes, self._kept, strict=True)):
            host = self._wiring.topology.host_of(rank)
            yield RankResult(
                rank, host, int(process.returncode), kept["stdout"].text(), kept["stderr"].text()
            )


def _signal_group(process: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return


@dataclass
class _Kept:
    """The last lines of a stream."""

    lines: list[bytes] = field(default_factory=list)
    size: int = 0
    left_out: int = 0

    def add(self, line: bytes) -> None:
        self.lines.append(line)
        self.size += len(line)
        if self.size > 2 * _KEPT_BYTES:
            first = 0
            while self.size > _KEPT_BYTES:
                self.size -= len(self.lines[first])
                self.left_out += len(self.lines[first])
                first += 1
            del self.lines[:first]

    def text(self) -> str:
        head = f"[{self.left_out:,} bytes left out]\n" if self.left_out else ""
        return head + b"".join(self.lines).decode(errors="replace")
