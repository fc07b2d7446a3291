"""The one thing to do next: against which loss, by which command, and what it leaves unknown."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from drivetrain.config import LaunchFacts, load_config
from drivetrain.diagnose import Diagnosis, Facts, Finding, Remedy, diagnose
from drivetrain.diagnose.loss import loss
from drivetrain.diagnose.next_step import NextStep, next_step
from drivetrain.diagnose.picture import picture_of
from drivetrain.diagnose.run_figures import RunFigures
from drivetrain.measure.account import CLASSES, Account, RankAccount, StepAccount, Window
from drivetrain.measure.waterfall import RankTime, waterfall
from drivetrain.report.first_screen import points_of, screen_blocks, screen_lines, verdict
from drivetrain.report.styled import plain

MS = 1_000_000


def account(classes: Mapping[str, int]) -> Account:
    times = {name: ms * MS for name, ms in classes.items()}
    total = sum(times.values())
    window = Window(total, total, 0, None, None, None, None, None, None, times, 0)
    rank = RankAccount(0, "host", window, (StepAccount(1, window, 0, total, False),))
    drawn = waterfall(
        [RankTime(0, total, times)], None, order=CLASSES, window="step 1, rank 0", reason="no peak"
    )
    return Account(health=(), ranks=(rank,), waterfall=drawn)


SLOW = {"compute.norm": 60, "data.loader": 40}


def run_facts(*, classes: Mapping[str, int] = SLOW, world_size: int = 1, local: int | None = None) -> Facts:
    config = load_config(
        "llama-2m",
        [
            "data.num_workers=0",
            "fusion.compile=false",
            "training.micro_batch_size=2",
            "training.global_batch_size=64",
        ],
    ).config
    return Facts(
        account(classes),
        "a run",
        config,
        LaunchFacts(world_size=world_size),
        figures=RunFigures(threads=2, local_processes=local or world_size),
        achievable_dtype="fp32",
        run_path="runs/a b",
    )


def step_of(facts: Facts, *findings: Finding) -> NextStep:
    diagnosis = diagnose(facts)
    return next_step(facts, replace(diagnosis, findings=findings) if findings else diagnosis)


def finding(facts: Facts, cost_ms: float, *remedies: Remedy, **more: Any) -> Finding:
    return loss(
        facts, "a rule", "data.waiting", "data.loader", cost_ms * MS, evidence=(), remedies=remedies, **more
    )


def remedy(name: str | None, field: str, value: object, **more: Any) -> Remedy:
    return Remedy(name, field, {field: value}, "exact", 1.5, **more)


def test_the_largest_loss_with_a_remedy_is_next_with_the_command_that_tries_it() -> None:
    step = step_of(run_facts(classes={"compute.norm": 40, "data.loader": 60}))
    assert (step.kind, step.subject) == ("change", "data.loader")
    assert step.command == "drivetrain tune 'runs/a b/config.toml' --only data_workers"
    assert "data.num_workers=1" in step.what
    assert step.bound == pytest.approx(2.5)
    assert step.numerics == "exact"


def test_a_loss_that_nothing_is_known_against_is_passed_over() -> None:
    facts = run_facts()
    without = finding(facts, 60, no_remedy="no entry treats it")
    step = step_of(facts, without, finding(facts, 40, remedy("prefetch", "data.prefetch_batches", 4)))
    assert step.position == 2
    assert (step.command or "").endswith("--only prefetch")
    advice = step_of(facts, without)
    assert (advice.kind, advice.what, advice.command) == ("advice", "no entry treats it", None)


def test_of_several_remedies_the_one_that_is_expected_to_gain_most_is_tried() -> None:
    facts = run_facts()
    several = (
        remedy("prefetch", "data.prefetch_batches", 4, estimate=1.0, estimate_rule="no gain"),
        remedy("sample_cache", "data.sample_cache_bytes", 10),
        remedy("data_workers", "data.num_workers", 2, estimate=1.4, estimate_rule="a rule"),
    )
    assert (step_of(facts, finding(facts, 40, *several)).command or "").endswith("--only data_workers")
    assert (step_of(facts, finding(facts, 40, *several[:2])).command or "").endswith("--only sample_cache")
    assert step_of(facts, finding(facts, 40, several[0])).kind == "advice", "none is worth a trial"


def test_a_setting_of_no_entry_is_a_run_with_it_and_a_comparison() -> None:
    facts = run_facts()
    step = step_of(facts, finding(facts, 40, remedy(None, "training.micro_batch_size", 8)))
    assert step.command == "drivetrain train 'runs/a b/config.toml' training.micro_batch_size=8"
    assert step.after == "then: drivetrain compare 'runs/a b' latest"


def test_several_processes_of_one_machine_are_started_again_as_many() -> None:
    step = step_of(run_facts(world_size=2))
    assert (step.command or "").endswith("--nproc 2")


def test_a_run_over_machines_has_no_command_that_one_of_them_could_run() -> None:
    step = step_of(run_facts(world_size=16, local=8))
    assert step.command is None
    assert "the run spans machines" in (step.after or "")


def test_of_foreign_traces_the_remedy_is_named_without_a_command() -> None:
    facts = Facts(account(SLOW), "traces")
    step = next_step(facts, diagnose(facts))
    assert step.kind == "change"
    assert step.command is None
    assert "may be in use already" in (step.after or "")
    assert ("--model PRESET|TOML --tokens-per-step N --device NAME") in [command for _, command in step.known]


def test_what_a_cpu_lacks_for_mfu_is_one_command() -> None:
    commands = [command for _, command in step_of(run_facts()).known]
    assert commands == ["drivetrain bench gemm --dtype fp32 --threads 2"]


def test_where_nothing_is_lost_nothing_is_proposed() -> None:
    facts = Facts(Account(health=(), ranks=account({"idle": 1}).ranks), "traces")
    empty: Diagnosis = replace(diagnose(facts), findings=())
    step = next_step(facts, empty)
    assert (step.kind, step.command, step.position) == ("nothing", None, None)
    words, tone = verdict(replace(picture_of(facts, empty)))
    assert (words, tone) == ("nothing is lost that this diagnosis knows", "good")


# ---- the screen -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [60, 80])
def test_the_first_screen_says_in_order_what_is_lost_and_what_to_do(width: int) -> None:
    facts = run_facts()
    lines = plain(screen_lines(picture_of(facts, diagnose(facts)), width)).splitlines()
    labels = [line[:10].strip() for line in lines[3:] if line[:10].strip()]
    assert labels == ["Lost", "Time", "Do next", "Gain", "Risk", "Sure", "To learn"]
    assert len(lines) <= 24, "a screen"
    long = [line for line in lines if len(line) > width]
    assert all(line.strip().startswith("drivetrain ") for line in long), "only commands stay whole"


def test_the_page_says_the_same_as_the_terminal() -> None:
    facts = run_facts()
    picture = picture_of(facts, diagnose(facts))
    first, pairs = screen_blocks(picture)
    assert picture.next_step.command in str(pairs)
    assert verdict(picture)[0] in str(first)


def test_points_add_up_to_a_hundred_and_small_parts_are_joined() -> None:
    many = {
        "compute.norm": 500,
        "data.loader": 300,
        "host.gc": 2,
        "copy.h2d": 1,
        "maintenance.compile": 2,
        "idle": 195,
    }
    drawn = account(many).waterfall
    assert drawn is not None
    shares = points_of(drawn)
    assert sum(share.points for share in shares) == pytest.approx(100)
    assert [share.name for share in shares] == ["compute", "data", "idle", "3 smaller parts"]


def test_what_must_not_be_overlooked_stands_on_the_first_screen() -> None:
    facts = run_facts()
    setting = finding(facts, 1, kind="setting")
    diagnosis = diagnose(facts)
    picture = picture_of(facts, replace(diagnosis, findings=(setting, *diagnosis.findings)))
    assert "set so that it costs time: data.loader" in plain(screen_lines(picture))
