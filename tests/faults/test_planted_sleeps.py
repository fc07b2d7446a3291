"""Time lost on purpose in a profiled run, on two ranks: the account finds it where it was lost."""

import functools
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
from planted import Fault, Place, PlantedRun, planted_run

from drivetrain.archive.reader import open_run
from drivetrain.measure.account import CLASSES, Account, RankAccount
from drivetrain.trace.account import account_of
from drivetrain.trace.read import read_trace
from runs_on_the_spot import Tiny

SLEEP_S = 0.4
FIRST, LAST = 8, 15
SETTINGS = [
    "model.hidden_size=128",
    "model.seq_length=64",
    "training.micro_batch_size=4",
    "training.global_batch_size=16",
    f"training.train_iters={LAST}",
    "training.eval_iters=0",
    "profiler.profile=true",
    f"profiler.profile_step_start={FIRST}",
    f"profiler.profile_step_end={LAST + 1}",
    "profiler.profile_ranks=all",
    "overlap.bucket_size_mb=1",
]
# The first recorded step pays for the profiler's start.
STEPS = range(FIRST + 1, LAST + 1)
SLOW = 1
WAITS = [name for name in CLASSES if name.startswith("communication.") and name.endswith(".wait")]

ATTEMPTS = 3
"""Runs of which one must come out to the tolerance. Two ranks on shared cores are the same work, and a busy machine may
all the same take more from one of them: that is no error of the account's, which is right or wrong in each run."""

Runs = Callable[[Place, int], tuple[PlantedRun, Account]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_corpus: Path) -> Runs:
    """A run with a sleep in each step of rank 1 in the place asked for, and its account; another for each attempt."""

    @functools.cache
    def make(place: Place, attempt: int) -> tuple[PlantedRun, Account]:
        tiny = Tiny(tmp_path_factory.mktemp(place), tiny_corpus)
        run = planted_run(tiny.file, Fault(place, SLEEP_S, rank=SLOW), *SETTINGS)
        traces = sorted((run.path / "profile" / f"{FIRST}-{LAST}").glob("*.gz"))
        return run, account_of(read_trace(path) for path in traces)

    return make


def milliseconds(rank: RankAccount, *groups: str) -> list[float]:
    """Time of the classes in each step of ``STEPS``."""
    windows = [step.window for step in rank.steps if step.step in STEPS]
    assert len(windows) == len(STEPS)
    return [sum(window.group_ns(group) for group in groups) / 1e6 for window in windows]


def tolerance(planted_ms: float) -> float:
    return max(0.03 * planted_ms, 3.0)


def planted_ms(run: PlantedRun) -> float:
    assert set(run.slept_s[1 - SLOW]) == set(), "the other rank does not sleep"
    return statistics.median(run.slept_s[SLOW][step] for step in STEPS) * 1e3


@pytest.mark.long
@pytest.mark.parametrize(
    ("place", "name"), [("fetch", "data.loader"), ("sync", "host.sync"), ("forward", "host.python")]
)
def test_a_planted_sleep_is_found_in_its_class(runs: Runs, place: Place, name: str) -> None:
    for attempt in range(ATTEMPTS):
        run, account = runs(place, attempt)
        planted = planted_ms(run)
        steps = [line["time/step_s"] for line in open_run(run.path).metrics() if line["step"] in STEPS]
        whole = statistics.median(milliseconds(account.ranks[SLOW], name))
        assert whole >= planted - tolerance(planted), "it is all there, whatever else the class holds"
        # What the same code costs where nobody sleeps.
        found = whole - statistics.median(milliseconds(account.ranks[1 - SLOW], name))
        close = found == pytest.approx(planted, abs=tolerance(planted))
        if close and planted >= 0.2 * statistics.median(steps) * 1e3:
            break
    assert planted >= 0.2 * statistics.median(steps) * 1e3, "at least a fifth of a step"
    assert found == pytest.approx(planted, abs=tolerance(planted))


@pytest.mark.long
@pytest.mark.parametrize("place", ["fetch", "sync", "forward"])
def test_the_other_rank_waits_as_long_as_the_slow_one_is_late(runs: Runs, place: Place) -> None:
    for attempt in range(ATTEMPTS):
        run, account = runs(place, attempt)
        planted = planted_ms(run)
        fast, slow = account.ranks[1 - SLOW], account.ranks[SLOW]
        (worst, *_) = account.stragglers
        # What the account gives is of all recorded steps, the one that pays for the profiler's start among them.
        whole_ms = sum(fast.whole.group_ns(name) for name in WAITS) / len(fast.steps) / 1e6
        cost_ms = worst.cost_ns_per_step / 1e6
        # On a busy machine some of a wait lies under other work, where it costs nothing.
        given = cost_ms == pytest.approx(whole_ms, abs=tolerance(planted))
        # Two processes on shared cores are never equally fast: the sleep comes on top of that.
        late = own_ms(slow) - own_ms(fast)
        found = wait_ms(fast) - wait_ms(slow)
        if given and late > planted / 2 and found == pytest.approx(late, abs=tolerance(planted)):
            break
    assert cost_ms == pytest.approx(whole_ms, abs=tolerance(planted))
    assert late > planted / 2
    assert found == pytest.approx(late, abs=tolerance(planted))
    assert worst.rank == SLOW


def own_ms(rank: RankAccount) -> float:
    """Mean time of a step in which the rank did anything but wait for others or exchange bytes with them."""
    windows = [step.window for step in rank.steps if step.step in STEPS]
    return statistics.mean(window.window_ns - window.group_ns("communication") for window in windows) / 1e6


def wait_ms(rank: RankAccount) -> float:
    """Mean time of a step in which the rank waited for others to arrive at a collective."""
    return statistics.mean(milliseconds(rank, *WAITS))


@pytest.mark.long
def test_an_own_run_leaves_next_to_nothing_unexplained(runs: Runs) -> None:
    _, account = runs("sync", 0)
    for rank in account.ranks:
        assert rank.whole.unexplained_ns <= 0.01 * rank.whole.window_ns


def test_a_run_that_breaks_in_its_window_leaves_no_trace_of_it(tiny: Tiny) -> None:
    with pytest.raises(AssertionError, match="planted"):
        planted_run(tiny.file, Fault("break", first_step=LAST - 2), *SETTINGS, world_size=1)
    run = tiny.only_run()
    assert run.status() == "failed"
    assert run.metrics()[-1]["step"] >= FIRST, "the window had begun"
    assert [path for path in (run.path / "profile").rglob("*") if path.is_file()] == []
