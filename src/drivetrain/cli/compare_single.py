"""What ``drivetrain train --compare-single`` does: a few steps of several processes, held against one process."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.archive.encoding import SCHEMA
from drivetrain.archive.reader import Run, open_run
from drivetrain.cli.beginning import Beginning
from drivetrain.cli.environment import require_torch
from drivetrain.cli.output import show_document
from drivetrain.cli.train_command import refuse_broken_rules, train_new_run
from drivetrain.config import (
    LaunchFacts,
    LoadedConfig,
    ModelConfig,
    ParallelismConfig,
    RunConfig,
    idle_fields,
    layout_of,
    least_processes,
    leaves,
    load_config,
)
from drivetrain.errors import DrivetrainError, RunError

if TYPE_CHECKING:
    from drivetrain.tune.layout_parity import Arrays, Comparison, Difference, TrainedSteps

__all__ = ["DEFAULT_STEPS", "on_one_process", "run_compare_single", "train_short_run"]

DEFAULT_STEPS = 3
_SHOWN = 5
_LONGEST_NAME = 48

Train = Callable[[LoadedConfig, int, Beginning], Path]
"""Trains a configuration on so many processes to its end, and returns the run's directory."""


@dataclass(frozen=True)
class _Runs:
    """The runs that are compared; ``several`` and those after it are made as they are needed."""

    alone: Run
    several: Run
    perturbed: Sequence[Run]


def train_short_run(loaded: LoadedConfig, world_size: int, beginning: Beginning) -> Path:
    """Train ``loaded`` on ``world_size`` processes of this machine.

    Raises:
        DrivetrainError: it could not begin or go on.
        KeyboardInterrupt: it was asked to stop.
    """
    path, summary = train_new_run(loaded, world_size, beginning)
    if summary is not None and summary["status"] == "interrupted":
        raise KeyboardInterrupt
    return path


def run_compare_single(
    source: str,
    overrides: Sequence[str],
    *,
    num_processes: int | None,
    steps: int | None,
    as_json: bool,
    beside: Mapping[str, bool],
    train: Train = train_short_run,
) -> int:
    """Train the first steps of a configuration on one process and on several; 0 if both train the same, else 1.

    Args:
        steps: how many; None: :data:`DEFAULT_STEPS`.
        beside: options of ``train``, and whether they were given.
        train: makes each of the runs.

    Raises:
        DrivetrainError: options or a configuration that cannot be compared so.
    """
    require_torch()
    _refuse_options(source, beside)
    loaded = load_config(source, overrides)
    world_size = num_processes or least_processes(loaded.config)
    refuse_broken_rules(loaded, world_size)
    count = DEFAULT_STEPS if steps is None else steps
    _refuse_configuration(loaded.config, world_size, count)
    several = _short(loaded, overrides, count, "several")
    alone = on_one_process(_short(loaded, overrides, count, "single"))
    refuse_broken_rules(alone, 1, limits_memory=False)
    _say(
        f"comparing the first {_steps(count)} of {world_size} processes with one process, which holds the whole model"
    )
    runs = _Runs(_alone(alone, train), open_run(train(several, world_size, Beginning(probe=True))), ())
    comparison = _compared(runs, count)
    if comparison.verdict == "undecided":
        from drivetrain.tune.layout_parity import LEAST_PERTURBATIONS

        _say(f"{comparison.why}: {LEAST_PERTURBATIONS} runs from perturbed weights say what round-off does")
        seeds = range(1, LEAST_PERTURBATIONS + 1)
        runs = replace(runs, perturbed=[_alone(alone, train, perturb_ulp=seed) for seed in seeds])
        comparison = _compared(runs, count)
    if as_json:
        show_document(_document(runs, comparison, count, world_size))
    else:
        _show(runs, comparison, count, world_size)
    return 0 if comparison.verdict == "agree" else 1


def on_one_process(loaded: LoadedConfig) -> LoadedConfig:
    """The same training in one process: without a layout, and what has no effect then at its default."""
    config = loaded.config.model_copy(update={"parallelism": ParallelismConfig()})
    for idle in idle_fields(config, LaunchFacts(world_size=1)):
        leaf = leaves()[idle.field]
        section = getattr(config, leaf.section).model_copy(update={leaf.name: leaf.default})
        config = config.model_copy(update={leaf.section: section})
    return replace(loaded, config=config)


def _refuse_options(source: str, beside: Mapping[str, bool]) -> None:
    from drivetrain.engine.parallel.process_group import Ranks

    if Ranks.started_by_torchrun():
        raise DrivetrainError(
            "--compare-single under torchrun: it starts one process and several by itself; use --nproc, and no torchrun"
        )
    given = next((name for name, is_given in beside.items() if is_given), None)
    if given is not None:
        raise DrivetrainError(
            f"--compare-single makes short runs of its own, to which {given} does not belong; give one of them"
        )
    try:
        is_directory = bool(source) and Path(source).is_dir()
    except (OSError, ValueError):  # too long a name, a null character: load_config says so
        is_directory = False
    if is_directory:
        raise RunError(
            f"--compare-single begins at the first step, and {source} is a run to continue; give "
            f"{Path(source) / 'config.toml'}"
        )


def _refuse_configuration(config: RunConfig, world_size: int, steps: int) -> None:
    if world_size == 1:
        raise DrivetrainError(
            "--compare-single compares several processes with one, and this configuration is for one; add --nproc 2, "
            "or one of parallelism's sizes"
        )
    if steps > config.training.train_iters:
        raise DrivetrainError(
            f"--compare-steps {steps}: the run has training.train_iters = {config.training.train_iters}; at most that "
            "many can be compared"
        )
    layout = layout_of(config, world_size)
    dropouts = [
        f"model.{name}=0"
        for name in ("hidden_dropout", "attention_dropout")
        if getattr(config.model, name) > 0
    ]
    from drivetrain.engine.devices import select_device

    if dropouts and (layout.dp > 1 or layout.pp > 1 or select_device(config.run).type != "cpu"):
        raise DrivetrainError(
            "--compare-single: with dropout, data-parallel ranks and the stages of a pipeline draw other masks than "
            f"one process (docs/parallel.md), so that nothing could be compared; add {' '.join(dropouts)}"
        )


def _short(loaded: LoadedConfig, overrides: Sequence[str], steps: int, role: str) -> LoadedConfig:
    """The first ``steps`` of ``loaded``, at its learning rates."""
    from drivetrain.tune.short_run import short_run

    name = (loaded.config.run.name or loaded.name)[:_LONGEST_NAME]
    more = [*short_run(loaded.config, steps), f"run.name={name}-{role}"]
    return load_config(loaded.source, [*overrides, *more])


def _alone(loaded: LoadedConfig, train: Train, *, perturb_ulp: int | None = None) -> Run:
    try:
        return open_run(train(loaded, 1, Beginning(probe=True, perturb_ulp=perturb_ulp)))
    except DrivetrainError as error:
        raise DrivetrainError(
            f"--compare-single, the run of one process, which holds the whole model: {error}"
        ) from error


def _compared(runs: _Runs, steps: int) -> "Comparison":
    from drivetrain.tune.gate_files import epsilon_of
    from drivetrain.tune.layout_parity import Comparison, compare_with_one_process

    for run in (runs.alone, *runs.perturbed):
        if run.status() != "finished":
            return Comparison([], "withheld", f"in one process the run {_end_of(run)}")
    if runs.several.status() != "finished":
        return Comparison(
            [], "differ", f"one process finished, and with several the run {_end_of(runs.several)}"
        )
    config = runs.alone.config()
    alone, several, *perturbed = (
        _trained(run, config.model, steps) for run in (runs.alone, runs.several, *runs.perturbed)
    )
    return compare_with_one_process(alone, several, perturbed, epsilon=epsilon_of(config))


def _end_of(run: Run) -> str:
    end = run.end()
    return f"{run.status()}: {end['reason'] if end is not None else 'it has no end'}"


def _trained(run: Run, model: ModelConfig, steps: int) -> "TrainedSteps":
    from drivetrain.engine.probe import GRADIENTS_FILE
    from drivetrain.tune.gate_files import read_gradients
    from drivetrain.tune.layout_parity import TrainedSteps

    folder = run.path / "checkpoints" / f"step-{steps:08d}" / "model"
    if not (run.path / GRADIENTS_FILE).is_file():
        # Made with a probe, and finished: a first step that overflowed in fp16 has no gradient.
        raise RunError(
            f"{run.path.name} skipped its first step, whose gradients overflowed: nothing can be compared; lower "
            "precision.initial_loss_scale"
        )
    return TrainedSteps(
        losses=[line["train/loss"] for line in run.metrics()],
        gradients=read_gradients(run.path / GRADIENTS_FILE),
        parameters=_parameters(folder, model),
    )


def _parameters(folder: Path, model: ModelConfig) -> "Arrays":
    """The weights of a checkpoint under our own names, mapped, not read."""
    from drivetrain.engine.model.huggingface_config import huggingface_architecture
    from drivetrain.engine.model.huggingface_state import parts_of_huggingface
    from drivetrain.tune.gate_files import read_gradients

    stored: dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        stored |= read_gradients(file)
    if huggingface_architecture(model) is None:
        return stored
    found: dict[str, Any] = {}
    for theirs, ours, transposed in parts_of_huggingface(model):
        if theirs not in stored:
            raise RunError(f"{folder} holds no {theirs}")
        whole = stored[theirs].T if transposed else stored[theirs]
        first = 0
        for name, shape in ours:
            found[name] = whole[first : first + shape[0]]
            first += shape[0]
    return found


def _document(runs: _Runs, comparison: "Comparison", steps: int, world_size: int) -> dict[str, Any]:
    alone, several = ([line["train/loss"] for line in run.metrics()] for run in (runs.alone, runs.several))
    return {
        "schema": SCHEMA,
        "verdict": comparison.verdict,
        "why": comparison.why,
        "steps": steps,
        "processes": world_size,
        "dtype": runs.alone.config().precision.params_dtype,
        "runs": {
            "one_process": str(runs.alone.path),
            "several": str(runs.several.path),
            "perturbed": [str(run.path) for run in runs.perturbed],
        },
        "losses": {"one_process": alone, "several": several, "differences": _rows(comparison.of("loss"))},
        "gradients": _rows(comparison.of("gradient")),
        "parameters": _rows(comparison.of("parameter")),
    }


def _rows(differences: "Sequence[Difference]") -> list[dict[str, Any]]:
    return [one.to_document() for one in differences]


def _show(runs: _Runs, comparison: "Comparison", steps: int, world_size: int) -> None:
    dtype = runs.alone.config().precision.params_dtype
    print(f"compared    {_steps(steps)} of {world_size} processes with one process, {dtype}")
    for what, title in (
        ("loss", "losses"),
        ("gradient", "gradients of step 1"),
        ("parameter", f"parameters after {_steps(steps)}"),
    ):
        found = comparison.of(what)  # type: ignore[arg-type]
        if found:
            print(f"{title}: {len(found)}; relative differences, those nearest to their limit first")
        for one in found[:_SHOWN]:
            print(f"  {one.value:8.1e}  (limit {one.limit:.1e})  {one.name}")
    print(
        f"envelope    {f'{len(runs.perturbed)} perturbed runs of one process' if runs.perturbed else 'not needed'}"
    )
    print(f"verdict     {comparison.verdict}")
    print(f"why         {comparison.why}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"
