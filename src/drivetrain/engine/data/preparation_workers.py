"""Blocks encoded by several processes, and handed back in their order.

Each process has a pipe of its own, whose other end is here alone: where one is killed in the middle of an answer, its
pipe ends. The standard library's pools share one pipe, and wait for the rest of such an answer for ever.
"""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from drivetrain.engine.data.encoding import Encoded, Encoder
from drivetrain.engine.data.sources.source import Block, Content, Rows
from drivetrain.errors import EnvironmentFault

__all__ = ["available_cores", "encoded_in_order"]

AHEAD = 3
"""Blocks for each process that are waiting, being encoded, or encoded before their turn."""
NOTHING = Rows(())
_GRACE_S = 5.0
"""Within which a process that was told to end has to."""


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def encoded_in_order(
    encoder: Encoder, blocks: Iterator[Block], workers: int
) -> Generator[tuple[Block, Encoded]]:
    """Each block, without its content, with what it was encoded to: the same whatever ``workers`` is.

    Args:
        encoder: encodes them.
        blocks: read here, as far ahead as the processes need.
        workers: processes; 1: this one, where the tokenizer uses threads.
    Raises:
        DataError: see ``Encoder.encode``; that of the first block that has one.
        EnvironmentFault: a process was killed.
    """
    if workers <= 1:
        for block in blocks:
            yield block, encoder.encode(block.content)
        return
    started: list[_Worker] = []
    try:
        for _ in range(workers):
            started.append(_start(encoder))
        yield from _in_order(started, blocks)
        for worker in started:
            worker.end()
    except (EOFError, OSError) as error:
        if isinstance(error, OSError) and not isinstance(error, ConnectionError):
            # Of the file that is read, not of a pipe.
            raise
        raise EnvironmentFault(
            "a process that encodes was killed, for example for want of memory; what was encoded is kept, and the "
            "same command goes on from there: with fewer processes (--workers), if memory is short"
        ) from error
    finally:
        for worker in started:
            worker.stop()


@dataclass
class _Task:
    """A block, and what became of it."""

    block: Block
    content: Content
    answer: Encoded | Exception | None = None


@dataclass
class _Worker:
    """A process, and this side of its pipe. It has one task at a time, so that neither side waits to be read."""

    process: BaseProcess
    pipe: Connection
    task: _Task | None = field(default=None)

    def give(self, task: _Task) -> None:
        self.task = task
        self.pipe.send(task.content)
        task.content = NOTHING

    def take(self) -> None:
        """Receive the answer to the task. Raises EOFError or ConnectionError where the process has gone."""
        assert self.task is not None
        task, self.task = self.task, None
        task.answer = self.pipe.recv()

    def end(self) -> None:
        """Have the process end by itself."""
        self.pipe.close()
        self.process.join(_GRACE_S)

    def stop(self) -> None:
        """End it, whatever it does. Safe to call twice."""
        self.pipe.close()
        if self.process.is_alive():
            self.process.terminate()
            self.process.join(_GRACE_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _in_order(workers: Sequence[_Worker], blocks: Iterator[Block]) -> Generator[tuple[Block, Encoded]]:
    tasks: deque[_Task] = deque()
    unassigned: deque[_Task] = deque()
    more = True
    while more or tasks:
        if more and len(tasks) < AHEAD * len(workers):
            block = next(blocks, None)
            more = block is not None
            if block is not None:
                task = _Task(replace(block, content=NOTHING), block.content)
                tasks.append(task)
                unassigned.append(task)
        for worker in workers:
            if worker.task is None and unassigned:
                worker.give(unassigned.popleft())
        # Nothing can be read ahead any more: wait for somebody.
        idle = not more or len(tasks) >= AHEAD * len(workers)
        pending = idle and bool(tasks) and tasks[0].answer is None
        by_pipe = {worker.pipe: worker for worker in workers if worker.task is not None}
        for pipe in wait(list(by_pipe), None if pending else 0.0) if by_pipe else ():
            assert isinstance(pipe, Connection)
            by_pipe[pipe].take()
        while tasks and tasks[0].answer is not None:
            first = tasks.popleft()
            if isinstance(first.answer, Exception):
                raise first.answer
            assert first.answer is not None
            yield first.block, first.answer


def _start(encoder: Encoder) -> _Worker:
    # A fork would copy the tokenizer's threads in an unknown state. A forkserver belongs to whoever started it first.
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_encode_all, args=(encoder, there), daemon=True)
    process.start()
    # Only the process keeps it: its end is this pipe's.
    there.close()
    return _Worker(process, here)


def _encode_all(encoder: Encoder, pipe: Connection) -> None:
    """What a process does: answers until its pipe ends."""
    # The terminal's Ctrl-C reaches every process of the group; the one that prepares ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Every core has a process already.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(EOFError, ConnectionError):
        while True:
            content = pipe.recv()
            try:
                answer: Encoded | Exception = encoder.encode(content)
            except Exception as error:  # noqa: BLE001 - raised again by who asked, when its turn comes
                answer = error
            pipe.send(answer)


def _end_with_parent() -> None:
    """End this process when the one that prepares has gone, however it went: nobody else would tell."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
