"""A slow transform is found and taken away: a regular expression that is planted as ``data.transform`` of ``llama-2m``
makes each step wait for its batch. The account puts that time into ``data.loader``, the loader's per-operation times
name the expression, and the ladder removes the wait by what the catalogue has against it.

    python benchmarks/slow_transform.py --quick --json

Everything is done by commands of the command line, as a user would. Runs and tunes are written to a temporary folder
(``--folder`` keeps them).
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain.archive.account_file import mean_step_of
from drivetrain.archive.tunes import list_tunes, open_tune
from harness.claims import Claim, document
from harness.packed_text import VOCABULARY, packed_corpus

HERE = Path(__file__).resolve().parent
PLANTED = "harness.regex_transform:drop_marked"
ENTRIES = ("data_workers", "bake_transforms")
LOADER = "data.loader"
WAITED, LEFT = 0.25, 0.05
"""Shares of a step: at least so much is waited for batches before, at most so much after."""
FASTER = 1 / (1 - WAITED)
SHOWN_CLASSES = 6
FULL = ("--budget", "5m", "--trial-steps", "24", "--trial-looks", "1,2")
QUICK = ("--budget", "10m", "--trial-steps", "6", "--trial-looks", "1")


@dataclass(frozen=True)
class Found:
    """What the commands said.

    Attributes:
        tune: the document of the ladder.
        before, after: nanoseconds of the mean profiled step by class, of the planted configuration and of the last one
            that was kept; ``after`` is empty where none was.
        subjects: what ``diagnose`` names as slow operations of the loader.
        operations: share of building batches in the profiled run, by operation.
    """

    tune: Mapping[str, Any]
    before: Mapping[str, float]
    after: Mapping[str, float]
    subjects: Sequence[str]
    operations: Mapping[str, float]


def drivetrain(folder: Path, *arguments: str, accept: Sequence[int] = (0,)) -> str:
    """Run one command in ``folder``; what it printed.

    Raises:
        SystemExit: its exit code is not among ``accept``.
    """
    print(f"$ drivetrain {' '.join(arguments)}", file=sys.stderr, flush=True)
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-m", "drivetrain", *arguments],
        stdout=subprocess.PIPE,
        cwd=folder,
        env=environment,
        check=False,
    )
    if done.returncode not in accept:
        sys.exit(f"drivetrain {arguments[0]} ended with exit code {done.returncode}")
    return done.stdout.decode()


def overrides(corpus: Path, batch: int) -> list[str]:
    """The planted configuration: ``llama-2m`` with a small batch, in one thread, so that a core is left for workers."""
    return [
        f"data.data_path={corpus}",
        f"data.transform={PLANTED}",
        f"model.vocab_size={VOCABULARY}",
        "precision.params_dtype=fp32",
        f"training.micro_batch_size={batch}",
        f"training.global_batch_size={batch}",
        "training.train_iters=600",
        "training.eval_iters=0",
        "run.device=cpu",
        "run.num_threads=1",
    ]


def replayed(folder: Path, batch: int, settings: Sequence[str]) -> Found:
    """Climb the ladder, look at its first profile, and at what was kept."""
    corpus = packed_corpus(folder / "corpus")
    only = [word for name in ENTRIES for word in ("--only", name)]
    fixed = ["--knob-trials", "0", "--no-leave-one-out", "--json"]
    command = ["tune", "llama-2m", *overrides(corpus, batch), *only, *settings, *fixed]
    drivetrain(folder, *command, accept=(0, 1))
    (path,) = list_tunes(folder / "tunes")
    tune = open_tune(str(path)).document
    if tune["baseline"] is None:
        sys.exit(f"the planted configuration could not be profiled: {tune['findings']}")
    run = path / "runs" / Path(str(tune["baseline"]["run"])).name
    mean = mean_step_of(run)
    assert mean is not None, "the ladder has read the same account"
    diagnosis = json.loads(drivetrain(folder, "diagnose", str(run), "--json"))
    named = [one["subject"] for one in diagnosis["findings"] if one["rule"] == "data_operations"]
    after = [step["classes_after"] for step in tune["steps"] if step["kept"]]
    return Found(tune, dict(mean.classes), after[-1] if after else {}, named, operations_of(run))


def operations_of(run: Path) -> dict[str, float]:
    """Share of building batches by operation, as the run recorded it at its end."""
    events = [json.loads(line) for line in (run / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    ends = [event for event in events if event["kind"] == "data" and event["when"] == "end"]
    return {str(name): float(one["share"]) for name, one in ends[-1]["operations"].items()} if ends else {}


def share(classes: Mapping[str, float]) -> float:
    """Of the mean step, waiting for batches."""
    return classes.get(LOADER, 0.0) / sum(classes.values())


def shown_classes(found: Found) -> list[str]:
    """The largest classes before, and the loader's."""
    names = sorted(found.before, key=lambda name: -found.before[name])
    return [*dict.fromkeys([*names[:SHOWN_CLASSES], LOADER])]


def table(found: Found) -> str:
    """Milliseconds of the mean profiled step by class, before and after; the largest classes, and the rest."""
    shown = shown_classes(found)
    lines = [f"{'class':32} {'before':>10} {'after':>10}"]
    for name in shown:
        lines.append(_row(name, found.before.get(name, 0.0), found.after.get(name, 0.0), found.after))
    rest = [
        sum(classes.values()) - sum(classes.get(name, 0.0) for name in shown)
        for classes in (found.before, found.after)
    ]
    lines.append(_row("everything else", *rest, found.after))
    lines.append(_row("step", sum(found.before.values()), sum(found.after.values()), found.after))
    return "\n".join(lines)


def _row(name: str, before: float, after: float, known: Mapping[str, float]) -> str:
    return f"{name:32} {before / 1e6:7.1f} ms " + (f"{after / 1e6:7.1f} ms" if known else "         -")


def claims_of(found: Found, batch: int) -> list[Claim]:
    """Placed, named, removed, faster."""
    waited = share(found.before)
    kept = [
        f"{step['entry']} ({_change(step)}): {step['measured']['ratio']:.2f} times as fast, "
        f"gate {step['gate']['verdict']}"
        for step in found.tune["steps"]
        if step["kept"]
    ]
    spent = f"the ladder took {found.tune['spent_s']:.0f} s"
    times = ", ".join(f"{name} {part:.0%}" for name, part in _by_size(found.operations)[:3])
    alone = float(list(found.subjects) == [PLANTED])
    left = share(found.after) if found.after else 1.0
    speed_up = found.tune["speed_up"] or {"ratio": 0.0, "low": 0.0, "high": 0.0}
    gate = (found.tune["final_gate"] or {}).get("verdict", "not held")
    return [
        _claim(
            f"a planted regular expression: share of a step that the account puts into {LOADER}, over {WAITED}",
            waited / WAITED,
            f"{waited:.1%} of a mean step of {sum(found.before.values()) / 1e6:.0f} ms; llama-2m, fp32, "
            f"{batch} sequence(s) a step, one thread, no workers; functions of the standard library as documents",
        ),
        _claim(
            "the planted expression alone is named as the loader's slow operation, by its path",
            alone,
            f"diagnose names {', '.join(found.subjects) or 'nothing'}; of building batches: {times}",
        ),
        _claim(
            f"{LEFT} over the share of a step that is waited for batches after the ladder (0.001 where it is less)",
            LEFT / max(left, 1e-3),
            f"{left:.1%} left; kept: {'; '.join(kept) or 'nothing'}; tried: {', '.join(ENTRIES)}; {spent}",
        ),
        Claim(
            f"the final configuration against the planted one, over {FASTER:.2f}",
            "none",
            "",
            [],
            [],
            *(speed_up[key] / FASTER for key in ("ratio", "low", "high")),
            1.0,
            f"{speed_up['ratio']:.2f} times as fast (95% interval {speed_up['low']:.2f} to {speed_up['high']:.2f}) "
            f"in a trial of its own; gate of the whole: {gate}",
        ),
    ]


def table_claims(found: Found) -> list[Claim]:
    """The table again, for the page of results: seconds of the mean profiled step, after (ours) and before (theirs)."""
    if not found.after:
        return []
    rows = {"step": (sum(found.before.values()), sum(found.after.values()))}
    for name in shown_classes(found):
        rows[name] = (found.before.get(name, 0.0), found.after.get(name, 0.0))
    claims = []
    for name, (before, after) in rows.items():
        # A class that is gone has no ratio: a microsecond stands for nothing.
        ratio = max(before, 1e3) / max(after, 1e3)
        seconds = [after / 1e9], [before / 1e9]
        note = (
            f"{before / 1e6:.2f} ms before the ladder, {after / 1e6:.2f} ms after; steps under the profiler"
        )
        claims.append(
            Claim(f"mean step, {name}", "before the ladder", "", *seconds, ratio, ratio, ratio, 0.0, note)
        )
    return claims


def _claim(claim: str, ratio: float, note: str) -> Claim:
    return Claim(claim, "none", "", [], [], ratio, ratio, ratio, 1.0, note)


def _change(step: Mapping[str, Any]) -> str:
    # A baked corpus has a long path; that it is one says enough.
    return ", ".join(
        f"{leaf} = {Path(value).name if isinstance(value, str) else value}"
        for leaf, value in step["change"].items()
    )


def _by_size(operations: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(operations.items(), key=lambda item: -item[1])


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="a smaller batch and shorter trials: a minute or two"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument(
        "--folder", type=Path, default=None, help="keep corpus, runs and tune here; must be new"
    )
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    batch = 2 if options.quick else 4
    with tempfile.TemporaryDirectory() as name:
        folder = (options.folder or Path(name)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "tunes").exists():
            sys.exit(f"{folder} holds a tune already; give another --folder")
        found = replayed(folder, batch, QUICK if options.quick else FULL)
    print(f"\n{table(found)}\n", file=sys.stderr)
    claims = [*claims_of(found, batch), *table_claims(found)]
    for claim in claims:
        print(f"{claim.claim}: {claim.ratio:.2f}; {claim.note}", file=sys.stderr)
    if options.json:
        print(document(claims))


if __name__ == "__main__":
    main()
