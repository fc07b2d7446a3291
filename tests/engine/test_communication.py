"""What becomes of flights: metrics, lines of a rank's file, the summary; and where waits cannot be known."""

import time
from typing import Any

import pytest
import torch.distributed as dist

from drivetrain.engine.communication import Communication, metrics_of, why_unseen
from drivetrain.engine.parallel.clocks import Alignment
from drivetrain.engine.parallel.flights import Flights
from drivetrain.measure.metrics import METRICS
from drivetrain.measure.overlap import StepOverlap, flights_of


class _Named:
    """Stands for a process group."""

    group_name = "7"


@pytest.fixture
def flights(monkeypatch: pytest.MonkeyPatch) -> Flights:
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _group: [0, 2])
    return Flights()


def step(flights: Flights, *, groups: tuple[str, ...] = ("dp",)) -> float:
    """One in which each group has a collective that is waited for at once."""
    started = time.perf_counter()
    flights.begin_step()
    for group in groups:
        flight = flights.begin(group, "all_reduce", 100, _Named())  # type: ignore[arg-type]
        if flight is not None:
            with flight.waiting():
                time.sleep(0.001)
    return started


def test_a_step_s_flights_become_metrics_that_the_registry_knows(flights: Flights) -> None:
    followed = Communication(flights)
    started = step(flights, groups=("tp", "dp", "dp_shard", "dp_replicate", "pp", "cp", "world"))
    overlap = followed.overlap(followed.take(), started, time.perf_counter())
    assert overlap is not None
    found = metrics_of(overlap, None)
    assert found.keys() <= METRICS.keys()
    assert found["time/comm_overlap_frac"] == overlap.hidden_ns / overlap.wire_ns
    assert found["time/comm_exposed_s"] == pytest.approx(overlap.exposed_ns / 1e9, rel=1e-12)
    assert {key.rpartition("_")[0].rpartition("_")[2] for key in found if key.startswith("comm/tp")} == {
        "wire",
        "hidden",
        "exposed",
    }


def test_nothing_is_called_hidden_or_exposed_where_not_every_wait_is_seen(flights: Flights) -> None:
    followed = Communication(flights, "somebody waits")
    started = step(flights)
    overlap = followed.overlap(followed.take(), started, time.perf_counter())
    assert overlap is not None
    assert metrics_of(overlap, followed.unseen).keys() == {"comm/dp_wire_s", "comm/dp_exposed_s"}
    followed.add_steady(overlap)
    document, why = followed.to_document()
    assert why == "somebody waits"
    assert document is not None
    assert document["overlap_frac"] is document["exposed_frac"] is document["hidden_s"] is None
    assert document["groups"]["dp"]["hidden_s"] is None
    assert document["groups"]["dp"]["calls"] == 1


def test_a_step_with_more_flights_than_are_kept_has_no_figures(
    flights: Flights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drivetrain.engine.parallel.flights.MOST_FLIGHTS", 2)
    followed = Communication(flights)
    started = step(flights, groups=("tp",) * 3)
    assert followed.overlap(followed.take(), started, time.perf_counter()) is None
    document, why = followed.to_document()
    assert document is None
    assert "few enough" in (why or "")
    started = step(flights)
    assert followed.overlap(followed.take(), started, time.perf_counter()) is not None, (
        "the next step is its own"
    )


def test_what_passed_between_two_steps_costs_neither(
    flights: Flights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drivetrain.engine.parallel.flights.MOST_FLIGHTS", 2)
    followed = Communication(flights)
    step(flights, groups=("tp",) * 3)  # an evaluation, as it were
    started = step(flights)
    overlap = followed.overlap(followed.take(), started, time.perf_counter())
    assert overlap is not None
    assert set(overlap.groups) == {"dp"}


def test_the_summary_is_a_mean_of_steady_steps(flights: Flights) -> None:
    followed = Communication(flights)
    assert followed.to_document() == (None, "no step of steady state")
    whole = StepOverlap()
    for groups in (("dp",), ("dp", "dp", "tp")):
        started = step(flights, groups=groups)
        overlap = followed.overlap(followed.take(), started, time.perf_counter())
        assert overlap is not None
        followed.add_steady(overlap)
        whole += overlap
    document, why = followed.to_document()
    assert why is None
    assert document is not None
    assert document["steps"] == 2
    assert document["groups"]["dp"]["calls"] == 1.5
    assert document["groups"]["dp"]["kinds"]["all_reduce"]["bytes"] == 150
    assert document["groups"]["tp"]["calls"] == 0.5
    assert document["exposed_frac"] == pytest.approx(whole.exposed_ns / whole.window_ns)
    assert document["exposed_s"] == pytest.approx(whole.exposed_ns / 2e9)


def test_a_rank_s_line_names_each_group_once_and_gives_back_its_flights(flights: Flights) -> None:
    followed = Communication(flights)
    step(flights)
    taken = followed.take()
    assert followed.line_of(taken) is None, "nobody asked for the times of ranks"
    followed.clock = Alignment(5, 1, 0)
    lines: list[Any] = [followed.line_of(taken)]
    assert taken is not None
    assert flights_of(lines[0]["flights"]) == [flight.record() for flight in taken.flights]
    assert lines[0]["clock"].items() >= {"offset_ns": 5, "error_ns": 1, "at_ns": 0}.items()
    step(flights)
    lines.append(followed.line_of(followed.take()))
    assert [line["queues"] for line in lines] == [{"7": [0, 2]}, {}]


def test_one_process_has_nothing_to_follow() -> None:
    followed = Communication(None)
    assert followed.take() is None
    assert followed.overlap(None, 0.0, 1.0) is None
    document, why = followed.to_document()
    assert document is None
    assert why == "one process: nothing to communicate"


@pytest.mark.parametrize(
    ("device", "pipeline", "stage", "replicas", "words"),
    [
        ("cpu", 1, 0, 1, None),
        ("cpu", 1, 3, 1, None),
        ("cpu", 1, 2, 2, None),
        ("cpu", 2, 0, 1, "schedules wait"),
        ("cpu", 1, 3, 2, "over replicas"),
        ("cuda", 1, 0, 1, "streams"),
    ],
)
def test_where_waits_are_not_known_in_full_says_why(
    device: str, pipeline: int, stage: int, replicas: int, words: str | None
) -> None:
    why = why_unseen(device, pipeline=pipeline, zero_stage=stage, replicas=replicas)
    assert why is None if words is None else words in (why or "")
