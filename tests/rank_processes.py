"""Functions on several gloo ranks of this machine, with a time limit and nothing left running.

Ranks come from one forkserver that has imported torch and run nothing: 0.2 s instead of 5 s each.
"""

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

__all__ = ["on_ranks"]

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "drivetrain.engine.parallel.data_parallel"])


def _rank_main(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    port: int,
    results: Any,
    arguments: tuple[Any, ...],
) -> None:
    import torch

    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
    )
    torch.set_num_threads(1)
    try:
        results.put((rank, None, function(*arguments)))
    except BaseException:  # noqa: BLE001 - whatever it was, the test in the parent shows it
        results.put((rank, traceback.format_exc(), None))


def on_ranks(
    function: Callable[..., Any], world_size: int, *arguments: Any, timeout: float = 120
) -> list[Any]:
    """Call ``function(*arguments)`` on each rank; the results by rank.

    ``function`` is a module's top-level function; its result is plain data (numpy, numbers, text).

    Raises:
        AssertionError: with a rank's traceback, or when a rank is silent for ``timeout`` seconds.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = _CONTEXT.Queue()
    processes = [
        _CONTEXT.Process(target=_rank_main, args=(function, rank, world_size, port, results, arguments))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        gathered: dict[int, Any] = {}
        for _ in range(world_size):
            rank, error, value = results.get(timeout=timeout)
            assert error is None, f"rank {rank}:\n{error}"
            gathered[rank] = value
        return [gathered[rank] for rank in range(world_size)]
    finally:
        for process in processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
                process.join()
