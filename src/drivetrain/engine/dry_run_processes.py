"""A process for each rank of a dry run: a few at once, each with a limit of time, and none left behind.

They come from one forkserver that has imported torch and run nothing: a tenth of a second instead of five. What they
are told and what they answer is JSON.
"""

import json
import multiprocessing
import os
import select
import signal
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from drivetrain.config import RunConfig
from drivetrain.engine.dry_run_fake import Counted, count_rank
from drivetrain.engine.dry_run_formulas import Amount
from drivetrain.engine.parallel.traffic import Count
from drivetrain.engine.parent import end_with_parent
from drivetrain.errors import DrivetrainError

__all__ = ["Failure", "RankTask", "answers_of_processes", "count_in_processes"]


@dataclass(frozen=True)
class RankTask:
    """A rank to be built and, ``with_step``, to run a step."""

    rank: int
    with_step: bool


Work = Callable[[RunConfig, int, RankTask], object]
"""What the process of a rank does, given the number of processes: its answer, which JSON can hold. A module's top-level
function, or a partial of one."""


@dataclass(frozen=True)
class Failure:
    """Why there is no answer of a rank.

    Attributes:
        error: in one line.
        traceback: where it happened, if that is not the user's to mend.
    """

    error: str
    traceback: str | None = None


@dataclass(frozen=True)
class _Running:
    task: RankTask
    process: BaseProcess
    deadline: float


def count_in_processes(
    config: RunConfig,
    world_size: int,
    tasks: Sequence[RankTask],
    *,
    at_once: int,
    time_limit_s: float,
    progress: Callable[[int], None],
    work: Callable[[RunConfig, int, RankTask], Counted] | None = None,
) -> Mapping[int, Counted | Failure]:
    """What was counted of each task, by rank.

    Args:
        at_once, time_limit_s, progress: as of :func:`answers_of_processes`.
        work: what a process does, a module's top-level function; counting unless a test wants something else.
    """
    answers = answers_of_processes(
        config,
        world_size,
        tasks,
        partial(_plain_count, work or _count),
        at_once=at_once,
        time_limit_s=time_limit_s,
        progress=progress,
    )
    return {rank: one if isinstance(one, Failure) else _counted(one) for rank, one in answers.items()}


def answers_of_processes(
    config: RunConfig,
    world_size: int,
    tasks: Sequence[RankTask],
    work: Work,
    *,
    at_once: int,
    time_limit_s: float,
    progress: Callable[[int], None],
) -> Mapping[int, dict[str, Any] | Failure]:
    """What became of each task, by rank.

    Args:
        at_once: processes that run side by side.
        time_limit_s: seconds after which a process is ended.
        progress: called with the number of tasks that are done, each time that it changes.
    """
    # A server that runs already, started by somebody else, serves as well: it only imports more for each.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    text = config.model_dump_json(exclude_unset=True)
    waiting = list(tasks)
    running: dict[Connection, _Running] = {}
    answers: dict[int, dict[str, Any] | Failure] = {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                task = waiting.pop(0)
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(
                    target=_main, args=(sender, text, world_size, task.rank, task.with_step, work)
                )
                process.start()
                sender.close()
                running[receiver] = _Running(task, process, time.monotonic() + time_limit_s)
            earliest = min(one.deadline for one in running.values())
            ready = wait(list(running), timeout=max(0.0, earliest - time.monotonic()))
            for receiver in [receiver for receiver in running if receiver in ready]:
                one = running.pop(receiver)
                answers[one.task.rank] = _answer(receiver, one.process)
                progress(len(answers))
            overdue = [receiver for receiver, one in running.items() if one.deadline <= time.monotonic()]
            for receiver in overdue:
                one = running.pop(receiver)
                _end(one.process)
                receiver.close()
                answers[one.task.rank] = Failure(f"it took longer than {time_limit_s:g} s and was ended")
                progress(len(answers))
    finally:
        for one in running.values():
            _end(one.process)
    return answers


def _end(process: BaseProcess) -> None:
    process.kill()
    process.join()


def _answer(receiver: Connection, process: BaseProcess) -> dict[str, Any] | Failure:
    try:
        found: dict[str, Any] = json.loads(receiver.recv_bytes())
    except (EOFError, OSError):  # before its answer, or in the middle of it
        process.join()
        return Failure(_ended(process.exitcode or 0))
    finally:
        receiver.close()
    process.join()
    if "error" in found:
        return Failure(found["error"], found["traceback"])
    return found


def _ended(exit_code: int) -> str:
    if exit_code >= 0:
        return f"its process ended with exit code {exit_code} and without a word"
    name = signal.Signals(-exit_code).name
    hint = "; the system does that when memory runs out" if name == "SIGKILL" else ""
    return f"its process was ended by {name}{hint}"


def _main(
    sender: Connection,
    config: str,
    world_size: int,
    rank: int,
    with_step: bool,
    work: Work,
) -> None:
    """In the process of a rank."""
    # A Ctrl-C is the command's, which then ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(os.getppid(), signal.SIGKILL)
    threading.Thread(target=_end_unheard, args=(sender.fileno(),), daemon=True).start()
    torch.set_num_threads(1)
    task = RankTask(rank, with_step)
    try:
        loaded = RunConfig.model_validate_json(config)
        answer = work(loaded, world_size, task)
    except DrivetrainError as error:
        answer = {"error": str(error), "traceback": None}
    except Exception as error:  # noqa: BLE001 - whatever it was, the command shows it
        text = f"{type(error).__name__}: {error}".partition("\n")[0]
        answer = {"error": text, "traceback": traceback.format_exc()}
    sender.send_bytes(json.dumps(answer).encode())


def _end_unheard(answers_to: int) -> None:
    """End this process when nobody is left who would read its answer.

    Its parent is the server, which lives as long as any of its children and does not end them with the command. Nor
    does the command know of a process that was still being started when it was interrupted.
    """
    poll = select.poll()
    poll.register(answers_to, 0)  # errors alone: that the other end is closed
    poll.poll()
    os._exit(1)


def _count(config: RunConfig, world_size: int, task: RankTask) -> Counted:
    return count_rank(config, world_size, task.rank, with_step=task.with_step)


def _plain_count(
    count: Callable[[RunConfig, int, RankTask], Counted], config: RunConfig, world_size: int, task: RankTask
) -> dict[str, object]:
    return _plain(count(config, world_size, task))


def _plain(counted: Counted) -> dict[str, object]:
    document = asdict(counted)
    if counted.traffic is not None:
        document["traffic"] = [
            [*key, count.calls, count.bytes] for key, count in counted.traffic.items() if count is not None
        ]
    return document


def _counted(document: dict[str, object]) -> Counted:
    def amount(name: str) -> Amount:
        return Amount(**document[name])  # type: ignore[arg-type]

    traffic, parts = document["traffic"], document["parts"]
    assert isinstance(parts, list)
    return Counted(
        parameters=amount("parameters"),
        gradients=amount("gradients") if document["gradients"] is not None else None,
        moments=amount("moments"),
        traffic={(group, kind): Count(calls, number) for group, kind, calls, number in traffic}
        if isinstance(traffic, list)
        else None,
        parts=tuple(
            (name, tuple(shape), tuple((first, last) for first, last in ranges))
            for name, shape, ranges in parts
        ),
    )
