"""Worker processes that cannot build batches as fast as they are trained on, where more of them could.

While a step trains for `c` seconds (its time without waiting), one process builds `c` seconds' worth: building a step's
batches in `b` seconds takes ``b / c`` processes, rounded up.
"""

import math
from collections.abc import Iterator

from drivetrain.diagnose.facts import Facts
from drivetrain.diagnose.finding import Evidence, Finding
from drivetrain.diagnose.loss import loss
from drivetrain.diagnose.remedies import setting_remedy
from drivetrain.diagnose.rule import Rule

__all__ = ["RULE"]

_OWN_CODE = 0.5
"""Share of building from which a transform is the cause, and not the number of processes, where there are none yet."""


def _detect(facts: Facts) -> Iterator[Finding]:
    waiting = facts.mean.classes.get("data.loader", 0.0)
    assert facts.config is not None
    assert facts.figures is not None
    means = facts.figures.means
    # Each process has workers of its own, and all that run on the machine share its cores.
    cores = (
        None if facts.figures.cores is None else facts.figures.cores // (facts.figures.local_processes or 1)
    )
    needed_keys = ("time/step_s", "time/data_wait_s", "data/build_s", "data/transform_s")
    if not waiting or any(key not in means for key in needed_keys):
        return
    step, wait, build, transform = (means[key] for key in needed_keys)
    trained, workers = step - wait, facts.config.data.num_workers
    if trained <= 0 or not build:
        return
    needed = max(1, math.ceil(build / trained))
    if needed <= workers or (cores is not None and needed > cores):
        return  # Enough of them; or no number would do, and what they do is the cause.
    if not workers and transform >= _OWN_CODE * build:
        return
    present = f"{workers} worker processes" if workers else "no worker process"
    yield loss(
        facts,
        "too_few_workers",
        "data.too_few_workers",
        "data.num_workers",
        waiting,
        confidence="medium",
        evidence=(
            Evidence(
                f"{present}; building a step's batches takes {1e3 * build:.3g} ms, and a step without waiting "
                f"{1e3 * trained:.3g} ms: {needed} would do",
                f"{facts.figures.steady_steps} steady steps",
                {"build_s": build, "step_without_wait_s": trained, "workers": workers, "needed": needed},
            ),
        ),
        remedies=(
            setting_remedy(
                facts,
                {"data.num_workers": needed},
                waiting,
                saved_ns=waiting,
                rule="build_s / (step_s - data_wait_s) processes, rounded up, that take no core from computation",
                memory_bytes=0,
            ),
        ),
        part_of="data.loader",
    )


RULE = Rule("too_few_workers", ("data.too_few_workers",), ("configuration", "logged steps"), _detect)
