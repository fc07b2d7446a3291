"""A diagnosis by symptom and in the order of a search."""

from dataclasses import replace

import pytest

from drivetrain.diagnose import Facts, Finding, diagnose
from drivetrain.diagnose.causes import CAUSES, SEARCH
from drivetrain.diagnose.loss import loss
from drivetrain.measure.account import CLASSES, Account, RankAccount, StepAccount, Window
from drivetrain.measure.waterfall import RankTime, waterfall
from drivetrain.report.diagnosis_text import first_remedy
from drivetrain.report.diagnosis_views import communication_verdict, search_text, symptoms_text

MS = 1_000_000


def part(facts: Facts, cause: str, part_of: str, cost_ms: float) -> Finding:
    return loss(facts, "a rule", cause, "a part", cost_ms * MS, evidence=(), part_of=part_of)


def job(**classes: int) -> Facts:
    """Of traces, one step; underscores stand for dots."""
    times = {name.replace("_", ".", 2): ms * MS for name, ms in classes.items()}
    total = sum(times.values())
    window = Window(total, total, 0, None, None, None, None, None, None, times, 0)
    rank = RankAccount(0, "device", window, (StepAccount(1, window, 0, total, False),))
    drawn = waterfall([RankTime(0, total, times)], None, order=CLASSES, reason="no peak")
    return Facts(Account(health=(), ranks=(rank,), waterfall=drawn), "traces")


def test_the_search_goes_through_its_areas_in_order_with_their_cost() -> None:
    text = search_text(diagnose(job(compute_norm=40, data_loader=30, communication_dp_wait=30)))
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
    text = symptoms_text(diagnose(job(compute_norm=70, data_loader=30)))
    block = text.split("\n\n")[2]
    assert block.startswith("the device pauses at the beginning of each step  [data]")
    assert "30.00 ms: data.waiting, data.loader" in block
    assert "try data_workers" in block
    assert "prefetch" not in block, "one remedy, the first"


def test_only_what_explains_half_of_a_class_takes_its_place_among_the_symptoms() -> None:
    facts = job(compute_norm=70, data_loader=30)
    plain = diagnose(facts)

    def seen(cost_ms: float) -> str:
        told = part(facts, "data.slow_read", "data.loader", cost_ms)
        return symptoms_text(replace(plain, findings=(told, *plain.findings)))

    assert "data.slow_read" in seen(2)
    assert "data.waiting" in seen(2), "2 of 30 ms do not explain it"
    assert "data.waiting" not in seen(15)


def test_an_area_counts_the_parts_of_losses_that_belong_elsewhere_and_no_time_twice() -> None:
    facts = job(compute_norm=70, data_loader=30)
    plain = diagnose(facts)
    within = part(facts, "data.slow_read", "data.loader", 20)
    padding = part(facts, "data.padding", "compute", 10)
    text = search_text(replace(plain, findings=(within, padding, *plain.findings)))
    assert "1. data loading: 40.00 ms, 40.0% of a step" in text
    assert "2. communication that nothing hides, with waiting and bubbles: nothing found" in text


def test_an_area_says_how_many_of_its_costs_are_unknown() -> None:
    text = search_text(diagnose(job(compute_matmul=70, data_loader=30)))
    assert "3. operator efficiency: 1 of unknown cost" in text


def test_without_a_remedy_the_causes_advice_is_said_as_it_stands() -> None:
    facts = job(data_loader=30)
    bare = replace(part(facts, "kernels.fallback", "compute", 1), no_remedy=None)
    assert first_remedy(bare) == CAUSES["kernels.fallback"].advice
