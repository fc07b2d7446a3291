"""The nearest published run: facts with their sources, the row chosen, and what explains the gap."""

from collections.abc import Mapping
from typing import Any

import pytest
from test_diagnosis import MS, account, config_with

from drivetrain.config import LaunchFacts, load_config
from drivetrain.diagnose import Facts, diagnose
from drivetrain.diagnose.published import Nearest, nearest_published, published_runs
from drivetrain.measure.peaks import device_names

BUSY: Mapping[str, int] = {
    "compute.matmul": 80 * MS,
    "communication.dp.transfer": 15 * MS,
    "data.loader": 5 * MS,
}


def of_a_7b_run(classes: Mapping[str, int] = BUSY, *, peak: bool = True, **settings: Any) -> Nearest:
    """On eight devices, sequences of 2048."""
    words = {
        "model.seq_length": 2048,
        "training.micro_batch_size": 2,
        "training.global_batch_size": 64,
        "data.num_workers": 0,
        **settings,
    }
    config = load_config("llama2-7b", [f"{leaf}={value}" for leaf, value in words.items()]).config
    return nearest_published(
        Facts(account(classes, peak=peak), "a run", config, LaunchFacts(world_size=8), device="A100-SXM-80GB")
    )


def test_every_fact_has_its_source_and_every_device_is_one_of_the_table() -> None:
    rows = published_runs()
    assert len(rows) > 50
    for row in rows:
        assert row.source, row.name
        assert row.settings or row.shares or row.mfu is not None
        assert row.mfu is None or (0 < row.mfu < 80 and row.mfu_rule)
        assert row.settings.get("device", "A100-SXM-80GB") in device_names()
    assert {"SOURCES A15", "SOURCES B8", "SOURCES C15", "SOURCES E10"} <= {row.source for row in rows}


def test_a_7b_model_on_eight_devices_is_compared_with_one_of_its_kind() -> None:
    near = of_a_7b_run()
    assert (near.run.settings["parameters_b"], near.run.settings["devices"]) == (7.0, 8)
    assert near.run.settings["device"] == "A100-SXM-80GB"
    assert near.comparable
    # The account's products reach a quarter of the peak.
    assert near.mfu is not None
    assert near.gap == pytest.approx((near.run.mfu or 0.0) - near.mfu)
    told = {one.what: one for one in near.differences}
    assert "micro_batch_size" not in told or told["micro_batch_size"].ours == 2
    assert "parameters_b" in told, "6.7 are not 7"
    document = near.to_document()
    assert document["source"] == near.run.source
    assert document["gap_reason"] is None


def test_bubbles_are_counted_on_both_sides_and_explain_points() -> None:
    near = of_a_7b_run(**{"parallelism.pipeline_model_parallel_size": 2, "training.global_batch_size": 16})
    told = {one.what: one for one in near.differences}
    # Two ranks, two micro-batches on each of four: 1/3 of a step; theirs has no pipeline.
    assert told["bubble"].ours == pytest.approx(1 / 3)
    assert told["bubble"].mfu_points == pytest.approx(100 / 3)
    assert near.explained == pytest.approx(100 / 3)
    assert near.differences[0].what == "bubble", "what explains points comes first"


def test_bubbles_are_not_counted_where_a_schedule_is_unknown_or_halves_backward() -> None:
    rows = {row.name: row for row in published_runs()}
    assert rows["GPT-175B on 64 x A100-SXM-80GB"].settings["stages_per_rank"] == 3
    halved = next(row for row in published_runs() if "ZB-2p" in row.name)
    assert "stages_per_rank" not in halved.settings
    two = {"parallelism.pipeline_model_parallel_size": 2, "training.global_batch_size": 16}
    ours = of_a_7b_run(**two, **{"parallelism.pipeline_schedule": "zbv"})
    assert "bubble" not in {one.what for one in ours.differences}


def test_a_published_fact_stands_once() -> None:
    facts = [
        (row.name, tuple(row.settings.items()), row.mfu)
        for row in published_runs()
        if "devices" in row.settings
    ]
    assert len(facts) == len(set(facts))


def test_what_a_source_contradicts_itself_is_said_with_its_figures() -> None:
    states = {row.name: row for row in published_runs() if row.case in ("A15", "C15")}
    assert all("contradict" in row.mfu_rule for row in states.values() if row.case == "A15")
    assert "at its start" in states["raising MFU: 51%"].change


def test_without_an_mfu_there_is_no_gap_and_the_reason_is_said() -> None:
    near = of_a_7b_run(peak=False)
    assert near.gap is None
    assert near.why_no_gap == "no peak"


def test_a_state_of_a_case_is_met_by_its_shares_and_says_what_was_done_next() -> None:
    classes = {"compute.matmul": 71_500_000, "communication.unknown.unsplit": 28_500_000}
    made = account(classes, peak=True)
    near = nearest_published(Facts(made, "traces"))
    assert near.run.source == "SOURCES B8"
    told = {one.what: one for one in near.differences}
    assert told["communication_share"].mfu_points == pytest.approx(0.0)
    assert near.then is not None
    assert "gradient buckets" in near.then.change


def test_what_is_far_from_everything_says_so() -> None:
    facts = Facts(account(), "a run", config_with(), LaunchFacts(world_size=1))
    near = nearest_published(facts)
    assert not near.comparable
    document = diagnose(facts).to_document()["nearest_published"]
    assert document["comparable"] is False
    assert document["name"]
