"""Processes that start with torch and the engine imported: 0.2 s instead of the 4 s of CPU time that imports take.

They come from one forkserver for each process of tests, which has imported modules and run nothing: no threads, no
random numbers drawn, no file of a run opened.
"""

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["CONTEXT", "run_drivetrain"]

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "torch",
        "torch.distributed",
        "drivetrain.engine.parallel.data_parallel",
        "drivetrain.engine.worker",
        "drivetrain.engine.creation",
        "drivetrain.engine.preflight",
        "drivetrain.cli.application",
        "drivetrain.cli.train_command",
    ]
)
"""Whose children are forked. One list: a forkserver takes the first that it is given."""


def _as_a_command(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str], outputs: Mapping[int, Path]
) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, path in outputs.items():
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.argv = ["drivetrain", *arguments]
    from drivetrain.cli import main

    main()


def run_drivetrain(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str], *, timeout: float
) -> "subprocess.CompletedProcess[str]":
    """``drivetrain ARGUMENTS`` in ``folder`` to its end, in a process of its own that has its imports done.

    Raises:
        subprocess.TimeoutExpired: it took longer than ``timeout`` seconds, and was killed.
    """
    command = ["drivetrain", *arguments]
    with tempfile.TemporaryDirectory() as place:
        outputs = {1: Path(place) / "stdout", 2: Path(place) / "stderr"}
        process = CONTEXT.Process(target=_as_a_command, args=(arguments, folder, environment, outputs))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(command, timeout)
        out, err = (path.read_text() if path.exists() else "" for path in outputs.values())
    return subprocess.CompletedProcess(command, process.exitcode, out, err)
