"""Several processes on this machine, through torchrun's agent.

The launcher has checked the configuration, prepared the corpus and made the run directory by now; every
rank gets that directory and nothing else.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

__all__ = ["launch_ranks"]


def launch_ranks(run_path: Path, num_processes: int) -> int:
    """Start ``num_processes`` ranks on ``run_path`` and wait for them; returns the agent's exit code.

    SIGINT and SIGTERM are passed on to the agent, which asks the ranks to stop and save. The ranks' output
    goes to stderr: stdout belongs to the caller's one JSON document.
    """
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={num_processes}",
        "-m",
        "drivetrain",
        "train",
        str(run_path),
    ]
    environment = dict(os.environ)
    # The agent would set one thread a rank and say so in a warning; the engine chooses by itself.
    environment.setdefault("OMP_NUM_THREADS", "1")
    agent = subprocess.Popen(command, stdout=sys.stderr.fileno(), env=environment, start_new_session=True)

    def pass_on(_number: int, _frame: FrameType | None) -> None:
        agent.send_signal(signal.SIGTERM)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return agent.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
