"""Faults of shapes: compiled code that meets sizes or values it was not compiled for.

Batches of the engine have one shape, whatever the data: sizes that vary are in a loop of the user's own.
"""

from scenario import Job, Place, Scenario

__all__ = ["SCENARIOS"]

_SCALES = '''
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

schedule = {"stage": "0", "step": 0}


def advance(*_):
    schedule["step"] += 1
    schedule["stage"] = str(schedule["step"] // 5)


def scale(module, inputs):
    """A curriculum of stages, each with a word of its own."""
    if type(module).__name__.endswith("Norm") and schedule["stage"] != "warm-up":
        return (inputs[0] * 1.0, *inputs[1:])


register_optimizer_step_post_hook(advance)
register_module_forward_pre_hook(scale)
'''
_LOOP = """
import json
import time

import torch
from torch.profiler import ProfilerActivity, profile, record_function

STEPS, FIRST, LAST = 80, 30, 42
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(
    torch.nn.Embedding(1024, 256),
    *(
        layer
        for _ in range(4)
        for layer in (torch.nn.LayerNorm(256), torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256))
    ),
    torch.nn.Linear(256, 1024),
)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
forward = COMPILED
seconds, profiler = [], None
for step in range(STEPS):
    if step == FIRST:
        profiler = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
        profiler.start()
    if step == LAST:
        profiler.stop()
        profiler.export_chrome_trace("trace.json")
    started = time.perf_counter()
    with record_function(f"ProfilerStep#{step}"):
        rows, length = SHAPE
        tokens = torch.randint(1024, (rows, length))
        logits = forward(tokens)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if step >= LAST + 1 or MEASURED_BEFORE <= step < FIRST:
        seconds.append(time.perf_counter() - started)
json.dump(seconds, open("steps.json", "w"))
"""


def _loop(place: Place, shape: str, *, compiled: str = "torch.compile(model)", measured: int = 80) -> Job:
    """A loop whose steps count from `measured` on up to the profiled ones, and behind those in any case."""
    source = (
        _LOOP.replace("SHAPE", shape).replace("COMPILED", compiled).replace("MEASURED_BEFORE", str(measured))
    )
    place.folder.mkdir(parents=True, exist_ok=True)
    return Job(folder=place.folder, config="", loop=source)


SCENARIOS = (
    Scenario(
        "shapes.recompilation",
        ("shapes.recompilation",),
        ("shapes.recompilation",),
        "process",
        lambda place: place.job("fusion.compile=true", own_code=_SCALES, starts_training=True),
        lambda place: place.job("fusion.compile=true"),
        "a script's hook in compiled blocks asks for a word that changes every five steps",
    ),
    Scenario(
        "shapes.dynamic",
        ("shapes.dynamic",),
        ("shapes.dynamic",),
        "process",
        lambda place: _loop(
            place, "4, 128 + step % 37", compiled="torch.compile(model, dynamic=False)", measured=3
        ),
        lambda place: _loop(place, "4, 164", compiled="torch.compile(model, dynamic=False)", measured=3),
        "a loop pads each batch to its own longest document and compiles for each length",
    ),
    Scenario(
        "shapes.short_last_batch",
        ("shapes.short_last_batch",),
        ("shapes.short_last_batch",),
        "process",
        lambda place: _loop(place, "(1 if step % 20 == 19 else 4), 128"),
        lambda place: _loop(place, "4, 128"),
        "a loop keeps the short batch at the end of each epoch, so that compiled code takes any number of rows",
    ),
)
