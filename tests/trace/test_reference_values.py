"""Accounts of public traces against an exact oracle: equal to the nanosecond, whole and per step."""

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from drivetrain.measure.account import Account
from drivetrain.trace.account import account_of
from drivetrain.trace.read import read_trace

SHARED_TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"
REFERENCE = SHARED_TRACES / "reference_values.json"

pytestmark = pytest.mark.skipif(
    not REFERENCE.exists(),
    reason=f"the shared public traces are not here ({REFERENCE.name} beside the repository)",
)

FIGURES = {
    "window_us": "window_ns",
    "busy_us": "busy_ns",
    "idle_us": "idle_ns",
    "compute_us": "compute_ns",
    "comm_us": "communication_ns",
    "mem_us": "copy_ns",
    "comm_overlapped_by_compute_us": "overlapped_communication_ns",
    "exposed_comm_us": "exposed_communication_ns",
    "exposed_mem_us": "exposed_copy_ns",
}

THROUGH_A_FLOAT = {("nccl_parser_config", "whole", "window_us"), ("nccl_parser_config", "whole", "idle_us")}
"""The oracle is 1 ns off here: the trace's times have 16 digits, and it read the last one (…276.404 + 154.782 of a
trace that begins at …880.181: 660551.005 us) through a float. The digits of the file are what counts."""


def reference() -> dict[str, Any]:
    if not REFERENCE.exists():
        return {"cases": {}}
    found: dict[str, Any] = json.loads(REFERENCE.read_text(), parse_float=Decimal, parse_int=Decimal)
    return found


def cases() -> list[str]:
    """Cases of the reader's format that have an oracle."""
    return [
        name
        for name, case in reference()["cases"].items()
        if any(values["whole_trace"] is not None for values in (case["oracle"] or {}).values())
    ]


def account_of_case(name: str) -> Account:
    files = reference()["cases"][name]["files"]
    return account_of(
        (read_trace(SHARED_TRACES / file, cache=False) for file in files.values()), step_window="cpu"
    )


def nanoseconds(value: Decimal) -> int:
    found = value * 1000
    assert found == int(found)
    return int(found)


def compare(name: str, place: str, found: dict[str, Any], wanted: dict[str, Decimal]) -> None:
    for theirs, ours in FIGURES.items():
        expected = nanoseconds(wanted[theirs])
        if (name, place, theirs) in THROUGH_A_FLOAT:
            expected -= 1
        assert found[ours] == expected, f"{name}, {place}: {ours}"
    assert sum(found["classes"].values()) + found["unexplained_ns"] == found["window_ns"]


@pytest.mark.parametrize("name", cases())
def test_the_account_equals_the_oracle_to_the_nanosecond(name: str) -> None:
    oracle = reference()["cases"][name]["oracle"]
    ranks = account_of_case(name).to_document()["ranks"]
    assert len(ranks) == len(oracle)
    for rank in ranks:
        # A trace that does not say its rank is given one by the oracle's authors.
        wanted = oracle[str(rank["rank"])] if len(oracle) > 1 else next(iter(oracle.values()))
        compare(name, "whole", rank["whole"], wanted["whole_trace"])
        steps = {f"ProfilerStep#{step['step']}": step for step in rank["steps"]}
        assert list(steps) == list(wanted["steps_cpu_window"])
        for step, values in wanted["steps_cpu_window"].items():
            compare(name, step, steps[step], values)


def test_every_kineto_case_is_covered() -> None:
    assert len(cases()) == 15


def test_collectives_of_eight_ranks_equal_the_oracle() -> None:
    account = account_of_case("dlrm_8ranks")
    wanted = reference()["collectives_dlrm_8_ranks"]["oracle"]
    assert len(account.collectives) == len(wanted)
    for found, oracle in zip(account.collectives, wanted, strict=True):
        assert found.index == oracle["i"]
        assert found.last_rank == oracle["last"]
        assert found.start_skew_ns == nanoseconds(oracle["start_skew_us"])
        assert found.end_skew_ns == nanoseconds(oracle["end_skew_us"])
        assert found.transfer_ns == nanoseconds(oracle["pure_comm_us"])
        assert sum(found.wait_ns.values()) == nanoseconds(oracle["mean_wait_us"]) * 8
    assert account.stragglers[0].rank == 7
    assert account.stragglers[0].times_last == 5
    assert set(account.clock_offsets_ns.values()) == {0}, "one host, one clock: nothing to shift"
    assert account.clock_residual_ns is not None
    assert account.clock_residual_ns <= 7000


def test_a_clock_that_is_11_seconds_off_is_brought_back() -> None:
    """The file is worker 1's with its clock moved; against worker 0 the collectives come out as with the original."""
    original = reference()["cases"]["dlrm_8ranks"]["files"]
    names = [original["0"], original["1"]], [original["0"], "odd/clock_skew_rank1.json.gz"]
    true, moved = (
        account_of(read_trace(SHARED_TRACES / name, cache=False) for name in pair) for pair in names
    )
    assert abs(moved.clock_offsets_ns[1]) > 10**9
    assert moved.clock_residual_ns is not None
    assert moved.clock_residual_ns < 10_000
    assert any(finding.id == "clocks_shifted" for finding in moved.health)
    for ours, theirs in zip(moved.collectives, true.collectives, strict=True):
        assert abs(ours.transfer_ns - theirs.transfer_ns) < 10_000
        assert abs(ours.start_skew_ns - theirs.start_skew_ns) < 10_000
    assert [rank.whole.window_ns for rank in moved.ranks] == [rank.whole.window_ns for rank in true.ranks]


@pytest.mark.parametrize("scenario", ["ddp", "fsdp2", "slow_data"])
def test_four_ranks_without_a_device_close_and_align(scenario: str) -> None:
    files = sorted((SHARED_TRACES / "torch213-cpu-gloo").glob(f"{scenario}_rank*.json.gz"))
    account = account_of(read_trace(file, cache=False) for file in files)
    assert [rank.view for rank in account.ranks] == ["host"] * 4
    assert len(account.collectives) == {"ddp": 12, "fsdp2": 24, "slow_data": 12}[scenario]
    assert all(len(collective.wait_ns) == 4 for collective in account.collectives)
    assert not [finding for finding in account.health if finding.severity == "error"]
    for rank in account.ranks:
        assert [step.step for step in rank.steps] == [2, 3, 4]
        for step in rank.steps:
            unknown = step.window.unexplained_ns
            assert unknown <= step.window.window_ns // 100
            if scenario == "slow_data":  # 40 ms of sleep in the data set of every rank
                assert 40_000_000 <= step.window.classes["data.loader"] <= 50_000_000
