"""Four ranks, one of which is killed with SIGKILL, ten times over: training ends as if nothing had happened.

``drivetrain train --nproc 4 --max-restarts 12`` with asynchronous saves and dropout. Which rank, and when, is drawn
from a seed: some steps after the first checkpoint of each start, in any part of a step or of a save. Then the losses of
all steps, and the weights and moments of the last checkpoint, are compared with those of a run that nobody disturbed,
bit by bit; the newest checkpoint is checked after each kill, and nothing half-written may be left in the end.

A layout that has been through it is kept in ``--folder``, and a second call goes on with the next.

    python benchmarks/kill_ranks.py --json
    python benchmarks/kill_ranks.py --quick --json
"""

import collections
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from drivetrain.archive.atomic import write_json
from drivetrain.archive.reader import Run
from drivetrain.engine.checkpoint.manifest import damage
from harness.claims import Claim, document
from harness.layout_runs import LAYOUTS, LayoutRuns, environment, losses_of, options_of
from harness.rank_kills import Kill, kill_one, leftovers, ranks_of, whole_checkpoints


@dataclass(frozen=True)
class Plan:
    """How much is done.

    Attributes:
        layouts: by name.
        kills: in each of them.
        steps: of a run; enough for all kills.
    """

    layouts: Sequence[str]
    kills: int
    steps: int
    save_interval: int = 5

    @property
    def overrides(self) -> list[str]:
        """What both runs of a layout have."""
        return [
            f"training.train_iters={self.steps}",
            f"checkpoint.save_interval={self.save_interval}",
            "checkpoint.async_save=true",
            "model.hidden_dropout=0.1",
        ]


FULL = Plan(["dp4 zero2", "tp2 pp2"], kills=10, steps=320)
QUICK = Plan(["tp2 pp2"], kills=1, steps=40)
SEED = 2026


def disturbed(runs: LayoutRuns, layout: str, plan: Plan) -> tuple[Run, list[Kill]]:
    """Train the layout and kill ranks of it meanwhile; the finished run.

    Raises:
        RunEndedEarly: there was nobody to kill.
        DrivetrainError: the run did not finish.
    """
    ranks, name = LAYOUTS[layout], f"{layout.replace(' ', '-')}-killed"
    for path in runs.runs_dir.glob(f"*-{name}-*"):
        shutil.rmtree(path)
    draw = random.Random(f"{SEED} {layout}")
    restarts = ["--nproc", str(ranks.count), "--max-restarts", str(plan.kills + 2)]
    arguments = runs.arguments(name, ranks, plan.overrides, restarts)
    log = runs.folder / f"{name}.txt"
    kills = []
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "drivetrain", *arguments], stdout=file, stderr=file, env=environment()
        )
        try:
            path = _path_of(runs, name, process)
            for start in range(plan.kills):
                kills.append(kill_one(path, process, draw, start))
                one = kills[-1]
                saving = ", a checkpoint was being written" if one.while_saving else ""
                print(
                    f"{layout}: kill {start + 1} of {plan.kills}: rank {one.rank} after {one.logged} steps of its "
                    f"start{saving}",
                    file=sys.stderr,
                    flush=True,
                )
            process.wait()
        finally:
            if process.poll() is None:
                # The ranks end with their launcher.
                process.kill()
                process.wait()
    return runs.take(name, f"exit code {process.returncode}; {log} has its messages"), kills


def _path_of(runs: LayoutRuns, name: str, process: "subprocess.Popen[bytes]") -> Path:
    """The directory that the command has made."""
    while process.poll() is None:
        found = list(runs.runs_dir.glob(f"*-{name}-*/run.json"))
        if found:
            return found[0].parent
        try:
            process.wait(0.05)
        except subprocess.TimeoutExpired:
            continue
    sys.exit(f"the run {name} did not begin; its messages are in {runs.folder / name}.txt")


def compare(quiet: Run, killed: Run, kills: Sequence[Kill]) -> dict[str, str | None]:
    """What was promised → how it was broken, in words; None: it holds."""
    expected, found = losses_of(quiet), losses_of(killed)
    differing = [step for step in expected if found.get(step) != expected[step]]
    restarts = [event for event in killed.events() if event["kind"] == "restart"]
    ranks = [event["rank"] for event in restarts]
    last, last_killed = whole_checkpoints(quiet.path)[-1], whole_checkpoints(killed.path)[-1]
    bits = [name for name in _tensor_files(last) if _bytes(last, name) != _bytes(last_killed, name)]
    unsound = [
        f"{path.name}: {reason}" for path in whole_checkpoints(killed.path) if (reason := damage(path))
    ]
    torn = [f"after kill {number}: {one.damaged}" for number, one in enumerate(kills, 1) if one.damaged]
    left = leftovers(killed.path)
    alive = ranks_of(killed.path)
    return {
        "losses of all steps": f"{len(differing)} differ, the first at step {differing[0]}"
        if differing
        else None,
        "weights and moments of the last checkpoint": f"{bits} differ" if bits else None,
        "each kill is a restart that names its rank": (
            f"killed {[one.rank for one in kills]}, restarted for {ranks}"
            if ranks != [one.rank for one in kills]
            else None
        ),
        "the newest checkpoint is sound after each kill": "; ".join(torn) or None,
        "all checkpoints are sound in the end": "; ".join(unsound) or None,
        "nothing half-written is left": f"{left}" if left else None,
        "no rank is left": f"processes {sorted(alive.values())}" if alive else None,
    }


def _tensor_files(checkpoint: Path) -> list[str]:
    files = sorted(
        str(path.relative_to(checkpoint))
        for path in checkpoint.rglob("*.safetensors")
        # Of generators: they are equal too, but what they decide is in the losses.
        if path.parent.name != "random"
    )
    assert any("model" in one for one in files), f"{checkpoint} holds no weights"
    assert any("optimizer" in one for one in files), f"{checkpoint} holds no moments"
    return files


def _bytes(checkpoint: Path, name: str) -> bytes | None:
    path = checkpoint / name
    return path.read_bytes() if path.is_file() else None


class Session:
    """The layouts of a plan over one folder; those that are done are kept."""

    def __init__(self, runs: LayoutRuns, plan: Plan) -> None:
        self.runs = runs
        self.plan = plan
        self._state = runs.folder / "layouts.json"
        self.done: dict[str, dict[str, Any]] = (
            json.loads(self._state.read_text(encoding="utf-8"))["layouts"] if self._state.exists() else {}
        )

    def run(self) -> None:
        """Everything that the plan holds."""
        for layout in self.plan.layouts:
            if layout not in self.done:
                quiet = self.runs.get(
                    f"{layout.replace(' ', '-')}-quiet", LAYOUTS[layout], self.plan.overrides
                )
                killed, kills = disturbed(self.runs, layout, self.plan)
                found = compare(quiet, killed, kills)
                resumed = [event["step"] for event in killed.events() if event["kind"] == "resume"]
                self.done[layout] = {
                    "kills": [asdict(one) for one in kills],
                    "resumed": resumed,
                    "found": found,
                    "final_loss": losses_of(killed)[self.plan.steps],
                    "note": self.runs.note(),
                }
                write_json(self._state, {"schema": 1, "layouts": self.done})
            broken = {what: how for what, how in self.done[layout]["found"].items() if how is not None}
            print(f"{layout}: {broken or 'as if nothing had happened'}", file=sys.stderr, flush=True)


def claims_of(done: Mapping[str, Mapping[str, Any]], plan: Plan) -> list[Claim]:
    """One a layout: 1 where every promise holds."""
    claims = []
    for layout in plan.layouts:
        one = done[layout]
        broken = [f"{what}: {how}" for what, how in one["found"].items() if how is not None]
        kills = one["kills"]
        saving = sum(kill["while_saving"] for kill in kills)
        ranks = collections.Counter(kill["rank"] for kill in kills)
        held = float(not broken)
        told = "; ".join(broken) if broken else f"held: {'; '.join(one['found'])}"
        claims.append(
            Claim(
                f"{layout}, {plan.kills} times one of 4 ranks killed in {plan.steps} steps: everything equal "
                "to the bit to a run that nobody disturbed",
                "none",
                "",
                [],
                [],
                held,
                held,
                held,
                1.0,
                f"{told}. Kills by rank {dict(sorted(ranks.items()))}, {saving} while a checkpoint was being "
                f"written; went on after steps {one['resumed']}; final loss {one['final_loss']!r}. A checkpoint every "
                f"{plan.save_interval} steps, asynchronous; dropout 0.1. {one['note']}",
            )
        )
    return claims


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    options = options_of(arguments, name="kill-ranks", description=__doc__, quick="one layout, one kill")
    plan = QUICK if options.quick else FULL
    session = Session(LayoutRuns(options.folder), plan)
    session.run()
    if options.json:
        print(document(claims_of(session.done, plan)))


if __name__ == "__main__":
    main()
