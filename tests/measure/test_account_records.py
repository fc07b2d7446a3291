"""Records of an account: the contract's keys, and no record whose classes do not close."""

from typing import Any

import pytest

from drivetrain.measure.account import (
    CLASS_GROUPS,
    CLASSES,
    Account,
    Collective,
    RankAccount,
    StepAccount,
    Window,
)


def window(**changed: Any) -> Window:
    values: dict[str, Any] = {
        "window_ns": 100,
        "busy_ns": 60,
        "idle_ns": 40,
        "compute_ns": 50,
        "communication_ns": 20,
        "overlapped_communication_ns": 10,
        "exposed_communication_ns": 10,
        "copy_ns": 0,
        "exposed_copy_ns": 0,
        "classes": {"compute.matmul": 50, "communication.dp.unsplit": 10, "data.loader": 30},
        "unexplained_ns": 10,
    }
    return Window(**{**values, **changed})


def test_the_document_has_exactly_the_keys_of_the_contract() -> None:
    step = StepAccount(7, window(), 0, 100, first=True)
    collective = Collective(0, "dp", "all_reduce", 8, 1, 5, 1, 9, {0: 5, 1: 0})
    account = Account((), (RankAccount(0, "device", window(), (step,)),), (collective,), 3)
    document = account.to_document()
    assert list(document) == [
        "health",
        "ranks",
        "collectives",
        "clock_residual_ns",
        "waterfall",
        "verdicts",
    ]
    rank = document["ranks"][0]
    assert list(rank) == ["rank", "whole", "steps"]
    keys = ["window_ns", "busy_ns", "idle_ns", "compute_ns", "communication_ns"]
    keys += ["overlapped_communication_ns", "exposed_communication_ns", "copy_ns", "exposed_copy_ns"]
    keys += ["classes", "unexplained_ns"]
    assert list(rank["whole"]) == keys
    assert list(rank["steps"][0]) == ["step", *keys]
    assert document["collectives"][0] == {
        "index": 0,
        "group": "dp",
        "kind": "all_reduce",
        "bytes": 8,
        "last_rank": 1,
        "start_skew_ns": 5,
        "end_skew_ns": 1,
        "transfer_ns": 9,
        "wait_ns": {"0": 5, "1": 0},
    }


@pytest.mark.parametrize(
    "changed",
    [
        {"unexplained_ns": 11},
        {"classes": {"compute.matmul": 101}, "unexplained_ns": -1},
        {"classes": {"compute.matmul": 90, "idle": 0}},
        {"classes": {"no.class": 90}},
        {"busy_ns": 101},
    ],
)
def test_a_window_that_does_not_close_cannot_be_made(changed: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        window(**changed)


def test_a_group_adds_up_its_classes() -> None:
    assert window().group_ns("communication") == 10
    assert window().group_ns("data") == 30
    assert sum(window().group_ns(group) for group in CLASS_GROUPS) == 90
    assert {name.split(".")[0] for name in CLASSES} == set(CLASS_GROUPS)


def test_the_first_recorded_step_is_left_out_of_steady_ones_unless_it_is_alone() -> None:
    first, second = (StepAccount(n, window(), 0, 100, first=n == 4) for n in (4, 5))
    assert RankAccount(0, "device", window(), (first, second)).steady_steps == (second,)
    assert RankAccount(0, "device", window(), (first,)).steady_steps == (first,)


def test_bus_bandwidth_of_a_kind_is_its_bytes_over_its_time() -> None:
    fast = Collective(0, "dp", "all_reduce", 8, 0, 0, 0, 10, {}, bus_bandwidth=30.0)
    slow = Collective(1, "dp", "all_reduce", 8, 0, 0, 0, 30, {}, bus_bandwidth=10.0)
    unknown = Collective(2, "dp", "all_reduce", None, 0, 0, 0, 30, {})
    assert Account((), (), (fast, slow, unknown)).bus_bandwidths == {("dp", "all_reduce"): 15.0}
