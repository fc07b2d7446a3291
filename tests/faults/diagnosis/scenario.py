"""A fault that a user makes, the same job without it, and whether the diagnosis says what the difference is.

A scenario has two jobs: one with the fault and its twin without. Both are really trained, by ``drivetrain train`` in
processes of their own. The true cost of the fault is the difference of their steps without the profiler; the diagnosis
is of the faulty job's profiled steps, and nobody tells it what was planted.

Each module ``*_faults`` beside this one has ``SCENARIOS``; :func:`all_scenarios` collects them.

Causes that cannot be made on a CPU, and so have no scenario:

* ``host.launch_bound``, ``host.synchronisation_point``, ``kernels.unfused_operators``, ``kernels.bad_shapes``,
  ``kernels.wrong_precision``, ``memory.fragmentation``, ``memory.copies``: their rules need records of a device. On a
  CPU an operator is its own launch, and waits for nobody.
* ``environment.max_connections``: CUDA reads that variable, and nothing else does.
"""

import importlib
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal
from unittest import mock

from planted_jobs import STEPS_FILE, TIME_LIMIT_S, TRACE_FILE, Job, Wire, run

from drivetrain.archive.reader import open_run
from drivetrain.diagnose.diagnosis import EXPLAINS
from drivetrain.measure.statistics import mean_with_interval

__all__ = [
    "LEAST_SHARE",
    "MODULES",
    "WITHIN",
    "Job",
    "Judgement",
    "Place",
    "Scenario",
    "Wire",
    "all_scenarios",
    "diagnosed",
    "judge",
    "losses",
    "mean_step_s",
    "plain_steps_s",
    "run",
    "unfounded",
]

MODULES = (
    "data_faults",
    "host_faults",
    "kernel_faults",
    "shape_faults",
    "communication_faults",
    "pipeline_faults",
    "memory_faults",
    "maintenance_faults",
)
LEAST_SHARE = 0.1
"""Share of the faulty step that a scenario's fault costs at least."""
WITHIN = 0.2
"""Share of the true cost by which the found one may differ from it."""

_BASE = """
[model]
num_layers = 2
hidden_size = 256
num_attention_heads = 4
seq_length = 256
vocab_size = 1024

[training]
micro_batch_size = 2
global_batch_size = 2

[precision]
params_dtype = "fp32"

[run]
device = "cpu"
num_threads = 1
"""


@dataclass(frozen=True)
class Place:
    """A folder in which corpora are prepared once, and jobs run."""

    folder: Path

    def job(self, *overrides: str, config: str | None = None, **others: Any) -> Job:
        """A job here, of the small model that costs some tens of milliseconds a step, unless ``config`` is given.

        Args:
            overrides: of its configuration.
            config: a preset or a file instead.
            others: further fields of :class:`Job`.
        """
        if config is None:
            path = self.folder / "base.toml"
            self.folder.mkdir(parents=True, exist_ok=True)
            path.write_text(_BASE, encoding="utf-8")
            config = str(path)
        data = (f"data.data_path={self.corpus()}",)
        return Job(folder=self.folder, config=config, overrides=(*data, *overrides), **others)

    def corpus(self, words: int = 400, documents: int = 3000) -> Path:
        """Prefix of a corpus of so many documents of so many words each, from the standard library's source."""
        prefix = self.folder / f"documents-{words}-{documents}"
        if not prefix.with_suffix(".idx").exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            texts = prefix.with_suffix(".jsonl")
            with texts.open("w", encoding="utf-8") as file:
                for text in _documents(words, documents):
                    file.write(json.dumps({"text": text}) + "\n")
            prepare = ("-m", "drivetrain", "data", "prepare", str(texts), "--output", str(prefix))
            command = [sys.executable, *prepare, "--vocab-size", "1024"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=TIME_LIMIT_S)
        return prefix


def _documents(words: int, documents: int) -> list[str]:
    """Pieces of real text, each beginning elsewhere, so that no two are alike."""
    library = Path(os.__file__).parent
    every = [word for path in sorted(library.glob("*.py")) for word in path.read_text("utf-8").split()]
    starts = [(number * 9973) % (len(every) - words) for number in range(documents)]
    return [" ".join(every[start : start + words]) for start in starts]


@dataclass(frozen=True)
class Scenario:
    """One fault, or two in one job.

    Attributes:
        name: of what is planted: ``data.slow_transform``, ``data.slow_transform + host.garbage_collection``.
        causes: identifiers of ``diagnose.causes``, the costliest first; the first finding names the first of them.
        accepted: identifiers that name the first cause rightly.
        where: one process, ranks over gloo on this machine, or the network lab, which needs root.
        faulty: the job with the fault.
        clean: the same job without it.
        why: how the fault is made, in one sentence.
    """

    name: str
    causes: tuple[str, ...]
    accepted: tuple[str, ...]
    where: Literal["process", "ranks", "lab"]
    faulty: Callable[[Place], Job]
    clean: Callable[[Place], Job]
    why: str


def all_scenarios() -> tuple[Scenario, ...]:
    """Those of every module there is, in order."""
    found: list[Scenario] = []
    for name in MODULES:
        if (Path(__file__).parent / f"{name}.py").exists():
            found += importlib.import_module(name).SCENARIOS
    names = [scenario.name for scenario in found]
    assert len(set(names)) == len(names), "two scenarios have one name"
    return tuple(found)


def plain_steps_s(path: Path) -> list[float]:
    """Seconds of each step that the profiler has left alone, with what stood between it and the step before.

    By the moments at which steps were recorded: a checkpoint or an evaluation lies between two of them, and in no
    step's own time. Warm-up, the steps of the profiler and what follows it are left out, and the last one, whose
    line is written at once and not in the step after it.
    """
    if (path / STEPS_FILE).exists():
        steps: list[float] = json.loads((path / STEPS_FILE).read_text(encoding="utf-8"))
    else:
        steps = steps_between(list(open_run(path).metrics()))
    assert len(steps) >= _LEAST_STEPS, f"{path} has {len(steps)} steps that can be used"
    return steps


def steps_between(lines: Sequence[Mapping[str, Any]]) -> list[float]:
    """Of :func:`plain_steps_s`, by the lines of ``metrics.jsonl``."""
    last_profiled = max((line["step"] for line in lines if "profile" in line["tags"]), default=0)
    steps = []
    # The line of a step is written in the step after it; the last one's at once, so that its time is no step's.
    for before, line in pairwise(lines[:-1]):
        apart = {"warmup", "profile"} & {*before["tags"], *line["tags"]}
        if apart or last_profiled < line["step"] <= last_profiled + _SETTLING:
            continue
        steps.append((line["time"] - before["time"]) / (line["step"] - before["step"]))
    return steps


_SETTLING = 2
"""Steps after the profiled ones whose times hold what ending the profile takes."""
_LEAST_STEPS = 8


def mean_step_s(path: Path) -> float:
    """The mean of :func:`plain_steps_s`."""
    return statistics.fmean(plain_steps_s(path))


@dataclass(frozen=True)
class Judgement:
    """What was found, and what is true.

    Attributes:
        scenario: its name.
        found: causes of the findings in their order, each loss once (:func:`losses`).
        cost_ms: of a step, by the findings that name the planted causes; None where they know none, or are not there.
        true_ms, low_ms, high_ms: of a step, by removing the fault, with the 95% interval over pairs of runs (the same
            three times where there is one pair).
        faulty_ms, clean_ms: mean steps.
        names_right: the first findings name what was planted, the costliest first.
        cost_right: within :data:`WITHIN` of the truth; None where the cost is not known.
    """

    scenario: str
    found: tuple[str, ...]
    cost_ms: float | None
    true_ms: float
    low_ms: float
    high_ms: float
    faulty_ms: float
    clean_ms: float
    names_right: bool
    cost_right: bool | None

    @property
    def share(self) -> float:
        """Of the faulty step, what the fault takes."""
        return self.true_ms / self.faulty_ms

    @property
    def relevant(self) -> bool:
        """Whether the fault costs enough for the scenario to count."""
        return self.share >= LEAST_SHARE


def diagnosed(path: Path) -> list[Mapping[str, Any]]:
    """The findings of ``drivetrain diagnose RUN --json``."""
    from drivetrain.cli.account_sources import Figures
    from drivetrain.cli.diagnose_sources import facts_of
    from drivetrain.diagnose import diagnose

    # A peak that was measured on this machine would make each product's shortfall a finding, here and nowhere else.
    with mock.patch.dict(os.environ, DRIVETRAIN_CACHE=str(path.parents[1] / "cache")):
        trace = path / TRACE_FILE
        facts = facts_of([str(trace if trace.exists() else path)], figures=Figures(), rules=None, expected=())
        findings: list[Mapping[str, Any]] = diagnose(facts).to_document()["findings"]
    return findings


def losses(findings: Sequence[Mapping[str, Any]], planted: Collection[str] = ()) -> list[Mapping[str, Any]]:
    """Each loss once: a class behind what explains half of it says nothing new, nor does a part behind its class.

    Args:
        planted: causes whose first finding is a loss of its own in any case: groups of classes are wide.
    """
    kept: list[Mapping[str, Any]] = []
    for finding in findings:
        known = {other["cause"] for other in kept}
        own = finding["cause"] in planted and finding["cause"] not in known
        if own or not any(_is_said_by(finding, other) for other in kept):
            kept.append(finding)
    return kept


def _is_said_by(finding: Mapping[str, Any], earlier: Mapping[str, Any]) -> bool:
    place, before = (one["part_of"] or one["subject"] for one in (finding, earlier))
    if finding["part_of"] is not None and f"{place}.".startswith(f"{before}."):
        return True
    explains = (
        earlier["ms_per_step"] is None
        or finding["ms_per_step"] is None
        or earlier["ms_per_step"] >= EXPLAINS * finding["ms_per_step"]
    )
    return earlier["part_of"] is not None and f"{place}.".startswith(f"{before}.") and explains


def judge(
    scenario: Scenario, faulty_run: Path, clean_run: Path, *, more: Sequence[tuple[Path, Path]] = ()
) -> Judgement:
    """Compare the diagnosis of the faulty run with what removing the fault brought.

    Args:
        more: further pairs of a faulty and a clean run, for the true cost.
    """
    pairs = [(mean_step_s(one), mean_step_s(other)) for one, other in ((faulty_run, clean_run), *more)]
    differences = [1e3 * (faulty - clean) for faulty, clean in pairs]
    true = statistics.fmean(differences)
    low, high = mean_with_interval(differences)[1:] if len(pairs) > 1 else (true, true)
    findings = diagnosed(faulty_run)
    found = losses(findings, scenario.causes)
    cost = cost_of(scenario, findings)
    return Judgement(
        scenario=scenario.name,
        found=tuple(finding["cause"] for finding in found),
        cost_ms=cost,
        true_ms=true,
        low_ms=low,
        high_ms=high,
        faulty_ms=1e3 * statistics.fmean(faulty for faulty, _ in pairs),
        clean_ms=1e3 * statistics.fmean(clean for _, clean in pairs),
        names_right=names_are_right(scenario, [finding["cause"] for finding in found]),
        cost_right=None if cost is None else math.isclose(cost, true, rel_tol=0, abs_tol=WITHIN * abs(true)),
    )


def names_are_right(scenario: Scenario, found: Sequence[str]) -> bool:
    """The first finding names the first cause, and those behind it the others, in their order."""
    first, *others = scenario.causes
    return (
        len(found) >= len(scenario.causes)
        and found[0] in {first, *scenario.accepted}
        and list(found[1 : len(scenario.causes)]) == others
    )


def cost_of(scenario: Scenario, findings: Sequence[Mapping[str, Any]]) -> float | None:
    """Milliseconds of a step by the first finding for each planted cause; None where one is not there or not known."""
    total = 0.0
    for number, cause in enumerate(scenario.causes):
        names = {cause, *scenario.accepted} if number == 0 else {cause}
        costs = [finding["ms_per_step"] for finding in findings if finding["cause"] in names]
        if not costs or costs[0] is None:
            return None
        total += costs[0]
    return total


_ORDINARY = ("compute", "host.launch", "host.python", "communication", "recompute", "unclassified")
"""Classes, and groups of classes, of the account that every step has: what they take is work, and claims no fault."""


def unfounded(
    scenario: Scenario, findings: Sequence[Mapping[str, Any]], least: float
) -> list[Mapping[str, Any]]:
    """What the diagnosis of a clean run claims to cost more than `least` of a step, or to cost nobody knows what.

    One process without the fault has none at all. Ranks, too, have communication that nothing hides: of them only what
    names the scenario's own causes is counted.
    """
    claimed = [finding for finding in findings if finding["share"] is None or finding["share"] > least]
    if scenario.where != "process":
        planted = {*scenario.causes, *scenario.accepted}
        return [finding for finding in claimed if finding["cause"] in planted]
    return [
        finding
        for finding in claimed
        if not (finding["rule"] == "account_classes" and _is_ordinary(finding["subject"]))
    ]


def _is_ordinary(name: str) -> bool:
    # The bar of matrix products and attention together names both.
    return all(
        any(part == one or part.startswith(f"{one}.") for one in _ORDINARY) for part in name.split(" and ")
    )
