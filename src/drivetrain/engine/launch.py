"""Several processes on this machine, through torchrun's agent.

The launcher has checked the configuration, prepared the corpus and made the run directory by now; every
rank gets that directory and nothing else.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

__all__ = ["AGENT_VARIABLE", "Launch", "launch_module", "launch_ranks", "started_by_launcher"]

AGENT_VARIABLE = "DRIVETRAIN_LAUNCHED"
"""Set for ranks that our own launcher waits for: what it reports, they need not say as well."""


def started_by_launcher() -> bool:
    """Whether this rank has our launcher, not only torchrun, above it."""
    return AGENT_VARIABLE in os.environ


@dataclass(frozen=True)
class Launch:
    """How the processes ended.

    Attributes:
        exit_code: of the agent.
        signal_name: the first signal that asked the launcher to stop; None where none did.
        failed_rank, failure: the rank that failed first, and how, in words; None where none did.
    """

    exit_code: int
    signal_name: str | None
    failed_rank: int | None = None
    failure: str | None = None

    @property
    def is_worth_another_try(self) -> bool:
        """Whether the ranks ended by what need not happen again: a rank was killed, crashed or hung.

        Bad input (exit code 2) and a run that was asked to stop end the same way every time.
        """
        return self.signal_name is None and self.exit_code not in (0, 2, 130)


def launch_ranks(run_path: Path, num_processes: int) -> Launch:
    """Start ``num_processes`` ranks on ``run_path`` and wait for them. Their output goes to stderr: stdout belongs to
    the caller's one JSON document."""
    return launch_module(["train", str(run_path)], num_processes)


def launch_module(arguments: Sequence[str], num_processes: int, *, keeps_stdout: bool = False) -> Launch:
    """Start ``num_processes`` ranks of ``drivetrain ARGUMENTS`` and wait for them.

    SIGINT and SIGTERM are passed on to the agent, which asks the ranks to stop and save. A second SIGINT
    does not wait: the ranks are killed.

    Args:
        keeps_stdout: what ranks print on stdout goes there, and not to stderr.
    """
    read, write = os.pipe()
    command = [
        sys.executable,
        "-m",
        "drivetrain.engine.agent",
        str(os.getpid()),
        str(write),
        "--standalone",
        f"--nproc-per-node={num_processes}",
        "-m",
        "drivetrain",
        *arguments,
    ]
    environment = {**os.environ, AGENT_VARIABLE: "1"}
    # The agent would set one thread a rank and say so in a warning; the engine chooses by itself.
    environment.setdefault("OMP_NUM_THREADS", "1")
    asked: list[str] = []
    interrupts = 0
    agent: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, _frame: FrameType | None) -> None:
        nonlocal interrupts
        asked.append(signal.Signals(number).name)
        interrupts += number == signal.SIGINT
        if agent is None:
            return
        if interrupts > 1:
            agent.kill()
        elif len(asked) == 1:
            agent.send_signal(signal.SIGTERM)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        agent = subprocess.Popen(
            command,
            stdout=None if keeps_stdout else sys.stderr.fileno(),
            env=environment,
            start_new_session=True,
            pass_fds=(write,),
        )
        os.close(write)
        write = -1
        if asked:
            agent.send_signal(signal.SIGTERM)
        exit_code = agent.wait()
        told = _told(read)
        return Launch(exit_code, asked[0] if asked else None, told.get("rank"), told.get("text"))
    finally:
        os.close(read)
        if write >= 0:
            os.close(write)
        for number, handler in before.items():
            signal.signal(number, handler)


def _told(descriptor: int) -> dict[str, Any]:
    """What the agent wrote before it ended; nothing where it was killed or had nothing to tell."""
    os.set_blocking(descriptor, False)
    try:
        text = os.read(descriptor, 65536)
    except BlockingIOError:
        # A process that the agent has left behind still holds the other end.
        return {}
    if not text:
        return {}
    document: dict[str, Any] = json.loads(text)
    return document
