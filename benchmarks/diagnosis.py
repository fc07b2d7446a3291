"""Does the diagnosis name what was planted, and what it costs? Every scenario of ``tests/faults/diagnosis``: a job with
a fault, and the same job without it, in turns, so that drift of the machine hits both alike.

    python benchmarks/diagnosis.py --only "data.padding" --json
    python benchmarks/diagnosis.py --list

The true cost is the mean step with the fault less the one without, both without the profiler; the diagnosis is of the
first faulty run. Scenarios on the network lab need root; what cannot run is listed with the reason.
"""

import argparse
import contextlib
import difflib
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "faults" / "diagnosis")]

from scenario import (  # noqa: E402 - they lie beside the tests
    LEAST_SHARE,
    WITHIN,
    Job,
    Judgement,
    Place,
    Scenario,
    all_scenarios,
    diagnosed,
    judge,
    mean_step_s,
    run,
    unfounded,
)

from drivetrain.errors import DrivetrainError  # noqa: E402
from harness.claims import Claim, document, wilson  # noqa: E402
from harness.quiet import TICKS_PER_S, wait_until_quiet  # noqa: E402

NAMED = 0.95
"""Share of the scenarios whose first finding names the cause, and of those whose cost is right."""
ENOUGH = 24
LEAST_CLAIMED = 0.02
"""Share of a clean step above which a finding is one too many, where the runs do not vary by more."""
DISTURBED = 0.1
"""Share of the machine that others may take during a run before it is repeated."""
QUICK = (
    "data.slow_transform of batches",
    "data.padding",
    "host.garbage_collection",
    "host.python",
)


@dataclass(frozen=True)
class Pace:
    """How much is measured: pairs of runs of a scenario, attempts at each, longest wait for a quiet machine."""

    pairs: int
    attempts: int
    patience_s: float


@dataclass
class Result:
    """What became of one scenario.

    Attributes:
        judgement: None where it could not run; ``why_not`` has the reason.
        noise: how far the mean steps of the clean runs lie from their middle, as a share of it; None with one run.
        unfounded: what the diagnoses of the clean runs claim, as ``cause: share``.
        clean_runs: how many there were.
        loud_runs: of them, those whose diagnosis claims anything.
        others: largest share of the machine that other processes took during a run.
    """

    scenario: Scenario
    judgement: Judgement | None = None
    why_not: str | None = None
    noise: float | None = None
    unfounded: list[str] = field(default_factory=list)
    clean_runs: int = 0
    loud_runs: int = 0
    others: float = 0.0


def measured(scenario: Scenario, place: Place, pace: Pace) -> Result:
    """Run its jobs in turns, and judge."""
    result = Result(scenario)
    order = [("faulty", "clean"), ("clean", "faulty")]
    pairs: list[tuple[Path, Path]] = []
    try:
        for number in range(pace.pairs):
            paths: dict[str, Path] = {}
            for side in order[number % 2]:
                job = scenario.faulty(place) if side == "faulty" else scenario.clean(place)
                paths[side], others = _quiet_run(job, pace)
                result.others = max(result.others, others)
            pairs.append((paths["faulty"], paths["clean"]))
        first, *more = pairs
        result.judgement = judge(scenario, *first, more=more)
    # A job that hangs, or a preparation that fails, is this scenario's alone: hours of others are kept.
    except (DrivetrainError, AssertionError, subprocess.SubprocessError, OSError) as error:
        result.why_not = str(error).strip().splitlines()[-1] if str(error).strip() else repr(error)
        return result
    clean = [mean_step_s(path) for _, path in pairs]
    if len(clean) > 1:
        result.noise = (max(clean) - min(clean)) / 2 / statistics.fmean(clean)
    least = max(LEAST_CLAIMED, result.noise or 0.0)
    result.clean_runs = len(clean)
    for _, path in pairs:
        claimed = unfounded(scenario, diagnosed(path), least)
        result.loud_runs += bool(claimed)
        result.unfounded += [
            f"{finding['cause']}: {'cost unknown' if finding['share'] is None else format(finding['share'], '.1%')}"
            for finding in claimed
        ]
    return result


def _quiet_run(job: Job, pace: Pace) -> tuple[Path, float]:
    """The least disturbed of some attempts, and what others took of the machine meanwhile."""
    best: tuple[Path, float] | None = None
    for _ in range(pace.attempts):
        wait_until_quiet(patience_s=pace.patience_s)
        others: list[float] = []
        with _others(others):
            path = run(job)
        if best is None or others[0] < best[1]:
            best = path, others[0]
        if best[1] <= DISTURBED:
            break
    assert best is not None
    return best


@contextlib.contextmanager
def _others(told: list[float]) -> Iterator[None]:
    """What processes that are neither this one nor its children took, over what all CPUs had to give."""
    before = _taken()
    yield
    after = _taken()
    busy, own, seconds = (now - then for now, then in zip(after, before, strict=True))
    told.append(max(0.0, busy - own) / (seconds * (os.cpu_count() or 1)))


def _taken() -> tuple[float, float, float]:
    """Now: seconds of all CPUs in programs, seconds of ours and of children that have ended, seconds since the start
    of the machine. Interrupts are left out, which packets of our own cause."""
    user, nice, system, _idle, _iowait, _irq, _softirq, steal = (
        int(value) for value in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    )
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    own = sum(one.ru_utime + one.ru_stime for one in usage)
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return (user + nice + system + steal) / TICKS_PER_S, own, uptime


def line_of(result: Result) -> str:
    """One line of the list."""
    judgement, name = result.judgement, result.scenario.name
    if judgement is None:
        return f"{name:45} not run: {result.why_not}"
    found = "unknown" if judgement.cost_ms is None else f"{judgement.cost_ms:.1f} ms"
    right = {True: "right", False: "wrong", None: "cost not known"}[judgement.cost_right]
    return (
        f"{name:45} {'named' if judgement.names_right else 'NOT NAMED'}, {right}: found {found}, true "
        f"{judgement.true_ms:.1f} ms [{judgement.low_ms:.1f}, {judgement.high_ms:.1f}] of {judgement.faulty_ms:.1f} ms "
        f"({judgement.share:.0%}); first: {', '.join(judgement.found[:3]) or 'nothing'}; others took up to "
        f"{result.others:.0%}"
        + (f"; clean runs claim {', '.join(result.unfounded)}" if result.unfounded else "")
    )


def claims_of(results: Sequence[Result]) -> list[Claim]:
    """Named, right, quiet where nothing is wrong; then every scenario."""
    judged = {one.scenario.name: one.judgement for one in results if one.judgement is not None}
    counted = {name: one for name, one in judged.items() if one.relevant}
    small = [f"{name} {one.share:.0%}" for name, one in judged.items() if not one.relevant]
    absent = [f"{one.scenario.name}: {one.why_not}" for one in results if one.judgement is None]
    claims = []
    if counted:
        claims += [_named(counted, small, absent), *_costs(counted)]
    clean = sum(one.clean_runs for one in results)
    if clean:
        claims.append(_quiet(results, clean))
    claims += [_of(one, result) for result in results if (one := result.judgement) is not None]
    return claims


def _named(counted: Mapping[str, Judgement], small: Sequence[str], absent: Sequence[str]) -> Claim:
    right = [name for name, one in counted.items() if one.names_right]
    wrong = [f"{name} (first: {one.found[:2]})" for name, one in counted.items() if not one.names_right]
    return _share(
        f"scenarios whose first finding names the planted cause, of those that cost {LEAST_SHARE:.0%} of a step or "
        f"more, over {NAMED:.0%}",
        len(right),
        len(counted),
        f"{len(right)} of {len(counted)} (at least {ENOUGH} are asked for); not named: {'; '.join(wrong) or 'none'}; "
        f"cost less: {'; '.join(small) or 'none'}; not run: {'; '.join(absent) or 'none'}",
    )


def _costs(counted: Mapping[str, Judgement]) -> list[Claim]:
    told = {name: one for name, one in counted.items() if one.cost_right is not None}
    silent = [name for name in counted if name not in told]
    if not told:
        return []
    right = [name for name, one in told.items() if one.cost_right]
    wrong = [
        f"{name} ({one.cost_ms or 0.0:.1f} ms, true {one.true_ms:.1f} ms)"
        for name, one in told.items()
        if not one.cost_right
    ]
    return [
        _share(
            f"scenarios whose cost is found within {WITHIN:.0%} of the true one, of those whose finding states a cost, "
            f"over {NAMED:.0%}",
            len(right),
            len(told),
            f"{len(right)} of {len(told)}; further off: {'; '.join(wrong) or 'none'}; the finding says that its cost "
            f"is unknown: {'; '.join(silent) or 'none'}",
        )
    ]


def _quiet(results: Sequence[Result], clean: int) -> Claim:
    loud = [f"{one.scenario.name}: {', '.join(one.unfounded)}" for one in results if one.unfounded]
    return _share(
        f"clean runs without a finding above max({LEAST_CLAIMED:.0%}, noise), over 100%",
        clean - sum(one.loud_runs for one in results),
        clean,
        "a finding is what claims a fault: the account's own classes of ordinary work (computation, launches, Python, "
        "and between ranks communication) are in every step, and are none; of ranks, what is looked for is the "
        f"scenario's own cause; found: {'; '.join(loud) or 'nothing'}",
        target=1.0,
    )


def _share(claim: str, right: int, total: int, note: str, *, target: float = NAMED) -> Claim:
    low, high = wilson(right, total)
    ratios = (right / total / target, low / target, high / target)
    return Claim(claim, "none", "", [], [], *ratios, 1.0, note)


def _of(one: Judgement, result: Result) -> Claim:
    """For information: the cost found over the true one."""
    known = one.cost_ms is not None and one.cost_ms > 0 and one.true_ms > 0
    ratio = (one.cost_ms or 0.0) / one.true_ms if known else 0.0
    times: list[list[float]] = [[one.faulty_ms / 1e3], [one.clean_ms / 1e3]]
    return Claim(
        f"{one.scenario}: cost found over true cost; the step with the fault (ours) and without (theirs)",
        "without the fault",
        "",
        *times,
        ratio,
        ratio,
        ratio,
        0.0,
        f"{result.scenario.why}; {line_of(result).removeprefix(one.scenario).strip()}",
    )


def chosen(names: Sequence[str], every: Sequence[Scenario]) -> list[Scenario]:
    """The scenarios of some names; all without any.

    Raises:
        SystemExit: there is none of a name.
    """
    by_name = {one.name: one for one in every}
    for name in names:
        if name not in by_name:
            close = difflib.get_close_matches(name, by_name, n=1, cutoff=0.0)
            sys.exit(f"--only {name!r}: no such scenario; the nearest is {close[0]!r}, --list prints all")
    return [by_name[name] for name in names] if names else list(every)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="four scenarios, one pair of runs each")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="this scenario; repeatable"
    )
    parser.add_argument("--list", action="store_true", help="print the scenarios and how each fault is made")
    parser.add_argument("--pairs", type=int, default=3, help="pairs of runs of each scenario (default 3)")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--folder", type=Path, default=None, help="keep corpora and runs here")
    options = parser.parse_args(arguments)
    if options.pairs < 1:
        parser.error(f"--pairs {options.pairs}: at least 1")
    every = all_scenarios()
    if options.list:
        for scenario in every:
            print(f"{scenario.name} [{scenario.where}]: {scenario.why}")
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    names = options.only or (list(QUICK) if options.quick else [])
    pace = Pace(1, 1, 0.0) if options.quick else Pace(options.pairs, 2, 120.0)
    results = []
    with tempfile.TemporaryDirectory(prefix="diagnosis-") as temporary:
        place = Place((options.folder or Path(temporary)).resolve())
        for scenario in chosen(names, every):
            results.append(measured(scenario, place, pace))
            print(line_of(results[-1]), file=sys.stderr, flush=True)
    claims: list[Any] = claims_of(results)
    for claim in claims:
        if claim.target:
            print(f"{claim.claim}: {claim.ratio:.2f}; {claim.note}", file=sys.stderr)
    if options.json:
        print(document(claims))


if __name__ == "__main__":
    main()
