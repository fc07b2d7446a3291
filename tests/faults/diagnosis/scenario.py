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

import hashlib
import importlib
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from drivetrain.archive.reader import open_run
from drivetrain.lab import Lab
from drivetrain.measure.statistics import mean_with_interval
from rank_processes import free_port

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
    "judge",
    "mean_step_s",
    "plain_steps_s",
    "run",
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

_TIME_LIMIT_S = 300.0
_OWN_CODE = "own_code"
_STEPS = (
    "training.train_iters=40",
    "training.eval_iters=0",
    "profiler.profile_step_start=8",
    "profiler.profile_step_end=14",
)
"""Of a job that says nothing else: steps to warm up, five profiled ones that count, and as many as a mean takes."""
_BASE = """
[model]
num_layers = 4
hidden_size = 256
num_attention_heads = 4
seq_length = 256
vocab_size = 1024

[training]
micro_batch_size = 4
global_batch_size = 4

[precision]
params_dtype = "fp32"

[run]
device = "cpu"
num_threads = 1
"""


@dataclass(frozen=True)
class Wire:
    """The network lab that a job's ranks are on.

    Attributes:
        hosts, ranks: hosts, and ranks on each.
        rate: of each link, as ``800mbit``.
        links: other rates, by number of the host.
    """

    hosts: int = 2
    ranks: int = 1
    rate: str = "800mbit"
    links: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """A training job as somebody would start it.

    Attributes:
        folder: where it is started, and where its run is written.
        config: a preset's name, or the path of a configuration file.
        overrides: of the configuration; they go before the harness's own (:data:`_STEPS`).
        world_size: processes. With a wire, hosts times ranks.
        environment: variables of every process.
        own_code: source of a module of the user's, which any process imports as ``own_code``: what ``data.transform``
            names. None: the user has none.
        starts_training: whether the user's own script starts training, so that ``own_code`` is imported before it.
        wire: the lab that the ranks are on; None: they are on this machine.
    """

    folder: Path
    config: str
    overrides: tuple[str, ...] = ()
    world_size: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    own_code: str | None = None
    starts_training: bool = False
    wire: Wire | None = None


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
            if not path.exists():
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
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=_TIME_LIMIT_S)
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


def run(job: Job, *, profiled: bool = True) -> Path:
    """Train it to the end; its run directory.

    Raises:
        AssertionError: it did not end well; what it said is the message.
    """
    runs = job.folder / "runs"
    environment = {**_environment(job), **job.environment}
    leaves = [*_STEPS, f"run.runs_dir={runs}", f"profiler.profile={str(profiled).lower()}"]
    leaves += ["profiler.profile_ranks=all"] if profiled and job.world_size > 1 else []
    first = f"import {_OWN_CODE}; " if job.starts_training else ""
    code = f"{first}from drivetrain.cli import main; main()"
    command = [sys.executable, "-c", code, "train", job.config, *leaves, *job.overrides, "--json"]
    said = _on_a_wire(job, command, environment) if job.wire else _on_this_machine(job, command, environment)
    return Path(json.loads(said)["run"])


def _environment(job: Job) -> dict[str, str]:
    """Of every process. Nothing that this machine has measured before is known in the folder's own cache."""
    environment = {
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMP_NUM_THREADS": "1",
        "XDG_CACHE_HOME": str(job.folder / "cache"),
    }
    if job.own_code is not None:
        code = job.folder / f"code-{hashlib.sha256(job.own_code.encode()).hexdigest()[:12]}"
        code.mkdir(parents=True, exist_ok=True)
        (code / f"{_OWN_CODE}.py").write_text(job.own_code, encoding="utf-8")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(code), os.environ.get("PYTHONPATH")]))
    return environment


def _on_this_machine(job: Job, command: Sequence[str], environment: Mapping[str, str]) -> str:
    """One process, or ranks as torchrun would start them; what the first printed."""
    port = str(free_port()) if job.world_size > 1 else ""
    processes = []
    for rank in range(job.world_size):
        told = {} if job.world_size == 1 else _told(rank, job.world_size, port)
        processes.append(
            subprocess.Popen(
                command,
                cwd=job.folder,
                env={**os.environ, **environment, **told},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        outputs = [process.communicate(timeout=_TIME_LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for rank, (process, (_, errors)) in enumerate(zip(processes, outputs, strict=True)):
        assert process.returncode == 0, f"rank {rank} ended with {process.returncode}:\n{errors[-4000:]}"
    return outputs[0][0]


def _told(rank: int, world_size: int, port: str) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "GLOO_SOCKET_IFNAME": "lo",
    }


def _on_a_wire(job: Job, command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Ranks of a lab of their own; what the first printed."""
    wire = job.wire
    assert wire is not None
    assert wire.hosts * wire.ranks == job.world_size, "the wire has other ranks than the job"
    with Lab(wire.hosts, wire.ranks, wire.rate, links=wire.links) as lab:
        done = lab.run(command, environment=environment, folder=job.folder, time_limit_s=_TIME_LIMIT_S)
        return done.check().ranks[0].stdout


def plain_steps_s(path: Path) -> list[float]:
    """Seconds of each step that the profiler has left alone, with what stood between it and the step before.

    By the moments at which steps were recorded: a checkpoint or an evaluation lies between two of them, and in no
    step's own time. Warm-up, the steps of the profiler and what follows it are left out, and the last one, whose
    line is written at once and not in the step after it.
    """
    lines = list(open_run(path).metrics())[:-1]
    last_profiled = max((line["step"] for line in lines if "profile" in line["tags"]), default=0)
    steps = []
    for before, line in pairwise(lines):
        # The line of a step is written in the step after it.
        apart = {"warmup", "profile"} & {*before["tags"], *line["tags"]}
        if apart or last_profiled < line["step"] <= last_profiled + _SETTLING:
            continue
        steps.append((line["time"] - before["time"]) / (line["step"] - before["step"]))
    assert len(steps) >= _LEAST_STEPS, f"{path} has {len(steps)} steps that can be used"
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

    facts = facts_of([str(path)], figures=Figures(), rules=None, expected=())
    findings: list[Mapping[str, Any]] = diagnose(facts).to_document()["findings"]
    return findings


def losses(findings: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Each loss once: what holds the time of a finding before it, or is held by one, is the same loss."""
    kept: list[Mapping[str, Any]] = []
    for finding in findings:
        if not any(_same_time(finding, other) for other in kept):
            kept.append(finding)
    return kept


def _same_time(finding: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return _holds(finding, other) or _holds(other, finding)


def _holds(whole: Mapping[str, Any], part: Mapping[str, Any]) -> bool:
    group = part["part_of"]
    return group is not None and f"{whole['part_of'] or whole['subject']}.".startswith(f"{group}.")


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
    found = losses(findings)
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
