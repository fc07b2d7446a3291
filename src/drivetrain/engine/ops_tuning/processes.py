"""Children with a time limit: started, watched, and ended with everything that they started."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from drivetrain.errors import EnvironmentFault

__all__ = ["Answer", "Ask", "Children"]

_NURSERY = "drivetrain.engine.ops_tuning.nursery"
_START_S = 300.0
"""Within which a nursery has to have made its first child: it imports torch and a compiler."""


@dataclass(frozen=True)
class Answer:
    """What became of a child.

    Attributes:
        found: what it answered; None where it did not.
        failure: why, in one line; None where it answered.
        timed_out: whether it was ended because its time was over.
        seconds: how long it ran.
    """

    found: dict[str, Any] | None
    failure: str | None
    timed_out: bool
    seconds: float


class Ask(Protocol):
    """Who answers requests."""

    def __call__(self, request: Mapping[str, Any], *, limit_s: float) -> Answer:
        """Answer ``request`` within ``limit_s`` seconds."""


class Children:
    """Children of one nursery, one at a time.

    Args:
        folder: for what compilers keep, and for answers. What a compiler finds in a cache that others filled may be
            another choice than it would make, so this one is the tuner's alone.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._nursery: subprocess.Popen[bytes] | None = None
        self._child: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __call__(self, request: Mapping[str, Any], *, limit_s: float) -> Answer:
        """Make a child, hand it the request, and wait for its answer; after ``limit_s`` seconds it is ended.

        Raises:
            EnvironmentFault: no child could be made.
        """
        nursery = self._nursery or self._start()
        with tempfile.TemporaryDirectory(dir=self._folder) as place:
            result, errors = Path(place) / "result.json", Path(place) / "stderr"
            order = {"request": dict(request), "result": str(result), "stderr": str(errors)}
            assert nursery.stdin is not None
            # Where it has gone, its silence is what is reported.
            with contextlib.suppress(BrokenPipeError):
                nursery.stdin.write(json.dumps(order).encode() + b"\n")
                nursery.stdin.flush()
            began = _line(nursery, _START_S)
            if began is None:
                raise self._lost()
            start = time.monotonic()
            self._child = began["pid"]
            ended = _line(nursery, limit_s)
            timed_out = ended is None and nursery.poll() is None
            self._end_child()
            if timed_out:
                ended = _line(nursery, _START_S)
            if ended is None:
                raise self._lost()
            taken = time.monotonic() - start
            if timed_out:
                return Answer(None, f"it took more than {limit_s:.0f} s", True, taken)
            if ended["status"] != 0 or not result.exists():
                return Answer(None, _why(ended["status"], errors), False, taken)
            return Answer(json.loads(result.read_bytes()), None, False, taken)

    def close(self) -> None:
        """End the nursery and its child. Safe to call twice."""
        self._end_child()
        nursery, self._nursery = self._nursery, None
        if nursery is not None:
            nursery.kill()
            nursery.communicate()

    def _start(self) -> "subprocess.Popen[bytes]":
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(self._folder / "inductor"),
            "TRITON_CACHE_DIR": str(self._folder / "triton"),
        }
        with (self._folder / "nursery").open("wb") as errors:
            self._nursery = subprocess.Popen(
                [sys.executable, "-m", _NURSERY],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                # A terminal's Ctrl-C reaches the tuner alone, which ends its child itself.
                start_new_session=True,
                bufsize=0,
            )
        return self._nursery

    def _end_child(self) -> None:
        """End the whole session of the child, whether it has ended itself or not."""
        child, self._child = self._child, None
        if child is not None:
            # Where it, and whoever it started, has gone already, there is nothing to end.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)

    def _lost(self) -> EnvironmentFault:
        self.close()
        said = (self._folder / "nursery").read_text("utf-8", "replace").strip().splitlines()
        return EnvironmentFault(
            f"the process that tries backends could not be started, or has gone: {(said or ['no message'])[-1][:300]}"
        )


def _line(nursery: "subprocess.Popen[bytes]", limit_s: float) -> dict[str, int] | None:
    """The next line of a nursery; None where none came in time, or none will."""
    assert nursery.stdout is not None
    ready, _, _ = select.select([nursery.stdout], [], [], limit_s)
    # A line is written at once and is shorter than what a pipe takes in one piece.
    line = nursery.stdout.readline() if ready else b""
    if not line.endswith(b"\n"):
        return None
    found: dict[str, int] = json.loads(line)
    return found


def _why(code: int, errors: Path) -> str:
    text = errors.read_text("utf-8", "replace") if errors.exists() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if code < 0:
        return f"it was ended by {signal.Signals(-code).name}"
    # The last line is often advice; the exception's own says what failed.
    named = [line for line in lines if "Error" in line.split(":")[0]]
    return f"it failed: {(named or lines or [f'exit code {code}'])[-1][:300]}"
