"""Advice on buckets and chunks from the idle times of both sides, on figures made by hand."""

import math
from dataclasses import replace
from typing import Any

import pytest
from test_diagnosis import MS, account, config_with

from drivetrain.archive.collective_waits import RunCollectives
from drivetrain.config import LaunchFacts
from drivetrain.diagnose import Facts, Finding, diagnose
from drivetrain.diagnose.moving import moved_s
from drivetrain.diagnose.rules.overlap_advice import Pieces, judge
from drivetrain.measure.collective_waits import Matched

STEP_S = 0.1


def communication(
    *,
    calls: float = 4,
    bytes: float = 40e6,
    wire_s: float = 0.06,
    exposed_s: float = 0.02,
    backward_idle_s: float | None = 0.03,
    fixed: float | None = None,
    rate: float | None = None,
    group: str = "dp",
    kind: str = "all_reduce",
) -> dict[str, Any]:
    """What a summary holds of a step of 100 ms."""
    return {
        "steps": 20,
        "step_s": STEP_S,
        "exposed_s": exposed_s,
        "groups": {
            group: {
                "idle_s": None if backward_idle_s is None else backward_idle_s + 0.01,
                "backward_idle_s": backward_idle_s,
                "kinds": {
                    kind: {
                        "calls": calls,
                        "bytes": bytes,
                        "wire_s": wire_s,
                        "exposed_s": exposed_s,
                        "fixed_s_per_call": fixed,
                        "bytes_per_s": rate,
                    }
                },
            }
        },
    }


def advice(found: dict[str, Any] | None, *overrides: str) -> list[Finding]:
    made = account({"compute.matmul": 70 * MS, "communication.dp.transfer": 30 * MS})
    facts = Facts(made, "a run", config_with(*overrides), LaunchFacts(world_size=2), communication=found)
    return [one for one in diagnose(facts).findings if one.rule == "overlap_advice"]


def test_a_wire_that_stood_idle_in_backward_while_its_rest_was_waited_for_wants_smaller_buckets() -> None:
    (finding,) = advice(communication(), "overlap.bucket_size_mb=10")
    assert "too large" in finding.text
    assert finding.share == pytest.approx(0.2)
    assert finding.cost_ns == pytest.approx(20 * MS)
    assert finding.part_of == "communication"
    (remedy,) = finding.remedies
    assert (remedy.name, dict(remedy.change or {})) == ("ddp_bucket", {"overlap.bucket_size_mb": 5.0})
    assert remedy.ratio == pytest.approx(100 / 80)
    assert any("20.0 ms" in one.text and "30.0 ms" in one.text for one in finding.evidence)


def test_no_more_is_lost_than_had_room_or_calls_cost() -> None:
    # Of 50 ms of waiting 30 ms could have travelled under backward: the rest takes longer than that.
    (serial,) = advice(communication(calls=1, wire_s=0.05, exposed_s=0.05), "overlap.bucket_size_mb=0")
    assert serial.cause == "communication.serial"
    assert serial.cost_ns == pytest.approx(30 * MS)
    # 200 calls of 0.1 ms are 20 of the 40 ms that are waited for.
    small = communication(calls=200, exposed_s=0.04, backward_idle_s=0.001, fixed=1e-4, rate=1e9)
    (calls,) = advice(small, "overlap.bucket_size_mb=0.2")
    assert calls.cause == "communication.buckets_too_small"
    assert calls.cost_ns == pytest.approx(20 * MS)


def test_waiting_for_a_rank_is_no_matter_of_size() -> None:
    # By the account three quarters of what rank 0 waits for is a rank that has not come.
    classes = {
        "compute.matmul": 80 * MS,
        "communication.dp.wait": 15 * MS,
        "communication.dp.transfer": 5 * MS,
    }
    config, launch = config_with("overlap.bucket_size_mb=10"), LaunchFacts(world_size=2)
    facts = Facts(account(classes), "a run", config, launch, communication=communication())
    (split,) = [one for one in diagnose(facts).findings if one.rule == "overlap_advice"]
    assert split.cost_ns == pytest.approx(5 * MS), "a quarter of 20 ms"
    # The ranks' own records know it of these very collectives.
    told = RunCollectives(2, [collective(exposed_ms) for exposed_ms in (3, 5)])
    (exact,) = [
        one for one in diagnose(replace(facts, collectives=told)).findings if one.rule == "overlap_advice"
    ]
    assert exact.cost_ns == pytest.approx(4 * MS)


def test_collectives_that_could_not_be_matched_do_not_say_that_nothing_moved() -> None:
    facts = Facts(account(), "a run", collectives=RunCollectives(2, [collective(3)]))
    assert moved_s(facts, "dp", "all_reduce", 0.02) == pytest.approx(0.0015)
    assert moved_s(facts, "tp", "all_reduce", 0.02) == 0.02, "of tensor parallelism none was matched"


def collective(exposed_ms: int) -> Matched:
    """An all-reduce of two ranks."""
    waits = {0: 12 * MS, 1: 0}
    return Matched("dp", "all_reduce", 10, 0, 0, (0, 1), 1, waits, waits, {0: exposed_ms * MS, 1: 0}, 0)


def test_all_gradients_at_once_are_cut_in_parts_of_what_travelled() -> None:
    # No buckets: one reduction of 40 MB after backward, under which the wire was idle all along.
    found = communication(calls=1, wire_s=0.03, exposed_s=0.03, backward_idle_s=0.06)
    (finding,) = advice(found, "overlap.bucket_size_mb=0")
    assert dict(finding.remedies[0].change or {}) == {"overlap.bucket_size_mb": 20.0}


def test_a_wire_full_of_the_fixed_cost_of_calls_wants_larger_buckets() -> None:
    # 200 calls of 0.2 ms each are 40 of 60 ms.
    found = communication(calls=200, exposed_s=0.02, backward_idle_s=0.001, fixed=2e-4, rate=2e9)
    (finding,) = advice(found, "overlap.bucket_size_mb=0.2")
    assert "too small" in finding.text
    # sqrt(40 MB x 0.2 ms x 2 GB/s) = 4 MB, at most four times the present size.
    assert dict(finding.remedies[0].change or {}) == {"overlap.bucket_size_mb": 0.8}


def test_the_size_to_try_is_where_both_costs_are_equal() -> None:
    found = communication(fixed=1e-3, rate=1e9)
    (finding,) = advice(found, "overlap.bucket_size_mb=10")
    best_mb = math.sqrt(40e6 * 1e-3 * 1e9) / 1e6
    assert best_mb == pytest.approx(6.32, abs=0.01)
    assert dict(finding.remedies[0].change or {}) == {"overlap.bucket_size_mb": 6.3}


def test_bytes_that_nothing_is_long_enough_to_hide_are_no_matter_of_size() -> None:
    found = communication(wire_s=0.08, exposed_s=0.04, backward_idle_s=0.002, fixed=1e-4, rate=0.5e9)
    (finding,) = advice(found, "overlap.bucket_size_mb=2")
    assert "no size of buckets" in finding.text
    assert not any("bucket_size_mb" in remedy.field for remedy in finding.remedies)


def test_one_reduction_of_all_gradients_is_not_made_larger() -> None:
    # Half of it is the fixed cost of its call, and the wire had little room: there is no second to join it to.
    found = communication(
        calls=1, bytes=4e6, exposed_s=0.02, wire_s=0.02, backward_idle_s=0.001, fixed=0.01, rate=1e9
    )
    (finding,) = advice(found, "overlap.bucket_size_mb=25")
    assert finding.cause == "communication.too_much"
    sizes = [(remedy.change or {}).get("overlap.bucket_size_mb") for remedy in finding.remedies]
    assert all(size is None or size < 4 for size in sizes), "nothing larger than what travels already"
    serial = communication(calls=1, wire_s=0.03, exposed_s=0.03, backward_idle_s=0.06)
    (other,) = advice(serial, "overlap.bucket_size_mb=0")
    assert other.cause == "communication.serial"


def test_reduce_scatters_are_looked_at_where_gradients_are_sharded() -> None:
    found = communication(group="dp_shard", kind="reduce_scatter")
    assert advice(found, "parallelism.zero_stage=2", "overlap.bucket_size_mb=10")
    assert not advice(found, "overlap.bucket_size_mb=10"), "stage 0 reduces over dp"
    assert not advice(found, "parallelism.zero_stage=3"), "stage 3 has no buckets"


def test_what_is_hidden_well_enough_is_not_claimed() -> None:
    assert not advice(communication(exposed_s=0.0005), "overlap.bucket_size_mb=10")


@pytest.mark.parametrize(
    "found", [None, communication(backward_idle_s=None), {**communication(), "exposed_s": None}]
)
def test_nothing_is_said_where_waits_are_not_known(found: dict[str, Any] | None) -> None:
    assert not advice(found, "overlap.bucket_size_mb=10")


@pytest.mark.parametrize("room", [0.0, 0.004, 0.02])
@pytest.mark.parametrize(("fixed", "rate"), [(None, None), (1e-4, 1e9), (5e-3, 1e8), (1e-6, 1e10)])
@pytest.mark.parametrize("calls", [1, 8, 300])
def test_the_size_to_try_is_always_on_the_side_that_was_idle(
    room: float, fixed: float | None, rate: float | None, calls: int
) -> None:
    pieces = Pieces(calls, 40e6, 0.06, 0.01, room, fixed, rate)
    verdict = judge(pieces)
    if verdict.kind == "too_large":
        assert room >= 0.005
        assert 0.25 <= verdict.factor < 1
    elif verdict.kind == "too_small":
        assert room < 0.005
        assert 1 < verdict.factor <= 4
    else:
        assert verdict.factor == 1


def chunks(*overrides: str, **figures: Any) -> Finding | None:
    found = communication(group="tp", **{"calls": 40, "bytes": 40e6, **figures})
    findings = advice(found, "parallelism.tensor_model_parallel_size=2", *overrides)
    assert len(findings) <= 1
    return findings[0] if findings else None


def test_products_that_stand_while_everything_travels_at_once_want_chunks() -> None:
    finding = chunks()
    assert finding is not None
    assert "too few chunks" in finding.text
    assert [(one.name, dict(one.change or {})) for one in finding.remedies] == [
        ("tp_chunks", {"overlap.tp_chunks": "2"})
    ]
    # Each product sends 1 MB: sqrt(1 MB x 0.0625 ms x 1 GB/s) = 0.25 MB, four chunks.
    tuned = chunks(fixed=6.25e-5, rate=1e9)
    assert tuned is not None
    assert dict(tuned.remedies[0].change or {}) == {"overlap.tp_chunks": "4"}


def test_chunks_that_cost_more_than_they_hide_are_too_many() -> None:
    finding = chunks("overlap.tp_chunks=16", calls=640, backward_idle_s=-0.009, fixed=5e-5, rate=1e10)
    assert finding is not None
    assert "too many chunks" in finding.text
    # sqrt(1 MB x 0.05 ms x 10 GB/s) = 0.7 MB; at most four times the present 62.5 kB.
    assert dict(finding.remedies[0].change or {}) == {"overlap.tp_chunks": "4"}


def test_what_was_tuned_product_by_product_is_not_one_number_to_be_changed() -> None:
    assert chunks("overlap.tp_chunks=tuned") is None


def test_a_best_size_near_the_present_one_still_gives_another_number_of_chunks() -> None:
    # sqrt(1 MB x 0.9 ms x 1 GB/s) = 0.95 MB: a little smaller than one piece, and one piece was too large.
    finding = chunks(fixed=9e-4, rate=1e9)
    assert finding is not None
    assert dict(finding.remedies[0].change or {}) == {"overlap.tp_chunks": "2"}
