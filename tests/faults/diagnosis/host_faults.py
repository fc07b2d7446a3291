"""Faults of the host: what a user's own script does between operators, and threads that take cores from each other.

Own code is a script that starts training and hooks into torch, as people do who want to see a figure of each step.
"""

from data_faults import SLOW_DOCUMENTS
from scenario import Scenario

__all__ = ["SCENARIOS"]

_COLLECTS = """
import gc

from torch.optim.optimizer import register_optimizer_step_post_hook


def free_memory(*_):
    gc.collect()


register_optimizer_step_post_hook(free_memory)
"""
_LOGS = """
import logging

from torch.optim.optimizer import register_optimizer_step_post_hook

logging.basicConfig(filename="steps.log", level=logging.INFO)


def log_gradients(optimizer, *_):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            logging.info("gradient %s", parameter.grad.flatten()[:4000].tolist())


register_optimizer_step_post_hook(log_gradients)
"""
_PRINTS = """
import sys

from torch.nn.modules.module import register_module_forward_hook


def show(module, _, output):
    if type(module).__name__.endswith("Norm"):
        print(type(module).__name__, output.detach()[:, :40].tolist(), file=sys.stderr)


register_module_forward_hook(show)
"""
_COUNTS = '''
from torch.optim.optimizer import register_optimizer_step_post_hook

largest = {}


def watch(optimizer, *_):
    """The largest gradient of each parameter, element by element."""
    for group in optimizer.param_groups:
        for number, parameter in enumerate(group["params"]):
            for value in parameter.grad.flatten()[:40_000].tolist():
                if abs(value) > largest.get(number, 0.0):
                    largest[number] = abs(value)


register_optimizer_step_post_hook(watch)
'''
_STACKS = "profiler.with_stack=true"

SCENARIOS = (
    Scenario(
        "host.garbage_collection",
        ("host.garbage_collection",),
        ("host.garbage_collection",),
        "process",
        lambda place: place.job(own_code=_COLLECTS, starts_training=True),
        lambda place: place.job(),
        "a script calls gc.collect() behind each update, to save memory",
    ),
    Scenario(
        "host.logging of gradients",
        ("host.logging",),
        ("host.logging",),
        "process",
        lambda place: place.job(_STACKS, own_code=_LOGS, starts_training=True),
        lambda place: place.job(_STACKS),
        "a script writes a part of all gradients to a log in each step",
    ),
    Scenario(
        "host.logging by print",
        ("host.logging",),
        ("host.logging",),
        "process",
        lambda place: place.job(_STACKS, own_code=_PRINTS, starts_training=True),
        lambda place: place.job(_STACKS),
        "a script prints a part of what each norm returns",
    ),
    Scenario(
        "host.python",
        ("host.python",),
        ("host.python",),
        "process",
        lambda place: place.job(own_code=_COUNTS, starts_training=True),
        lambda place: place.job(),
        "a script looks for the largest gradient with a loop over single elements",
    ),
    Scenario(
        "host.thread_oversubscription",
        ("host.thread_oversubscription",),
        ("host.thread_oversubscription",),
        "process",
        lambda place: place.job("run.num_threads=16"),
        lambda place: place.job("run.num_threads=2"),
        "sixteen compute threads on a machine of a few cores",
    ),
    Scenario(
        "host.garbage_collection + data.slow_transform",
        ("host.garbage_collection", "data.slow_transform"),
        ("host.garbage_collection",),
        "process",
        lambda place: place.job(
            "data.transform=own_code:without_repeats",
            own_code=_COLLECTS + SLOW_DOCUMENTS.replace("26", "14"),
            starts_training=True,
        ),
        lambda place: place.job(),
        "gc.collect() behind each update, and a transform in plain Python",
    ),
    Scenario(
        "host.garbage_collection + host.logging",
        ("host.garbage_collection", "host.logging"),
        ("host.garbage_collection",),
        "process",
        lambda place: place.job(_STACKS, own_code=_COLLECTS + _LOGS, starts_training=True),
        lambda place: place.job(_STACKS),
        "gc.collect() behind each update, and gradients written to a log",
    ),
    Scenario(
        "host.thread_oversubscription + data.slow_transform",
        ("host.thread_oversubscription", "data.slow_transform"),
        ("host.thread_oversubscription",),
        "process",
        lambda place: place.job(
            "run.num_threads=16", "data.transform=own_code:without_repeats", own_code=SLOW_DOCUMENTS
        ),
        lambda place: place.job("run.num_threads=2"),
        "sixteen compute threads on a machine of a few cores, and a transform in plain Python",
    ),
    Scenario(
        "data.slow_transform + host.python",
        ("data.slow_transform", "host.python"),
        ("data.slow_transform",),
        "process",
        lambda place: place.job(
            "data.transform=own_code:without_repeats",
            own_code=_COUNTS.replace("40_000", "20_000") + SLOW_DOCUMENTS,
            starts_training=True,
        ),
        lambda place: place.job(),
        "a transform in plain Python, and a loop over single elements of all gradients",
    ),
)
