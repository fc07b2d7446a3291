"""Training that is saved in one layout and goes on in another, with the commands a user types.

A run of 40 steps saves after step 20. Another run, in another layout, starts from that checkpoint
(``checkpoint.initial_load_path`` with ``initial_load_model_only=false``): its losses of steps 21 to 40 are to lie
within 1e-6 (relative, fp32) of those of the first, its moments at the end within 1e-4, its counters on the same
numbers. In the same layout losses, weights and moments are to be equal to the bit. One Hugging Face folder, loaded and
saved by each layout, is to be the same files. Control: a checkpoint in which one first moment is 1% larger has to show
in the losses.

Finished runs are kept in ``--folder``, and a second call goes on from there.

    python benchmarks/resume_layouts.py --json
    python benchmarks/resume_layouts.py --quick --json
"""

import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from drivetrain.archive.reader import Run
from drivetrain.engine.checkpoint.manifest import MANIFEST_FILE, seal
from harness.claims import Claim, document
from harness.layout_runs import LAYOUTS, LayoutRuns, losses_of, options_of

SAVED_AT, STEPS = 20, 40
NEAR = 1e-6
NEAR_MOMENTS = 1e-4
MOST_ROOM = 1e6
"""Where nothing differs at all, the room is infinite, which JSON has no number for."""
COMMON = (
    f"training.train_iters={STEPS}",
    f"checkpoint.save_interval={SAVED_AT}",
    "optimizer.lr=1e-3",
)
NO_UPDATE = (
    "training.train_iters=1",
    # Far below one unit in the last place of any weight.
    "optimizer.lr=1e-30",
    "lr_schedule.min_lr=0",
)
ONE = "one process"


@dataclass(frozen=True)
class Plan:
    """How much is done.

    Attributes:
        pairs: (layout that saves, layout that goes on).
        exported: layouts that load and save one Hugging Face folder.
    """

    pairs: Sequence[tuple[str, str]]
    exported: Sequence[str]


FULL = Plan(
    pairs=[
        ("tp2", "dp2 zero3"),
        ("tp2 pp2", ONE),
        (ONE, "tp2 pp2"),
        ("pp2 1f1b", "tp2"),
        ("dp4 zero3", "tp2 pp2"),
        ("tp2 pp2", "dp4 zero3"),
        ("dp4 hsdp", "pp2 1f1b"),
        ("tp2", "tp2"),
        ("pp2 1f1b", "pp2 1f1b"),
        ("tp2 pp2", "tp2 pp2"),
        ("dp4 zero3", "dp4 zero3"),
        ("dp4 hsdp", "dp4 hsdp"),
    ],
    exported=["tp2", "pp2 1f1b", "dp2 zero3", "tp2 pp2", "dp4 hsdp"],
)
QUICK = Plan(pairs=[("pp2 1f1b", "tp2"), ("tp2", "tp2")], exported=[])


@dataclass(frozen=True)
class Found:
    """How a run that goes on compares with the one that was not interrupted.

    Attributes:
        loss: largest relative difference of a loss.
        at_step: where.
        moments: largest relative difference of a moment at the end, by norm.
        same_bits: losses, and files of weights and moments, are equal to the bit.
        wrong: what else is not as it should be, in words.
    """

    loss: float
    at_step: int
    moments: float
    same_bits: bool
    wrong: str | None


class Session:
    """The runs of a plan over one folder."""

    def __init__(self, runs: LayoutRuns, plan: Plan) -> None:
        self.runs = runs
        self.plan = plan
        self.found: dict[tuple[str, str], Found] = {}
        self.exported: dict[str, list[str]] = {}
        self.control: Found | None = None

    def run(self) -> None:
        """Everything that the plan holds."""
        for before, after in self.plan.pairs:
            self.found[before, after] = found = self._continued(before, after)
            print(f"{before} to {after}: {found}", file=sys.stderr, flush=True)
        before, after = self.plan.pairs[0]
        self.control = self._continued(before, after, changed=True)
        print(f"control: {self.control}", file=sys.stderr, flush=True)
        for layout in self.plan.exported:
            self.exported[layout] = self._export(layout)
            print(f"{layout}: differing files {self.exported[layout]}", file=sys.stderr, flush=True)

    def straight(self, layout: str) -> Run:
        """The run that is not interrupted, and saves on its way."""
        return self.runs.get(f"{_word(layout)}-straight", LAYOUTS[layout], COMMON)

    def _continued(self, before: str, after: str, *, changed: bool = False) -> Found:
        straight = self.straight(before)
        checkpoint = straight.path / "checkpoints" / f"step-{SAVED_AT:08d}"
        name = f"{_word(before)}-to-{_word(after)}"
        if changed:
            name += "-control"
            checkpoint = with_other_moment(checkpoint, self.runs.folder / "changed" / checkpoint.name)
        start = [
            f"checkpoint.initial_load_path={checkpoint}",
            "checkpoint.initial_load_model_only=false",
        ]
        return compare(straight, self.runs.get(name, LAYOUTS[after], [*COMMON, *start]))

    def _export(self, layout: str) -> list[str]:
        """Names of the files that differ between a folder, and what the layout makes of it."""
        source = self.straight(ONE).path / "checkpoints" / f"step-{SAVED_AT:08d}" / "model"
        start = [*NO_UPDATE, f"checkpoint.initial_load_path={source}"]
        run = self.runs.get(f"{_word(layout)}-exported", LAYOUTS[layout], start)
        return differing_files(source, run.path / "checkpoints" / "step-00000001" / "model")


def _word(layout: str) -> str:
    return layout.replace(" ", "-")


def with_other_moment(checkpoint: Path, target: Path) -> Path:
    """A sound copy in which the first moment of the largest tensor is 1% larger."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(checkpoint, target)
    file = target / "optimizer.safetensors"
    tensors = load_file(file)
    name = max((one for one in tensors if one.endswith("/exp_avg")), key=lambda one: (tensors[one].size, one))
    tensors[name] = tensors[name] * np.float32(1.01)
    save_file(tensors, file)
    (target / MANIFEST_FILE).unlink()
    seal(target, "changed")
    return target


def compare(straight: Run, continued: Run) -> Found:
    """A run that went on after :data:`SAVED_AT` steps, and the one that was not interrupted."""
    expected, found = losses_of(straight), losses_of(continued)
    steps = range(SAVED_AT + 1, STEPS + 1)
    wrong = None if list(found) == list(steps) else f"it has steps {min(found)} to {max(found)}"
    counters = [
        {key: value for key, value in run.metrics()[-1].items() if key.startswith("progress/")}
        for run in (straight, continued)
    ]
    if counters[0] != counters[1]:
        wrong = f"it ends with {counters[1]} where {counters[0]} is expected"
    apart = {step: abs(found[step] / expected[step] - 1) for step in steps if step in found}
    worst = max(apart, key=lambda step: apart[step], default=0)
    ends = [run.path / "checkpoints" / f"step-{STEPS:08d}" for run in (straight, continued)]
    moments = [load_file(end / "optimizer.safetensors") for end in ends]
    if moments[0].keys() != moments[1].keys():
        wrong = "it has moments of other names"
    same_files = not differing_files(ends[0] / "model", ends[1] / "model") and _same(*moments)
    return Found(
        apart.get(worst, float("inf")),
        worst,
        max(_apart(moments[0][name], moments[1][name]) for name in moments[0].keys() & moments[1].keys()),
        same_files and all(found.get(step) == expected[step] for step in steps),
        wrong,
    )


def _same(one: Mapping[str, NDArray[np.float32]], other: Mapping[str, NDArray[np.float32]]) -> bool:
    return one.keys() == other.keys() and all(one[name].tobytes() == other[name].tobytes() for name in one)


def _apart(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """``|other - one| / |one|``; infinite for another shape, or a number where there was none."""
    if one.shape != other.shape:
        return float("inf")
    norm = float(np.linalg.norm(one.astype(np.float64).ravel()))
    distance = float(np.linalg.norm((other.astype(np.float64) - one.astype(np.float64)).ravel()))
    return distance / norm if norm else float("inf") if distance else 0.0


def differing_files(source: Path, folder: Path) -> list[str]:
    """Names of files that one of two folders lacks, or that have other bytes."""
    names = {path.name for path in source.iterdir()} | {path.name for path in folder.iterdir()}

    def content(path: Path) -> bytes | None:
        return path.read_bytes() if path.is_file() else None

    return sorted(name for name in names if content(source / name) != content(folder / name))


def claims_of(session: Session) -> list[Claim]:
    """One of each pair of layouts, one of all that stay in theirs, of the folder, and of the control."""
    note = session.runs.note()
    claims = [
        _claim(
            f"saved in {before}, continued in {after}: {NEAR:g} over the largest relative difference of the next "
            f"{STEPS - SAVED_AT} losses",
            room(found),
            f"largest at step {found.at_step}: {found.loss:.2g}; moments at the end within {found.moments:.2g} "
            f"(allowed {NEAR_MOMENTS:g}); {found.wrong or 'counters and data position equal'}. {note}",
        )
        for (before, after), found in session.found.items()
        if before != after
    ]
    same = {before: found for (before, after), found in session.found.items() if before == after}
    if same:
        held = sum(found.same_bits and found.wrong is None for found in same.values())
        told = ", ".join(
            f"{layout}: {'equal' if found.same_bits else 'not equal'}" for layout, found in same.items()
        )
        claims.append(
            _claim(
                f"continued in the same layout, losses, weights and moments equal to the bit: {held} of {len(same)}",
                held / len(same),
                f"{told}. {note}",
            )
        )
    if session.exported:
        held = sum(not files for files in session.exported.values())
        told = ", ".join(f"{layout}: {files or 'equal'}" for layout, files in session.exported.items())
        claims.append(
            _claim(
                "one Hugging Face folder, loaded and saved by each layout, equal to the bit: "
                f"{held} of {len(session.exported)}",
                held / len(session.exported),
                f"{told}; one step in between at a rate that moves no weight. {note}",
            )
        )
    assert session.control is not None
    before, after = session.plan.pairs[0]
    claims.append(
        _claim(
            f"control, {before} to {after}: a first moment that is 1% larger shows in the losses; difference over "
            f"{NEAR:g}",
            min(MOST_ROOM, session.control.loss / NEAR),
            f"largest at step {session.control.at_step}: {session.control.loss:.2g}; moments at the end differ by "
            f"{session.control.moments:.2g}. {note}",
        )
    )
    return claims


def room(found: Found) -> float:
    """How often the difference fits into what is allowed; 0 where something else is wrong."""
    if found.wrong is not None or not found.moments <= NEAR_MOMENTS:
        return 0.0
    return min(MOST_ROOM, NEAR / found.loss) if found.loss else MOST_ROOM


def _claim(text: str, ratio: float, note: str) -> Claim:
    return Claim(text, "a run that is not interrupted", "", [], [], ratio, ratio, ratio, 1.0, note)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    options = options_of(arguments, name="resume-layouts", description=__doc__, quick="two pairs, no folder")
    plan = QUICK if options.quick else FULL
    session = Session(LayoutRuns(options.folder), plan)
    session.run()
    if options.json:
        print(document(claims_of(session)))


if __name__ == "__main__":
    main()
