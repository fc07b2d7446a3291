"""Torch's ``Work`` with something around its waits; all else is that of the work inside."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

__all__ = ["WrappedWork"]


class WrappedWork(dist.Work):
    """``work``, whose waits happen inside of ``around()``."""

    def __init__(self, work: dist.Work, around: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__()
        self._work = work
        self._around = around

    def wait(self, timeout: timedelta | None = None) -> bool:
        with self._around():
            return self._work.wait() if timeout is None else self._work.wait(timeout)

    def synchronize(self) -> None:
        with self._around():
            self._work.synchronize()

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def is_success(self) -> bool:
        return self._work.is_success()

    def exception(self) -> Any:
        return self._work.exception()

    def result(self) -> list[Tensor]:
        return self._work.result()

    def get_future(self) -> Any:
        return self._work.get_future()
