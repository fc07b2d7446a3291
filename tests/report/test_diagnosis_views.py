"""A diagnosis by symptom and in the order of a search."""

import pytest

from drivetrain.diagnose import Facts, diagnose
from drivetrain.diagnose.causes import SEARCH
from drivetrain.measure.account import CLASSES, Account, RankAccount, StepAccount, Window
from drivetrain.measure.waterfall import RankTime, waterfall
from drivetrain.report.diagnosis_views import VIEWS, communication_verdict

MS = 1_000_000


def job(**classes: int) -> Facts:
    """Of traces, one step; underscores stand for dots."""
    times = {name.replace("_", ".", 2): ms * MS for name, ms in classes.items()}
    total = sum(times.values())
    window = Window(total, total, 0, None, None, None, None, None, None, times, 0)
    rank = RankAccount(0, "device", window, (StepAccount(1, window, 0, total, False),))
    drawn = waterfall([RankTime(0, total, times)], None, order=CLASSES, reason="no peak")
    return Facts(Account(health=(), ranks=(rank,), waterfall=drawn), "traces")


def test_the_search_goes_through_its_areas_in_order_with_their_cost() -> None:
    text = VIEWS["search"](diagnose(job(compute_norm=40, data_loader=30, communication_dp_wait=30)))
    places = [text.index(f"{number}. {title}") for number, (_, title) in enumerate(SEARCH, start=1)]
    assert places == sorted(places)
    assert "1. data loading: 30.00 ms, 30.0% of a step" in text
    assert "exposed communication 30.0% of a step: bad" in text
    assert "no MFU: no peak" in text
    assert "nothing found" in text


@pytest.mark.parametrize(("share", "word"), [(0.05, "good"), (0.1, "fair"), (0.25, "fair"), (0.3, "bad")])
def test_communication_is_judged_by_its_share(share: float, word: str) -> None:
    assert communication_verdict(share) == word


def test_a_symptom_is_followed_by_its_cause_and_one_first_remedy() -> None:
    text = VIEWS["symptoms"](diagnose(job(compute_norm=70, data_loader=30)))
    block = text.split("\n\n")[2]
    assert block.startswith("the device pauses at the beginning of each step  [data]")
    assert "30.00 ms: data.waiting, data.loader" in block
    assert "try data_workers" in block
    assert "prefetch" not in block, "one remedy, the first"
