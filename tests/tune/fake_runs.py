"""A runner whose runs take no time: their figures follow from the configuration by a cost model."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from drivetrain.archive.atomic import write_json
from drivetrain.archive.tunes import Tune
from drivetrain.archive.writer import RunWriter
from drivetrain.catalogue import catalogue
from drivetrain.config import RunConfig, leaf_values, load_config, to_toml
from drivetrain.measure.optimisation import Evidence, OptimisationRecord
from drivetrain.tune.gate import Verdict
from drivetrain.tune.ladder_settings import LadderSettings
from drivetrain.tune.session import climb_tune, start_tune
from drivetrain.tune.trainer import Attempt, Outcome, Trainer

BASELINE = """
[model]
num_layers = 2
hidden_size = 32
num_attention_heads = 2
seq_length = 32
vocab_size = 384

[training]
micro_batch_size = 4
global_batch_size = 8
train_iters = 400

[lr_schedule]
lr_warmup_tokens = 51200

[optimizer]
fused = false

[precision]
params_dtype = "fp32"

# What the cost model knows nothing of is on already, and no candidate.
[fusion]
level = "all"

[memory]
keep_freed_memory = true

[data]
prefetch_batches = 1
sample_cache_bytes = 1_000
"""
OVERHEAD = 1.25
START_S = 2.0


def classes_of(config: RunConfig) -> dict[str, float]:
    """Seconds of each class in a step of 100 ms, of which loader, products and update can be had."""
    bf16 = config.precision.params_dtype == "bf16"
    workers = config.data.num_workers
    return {
        "compute.matmul": 0.015 if bf16 else 0.030,
        "compute.norm": 0.004 if config.fusion.compile else 0.010,
        "compute.optimizer": 0.010 if config.optimizer.fused else 0.020,
        # Each worker brings less than the one before, and beyond four they take cores from the computation.
        "data.loader": 0.040 / (1 + workers) if workers <= 4 else 0.008 + 0.004 * (workers - 4),
    }


def kilobytes_of(config: RunConfig) -> int:
    """Peak memory; bf16 saves some."""
    return 900 if config.precision.params_dtype == "bf16" else 1000


class FakeRunner:
    """Writes run directories by the cost model.

    Attributes:
        failures: answers a configuration with (outcome, message), or None where it runs well.
        inactive: answers a configuration with why compile is not in effect, or None where it is.
        refuted: entries that a profile shows to have no effect.
        records: what becomes of the records of a run's optimisations.
        started: (verb, name of the run) of every attempt.
        before: called before each attempt.
        told: what an account says of the ns of the classes, where it is not the truth.
        traces: whether a profile of a configuration leaves an account.
    """

    def __init__(
        self,
        model: Callable[[RunConfig], Mapping[str, float]] = classes_of,
        failures: Callable[[RunConfig], tuple[Outcome, str] | None] = lambda _config: None,
        inactive: Callable[[RunConfig], str | None] = lambda _config: None,
    ) -> None:
        self.model = model
        self.failures = failures
        self.inactive = inactive
        self.refuted: tuple[str, ...] = ()
        self.records: Callable[[list[dict[str, Any]]], list[dict[str, Any]]] = lambda records: records
        self.started: list[tuple[str, str]] = []
        self.options: list[list[str]] = []
        self.before: Callable[[], None] = lambda: None
        self.told: Callable[[dict[str, int]], dict[str, int]] = lambda classes: classes
        self.traces: Callable[[RunConfig], bool] = lambda _config: True

    def train(
        self,
        config: Path,
        overrides: Sequence[str],
        *,
        options: Sequence[str] = (),
        world_size: int = 1,
        timeout_s: float | None = None,
    ) -> Attempt:
        self.options.append(list(options))
        return self._run("train", load_config(str(config), overrides).config, 1.0)

    def profile(
        self,
        config: Path,
        overrides: Sequence[str],
        *,
        steps: int,
        start: int | None = None,
        options: Sequence[str] = (),
        world_size: int = 1,
        timeout_s: float | None = None,
    ) -> Attempt:
        """Without ``start`` a run of twice as many steps that says nothing of which were recorded."""
        short = [f"training.train_iters={2 * steps}"] if start is None else []
        changed = load_config(str(config), [*overrides, *short]).config
        if start is not None:
            self.options.append(list(options))
        window = range(1, 3) if start is None else range(start, start + steps)
        attempt = self._run("profile", changed, 1.0, () if start is None else (start - 1, *window))
        if attempt.run is None or attempt.summary is None:
            return attempt
        document = {"training": attempt.summary, "overhead": self.calibration(changed), "window": None}
        if self.traces(changed):
            self._write_account(attempt.run, changed, window)
        return Attempt("finished", attempt.run, "", attempt.elapsed_s, document)

    def _write_account(self, run: Path, config: RunConfig, window: range) -> None:
        true = {name: round(1e9 * s * OVERHEAD) for name, s in self.model(config).items()}
        told, whole_ns = self.told(true), sum(true.values())
        step = {
            **dict.fromkeys(_WINDOW, None),
            "window_ns": whole_ns,
            "classes": told,
            "unexplained_ns": max(0, whole_ns - sum(told.values())),
        }
        account = {"ranks": [{"rank": 0, "whole": step, "steps": [{"step": one, **step} for one in window]}]}
        entry = {"first": window[0], "last": window[-1], "name_table": "1", "account": account}
        write_json(run / "account.json", {"schema": 1, "windows": [entry]})

    def calibration(self, config: RunConfig) -> dict[str, Any]:
        """What a profile's event ``profile_overhead`` says of its steps without the profiler."""
        return {
            "mean_step_s_plain": sum(self.model(config).values()),
            "num_plain": config.training.train_iters,
        }

    def step_s(self, config: RunConfig, step: int, step_s: float) -> float:
        """Seconds of one step; all alike unless a test says otherwise."""
        return step_s

    def _run(self, verb: str, config: RunConfig, slower: float, recorded: Collection[int] = ()) -> Attempt:
        self.before()
        name = config.run.name or "run"
        self.started.append((verb, name))
        failure = self.failures(config)
        steps = config.training.train_iters
        step_s = slower * sum(self.model(config).values())
        if failure is not None:
            return Attempt(failure[0], None, failure[1], START_S, None)
        manifest: dict[str, Any] = {
            "config_hash": "0",
            "layout": {"world_size": 1},
            "provenance": {},
            "devices": {"type": "cpu", "name": "none that was ever measured"},
            "dataset": {},
            "seed": 1,
        }
        with RunWriter.create(
            config.run.runs_dir, name, config_toml=_as_toml(config), manifest=manifest
        ) as writer:
            writer.open_segment(1)
            for step in range(1, steps + 1):
                tags = ["warmup"] if step <= 2 else ["profile"] if step in recorded else []
                seconds = self.step_s(config, step, step_s) * (OVERHEAD if step in recorded else 1)
                writer.log_metrics(step, {"time/step_s": seconds * (3 if "warmup" in tags else 1)}, tags)
            if verb == "profile":
                writer.event("window", what="profile_overhead", **self.calibration(config))
            path = writer.path
        summary = {
            "run": str(path),
            "status": "finished",
            "step_time_s": {"p50": step_s},
            "wall": {"steps_s": steps * step_s},
            "peak_memory_bytes": 1000 * kilobytes_of(config),
            "optimisations": self.records([one.to_document() for one in self._records(config, verb)]),
        }
        return Attempt("finished", path, "", START_S + steps * step_s, summary)

    def _records(self, config: RunConfig, verb: str) -> list[OptimisationRecord]:
        values = {leaf.path: value for leaf, value in leaf_values(config)}
        found = []
        for entry in catalogue():
            requested = entry.requested(config)
            reason = self.inactive(config) if entry.name == "compile" else None
            evidence = None
            if verb == "profile" and requested:
                refuted = entry.name in self.refuted
                evidence = Evidence("absent", "nothing of it was seen") if refuted else Evidence("shown", "")
            record = OptimisationRecord(
                entry.name,
                entry.field,
                values[entry.field],
                requested=requested,
                active=requested and reason is None,
                reason=reason,
                evidence=evidence,
            )
            found.append(record)
        return found


_WINDOW = (
    "busy_ns",
    "idle_ns",
    "compute_ns",
    "communication_ns",
    "overlapped_communication_ns",
    "exposed_communication_ns",
    "copy_ns",
    "exposed_copy_ns",
)


_TEXTS: dict[str, str] = {}


def _as_toml(config: RunConfig) -> str:
    """``to_toml``, remembered: it is half the time of a fake run."""
    key = config.model_dump_json()
    if key not in _TEXTS:
        _TEXTS[key] = to_toml(config)
    return _TEXTS[key]


class FakeGate:
    """Passes everything but what it is told to judge otherwise; each gate costs two fake runs."""

    def __init__(self, verdicts: Callable[[RunConfig], str] = lambda _config: "pass") -> None:
        self.verdicts = verdicts
        self.held: list[tuple[str, str, str]] = []

    def __call__(self, baseline: Path, candidate: Path, tier: Any, trainer: Trainer) -> Verdict:
        for side in (baseline, candidate):
            trainer.train(
                side,
                [
                    "run.name=gate",
                    f"run.runs_dir={baseline.parent.parent / 'runs'}",
                    "training.train_iters=4",
                    "lr_schedule.lr_decay_tokens=102400",
                ],
            )
        self.held.append((baseline.name, candidate.name, tier))
        answer: Any = self.verdicts(load_config(str(candidate)).config)
        return Verdict(tier, answer, f"said to be {answer}")


DAY = 86400.0


class Climb:
    """A tune of the fake baseline in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said: list[str] = []
        (folder / "base.toml").write_text(BASELINE)

    def start(self, overrides: tuple[str, ...] = (), **settings: Any) -> Path:
        loaded = load_config(str(self.folder / "base.toml"), overrides)
        declared = LadderSettings(**{"budget_s": DAY, "trial_steps": 4, "knob_trials": 0, **settings})
        return start_tune(loaded, overrides, declared, self.folder / "tunes")

    def __call__(
        self,
        runner: FakeRunner | None = None,
        gate: FakeGate | None = None,
        missing: Callable[[str], str | None] = lambda _name: None,
        **settings: Any,
    ) -> Tune:
        return climb_tune(
            self.start(**settings),
            runner=runner or FakeRunner(),
            gate=gate or FakeGate(),
            missing=missing,
            say=self.said.append,
        )
