"""What the files of a run say beside its traces: logged steps, events, the summary, the machine it ran on."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from drivetrain.archive.reader import Run

__all__ = ["LEAST_STEPS", "Maintenance", "RunFigures", "figures_of"]

LEAST_STEPS = 4
"""Steady logged steps below which their mean says nothing."""
_TOLD_APART = 16
"""Steady steps from which the first and the last quarter are told apart."""


@dataclass(frozen=True)
class Maintenance:
    """Time between steps for one purpose, in the run's last segment.

    Attributes:
        seconds: in all, of those at an interval; the one at the end of the run is left out.
        times: how often.
    """

    seconds: float
    times: int


@dataclass(frozen=True)
class RunFigures:
    """Figures of a run's last segment. Means are over its steady steps: those without tags.

    Attributes:
        steady_steps: how many logged steps the means are over.
        means: metric → mean; a metric that some steady step lacks, or that is not finite in one, is absent.
        early, late: the same over the first and the last quarter; empty with less than 16 steady steps.
        excess_s: tag (``compile``, ``gc``) → step → seconds above the median steady step, of steps with that tag and no
            other after the first steady one: what else took time in a step is not told apart.
        logged_steps: steps from the first steady one on, without profiled ones, of which `excess_s` has none either.
        segment_steps: steps of the segment, by the summary, which counts those of the run; None without one.
        maintenance: ``checkpoint``, ``evaluation`` → time at an interval; absent without a summary.
        padding: share of the processed tokens that are padding by construction; None where the run does not say.
        recompilations, graph_breaks: of the newest ``compilation`` event; those that were meant are left out.
        threads: compute threads of each process on a CPU; None where the run does not say.
        cores: usable cores of the machine; None unknown.
        local_processes: processes on this machine; None unknown.
        memory_bytes: of the machine.
        environment: what the run's provenance keeps of it.
        device_type, device_name: of the run.
        segment: number of the segment.
    """

    steady_steps: int = 0
    means: Mapping[str, float] = field(default_factory=dict)
    early: Mapping[str, float] = field(default_factory=dict)
    late: Mapping[str, float] = field(default_factory=dict)
    excess_s: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    logged_steps: int = 0
    segment_steps: int | None = None
    maintenance: Mapping[str, Maintenance] = field(default_factory=dict)
    padding: float | None = None
    recompilations: tuple[Mapping[str, Any], ...] = ()
    graph_breaks: tuple[Mapping[str, Any], ...] = ()
    threads: int | None = None
    cores: int | None = None
    local_processes: int | None = None
    memory_bytes: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    device_type: str = "cpu"
    device_name: str = ""


def figures_of(run: Run) -> RunFigures:
    """Read them.

    Raises:
        RunError: a file of the run is damaged.
    """
    events = run.events()
    segment = run.last_segment()
    own = [event for event in events if event.get("segment") == segment]
    start = next((one.start_step for one in run.segments() if one.index == segment), None)
    lines = [
        line
        for line in run.metrics()
        if start is not None and line["step"] >= start and _is_finite(line.get("time/step_s"))
    ]
    steady = [line for line in lines if not line["tags"]]
    quarter = len(steady) // 4 if len(steady) >= _TOLD_APART else 0
    summary = run.summary() or {}
    provenance = run.manifest["provenance"]
    compilation = _newest(own, "compilation")
    cores = (provenance.get("cpu") or {}).get("usable_cores")
    environment = dict(provenance.get("environment") or {})
    world = run.manifest["layout"].get("world_size")
    local = environment.get("LOCAL_WORLD_SIZE", "")
    return RunFigures(
        steady_steps=len(steady),
        means=_means(steady),
        early=_means(steady[:quarter]),
        late=_means(steady[len(steady) - quarter :]) if quarter else {},
        excess_s={tag: _excess(lines, steady, tag) for tag in ("compile", "gc")},
        logged_steps=sum(
            bool(steady) and line["step"] >= steady[0]["step"] and "profile" not in line["tags"]
            for line in lines
        ),
        segment_steps=_steps_since(start, summary),
        maintenance=_maintenance(summary, own),
        padding=_newest(own, "data", "padding_frac").get("padding_frac"),
        recompilations=tuple(one for one in compilation.get("recompilations", ()) if not one.get("expected")),
        graph_breaks=tuple(one for one in compilation.get("graph_breaks", ()) if not one.get("intended")),
        threads=_newest(own, "start", "threads").get("threads")
        or _newest(own, "resume", "threads").get("threads"),
        cores=cores,
        # Without a launcher's word all processes are here: torchrun says how many are, under one of its own.
        local_processes=int(local) if local.isdecimal() else (None if world is None else int(world)),
        memory_bytes=provenance.get("memory_bytes"),
        environment=environment,
        device_type=str(run.manifest["devices"]["type"]),
        device_name=str(run.manifest["devices"]["name"]),
    )


def _steps_since(start: int | None, summary: Mapping[str, Any]) -> int | None:
    """Steps of the segment that begins with step ``start``: its times are its own, the summary's steps the run's."""
    steps = summary.get("steps")
    return None if steps is None or start is None else int(steps) - start + 1


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _means(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    if not lines:
        return {}
    keys = [key for key in lines[0] if "/" in key]
    found = {}
    for key in keys:
        values = [line.get(key) for line in lines]
        if all(_is_finite(value) for value in values):
            found[key] = statistics.fmean(float(value) for value in values if value is not None)
    return found


def _excess(
    lines: Iterable[Mapping[str, Any]], steady: Sequence[Mapping[str, Any]], tag: str
) -> dict[int, float]:
    if not steady:
        return {}
    usual = statistics.median(float(line["time/step_s"]) for line in steady)
    return {
        int(line["step"]): float(line["time/step_s"]) - usual
        for line in lines
        if set(line["tags"]) == {tag} and line["step"] > steady[0]["step"] and line["time/step_s"] > usual
    }


def _newest(events: Sequence[Mapping[str, Any]], kind: str, key: str | None = None) -> Mapping[str, Any]:
    """The last event of a kind (that has a key); empty where there is none."""
    return next((one for one in reversed(events) if one["kind"] == kind and (key is None or key in one)), {})


def _maintenance(summary: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> dict[str, Maintenance]:
    """Checkpoints and evaluations at an interval. The last ones belong to every run, however it is set."""
    seconds: Mapping[str, float] = (summary.get("wall") or {}).get("maintenance_s") or {}
    last = max((int(one["step"]) for one in events if one["kind"] in ("checkpoint", "evaluation")), default=0)
    found = {}
    for kind in ("checkpoint", "evaluation"):
        steps = [int(one["step"]) for one in events if one["kind"] == kind]
        between = sum(step < last for step in steps)
        if kind in seconds and steps:
            found[kind] = Maintenance(seconds[kind] * between / len(steps), between)
    return found
