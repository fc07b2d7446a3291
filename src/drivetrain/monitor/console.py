"""What a person at the terminal sees: a live progress line, and Megatron's log line besides.

Everything goes to stderr, so that stdout stays free for ``--json``.
"""

import sys
from datetime import datetime
from types import TracebackType
from typing import TextIO

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from drivetrain.monitor.step_info import StepInfo

__all__ = ["Console", "megatron_line"]

_NO_LOSS_SCALE = 1.0
_LINES_ON_A_TERMINAL_EVERY = 10


def megatron_line(info: StepInfo, now: datetime | None = None) -> str:
    """The step in Megatron's log format, which many parsers read. Unknown values are left out."""
    metrics = info.metrics
    moment = (now or datetime.now()).strftime("%Y-%m-%d %H:%M:%S")
    parts = [
        f"[{moment}] iteration {info.step:8d}/{info.total_steps:8d}",
        f"consumed samples: {info.samples:12d}",
    ]

    def add(label: str, key: str, form: str, scale: float = 1.0) -> None:
        value = metrics.get(key)
        if value is not None:
            parts.append(f"{label}: {format(value * scale, form)}")

    add("elapsed time per iteration (ms)", "time/step_s", ".1f", 1e3)
    add("throughput per GPU (TFLOP/s/GPU)", "throughput/device/flops_per_sec", ".3f", 1e-12)
    add("learning rate", "optim/lr", ".6E")
    parts.append(f"global batch size: {info.global_batch_size:5d}")
    add("lm loss", "train/loss", ".6E")
    parts.append(f"loss scale: {metrics.get('optim/loss_scale') or _NO_LOSS_SCALE:.1f}")
    add("grad norm", "train/grad_norm", ".3f")
    return " " + " | ".join(parts) + " |"


class Console:
    """Shows steps on a stream. On a terminal a live line stays at the bottom; elsewhere only log lines."""

    def __init__(self, total_steps: int, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._total = total_steps
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._deaf = False

    def __enter__(self) -> "Console":
        if self._stream.isatty():
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[figures]}"),
                console=RichConsole(file=self._stream),
                transient=True,
            )
            self._progress.start()
            self._task = self._progress.add_task("train", total=self._total, figures="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def step(self, info: StepInfo) -> None:
        """Show one logged step."""
        if self._progress is None or self._task is None:
            self._print(megatron_line(info))
            return
        self._progress.update(self._task, completed=info.step, figures=_figures(info))
        # A terminal that scrolls at every step hides the live line's point; metrics.jsonl has every step.
        if info.step % _LINES_ON_A_TERMINAL_EVERY == 0 or info.step == info.total_steps:
            self._progress.console.print(megatron_line(info), markup=False, highlight=False, soft_wrap=True)

    def say(self, text: str) -> None:
        """Show one line of text."""
        if self._progress is not None:
            self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            self._print(text)

    def _print(self, line: str) -> None:
        if self._deaf:
            return
        try:
            print(line, file=self._stream, flush=True)
        except OSError:
            # Whoever read it has gone (`2>&1 | head`), or the disk of the log is full. A run must not die of
            # that: everything is in the run directory as well.
            self._deaf = True


def _figures(info: StepInfo) -> str:
    metrics = info.metrics
    loss = metrics.get("train/loss")
    rate = metrics.get("throughput/tokens_per_sec")
    mfu = metrics.get("throughput/device/mfu")
    parts = []
    if loss is not None:
        parts.append(f"loss {loss:.3f}")
    if rate is not None:
        parts.append(f"{rate:,.0f} tok/s")
    if mfu is not None:
        parts.append(f"MFU {100 * mfu:.1f}%")
    return "  ".join(parts)
