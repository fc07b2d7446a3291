"""A thread beside the computation whose own operations of torch take one core."""

import threading

import torch

__all__ = ["OneCoreThread"]


class OneCoreThread(threading.Thread):
    """As ``threading.Thread``.

    Two threads that both spread torch's operations over several cores have two teams of OpenMP's threads, more than
    there are cores. These then sleep after each operation instead of waiting for the next, for as long as the second
    thread lives: one copy of a few megabytes made every small operator of all steps after it slower.

    To be started by the thread that computes. Torch keeps the number of OpenMP's threads by thread, but tells MKL's
    products one number for all: who starts this gives that back.
    """

    _takes_one_core: threading.Event

    def start(self) -> None:
        """Begin; returns when the thread has its core."""
        before = torch.get_num_threads()
        self._takes_one_core = threading.Event()
        super().start()
        self._takes_one_core.wait()
        torch.set_num_threads(before)

    def run(self) -> None:
        """On its own: its number of cores, then what it was made for."""
        torch.get_num_threads()  # a thread's own number is set at its first question, over what was set before
        torch.set_num_threads(1)
        self._takes_one_core.set()
        super().run()
