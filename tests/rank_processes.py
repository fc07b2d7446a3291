"""Functions on several gloo ranks of this machine, with a time limit and nothing left running.

:func:`on_ranks` has processes of its own for each call. :func:`on_kept_ranks` calls in processes that are kept for the
next call, in a tenth of the time: for what leaves its process as it found it.
"""

import gc
import itertools
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import connection
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from forkserver import CONTEXT

__all__ = ["on_kept_ranks", "on_ranks"]


class _Ranks:
    """Processes that call what they are sent, until they are sent nothing more or whoever sends has gone."""

    def __init__(self) -> None:
        self._ends: list[Any] = []
        self._processes: list[Any] = []

    def call(
        self, function: Callable[..., Any], world_size: int, arguments: tuple[Any, ...], timeout: float
    ) -> list[Any]:
        """The results by rank. Raises AssertionError; no process is left then."""
        while len(self._processes) < world_size:
            here, there = CONTEXT.Pipe()
            process = CONTEXT.Process(target=_rank_main, args=(len(self._processes), there))
            process.start()
            there.close()
            self._ends.append(here)
            self._processes.append(process)
        port, until = free_port(), time.monotonic() + timeout
        try:
            for end in self._ends[:world_size]:
                end.send((world_size, port, function, arguments))
            waiting = dict(zip(self._ends[:world_size], range(world_size), strict=True))
            results: dict[int, Any] = {}
            while waiting:
                ready = connection.wait(list(waiting), max(0.0, until - time.monotonic()))
                assert ready, f"after {timeout:g} s there is no answer of ranks {sorted(waiting.values())}"
                for end in ready:
                    rank = waiting.pop(end)  # type: ignore[call-overload]
                    try:
                        error, results[rank] = end.recv()  # type: ignore[union-attr]
                    except EOFError:
                        error = "its process has ended"
                    assert error is None, f"rank {rank}:\n{error}"
        except BaseException:
            self.end(kill=True)
            raise
        return [results[rank] for rank in range(world_size)]

    def end(self, *, kill: bool = False) -> None:
        """End all processes."""
        for end in self._ends:
            end.close()
        for process in self._processes:
            if not kill:
                process.join(timeout=10)
            if process.is_alive():
                process.kill()
                process.join()
        self._ends, self._processes = [], []


_KEPT = _Ranks()
Finalize(None, _KEPT.end, exitpriority=10)  # before multiprocessing waits for its children


def on_kept_ranks(
    function: Callable[..., Any], world_size: int, *arguments: Any, timeout: float = 300
) -> list[Any]:
    """As :func:`on_ranks`, in processes that stay for the next call.

    Between two calls random numbers begin anew and environment variables are as they were. ``function`` must leave no
    other trace: no process group, no patch, no compiled code. After an error the processes are new ones.
    """
    return _KEPT.call(function, world_size, arguments, timeout)


def on_ranks(
    function: Callable[..., Any], world_size: int, *arguments: Any, timeout: float = 300
) -> list[Any]:
    """Call ``function(*arguments)`` on each rank; the results by rank.

    ``function`` is a module's top-level function; its result is plain data (numpy, numbers, text).

    Raises:
        AssertionError: with a rank's traceback, or when a rank is silent for ``timeout`` seconds.
    """
    ranks = _Ranks()
    try:
        return ranks.call(function, world_size, arguments, timeout)
    finally:
        ranks.end()


def free_port() -> int:
    """A port that nothing listens on now, and that the system gives to nobody who asks for any.

    One of those that it does give away could go to the next connection of whoever else tests here, before the ranks
    have opened it.
    """
    for port in itertools.islice(_PORTS, _PORTS_EACH):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise AssertionError("no port is free")


def _ports() -> Iterator[int]:
    """Each worker of the tests has some of its own; where the system gives those away as well, 0: any port."""
    try:
        given = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii")
    except OSError:
        given = "0 0"
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _WORKERS
    own = range(_FIRST_PORT + worker * _PORTS_EACH, _FIRST_PORT + (worker + 1) * _PORTS_EACH)
    if int(given.split()[0]) < own.stop:
        return itertools.repeat(0)
    # Two that test on one machine are not to begin with the same.
    return itertools.islice(itertools.cycle(own), os.getpid() % _PORTS_EACH, None)


_FIRST_PORT, _PORTS_EACH, _WORKERS = 11_000, 1_000, 16
_PORTS = _ports()


def _rank_main(rank: int, end: Any) -> None:
    import torch
    import torch.distributed as dist

    gc.freeze()
    environment, seed = dict(os.environ), torch.initial_seed()
    while True:
        try:
            world_size, port, function, arguments = end.recv()
        except EOFError:
            return
        os.environ.clear()
        os.environ.update(
            environment,
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world_size),
            LOCAL_WORLD_SIZE=str(world_size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            GLOO_SOCKET_IFNAME="lo",
        )
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        torch.use_deterministic_algorithms(False)
        try:
            result = None, function(*arguments)
            assert not dist.is_initialized(), "a process group was left behind"
        except BaseException:  # noqa: BLE001 - whatever it was, the test in the parent shows it
            result = traceback.format_exc(), None
        end.send(result)
        gc.collect()
