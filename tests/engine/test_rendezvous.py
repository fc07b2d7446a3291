"""Ranks that nobody's agent serves - started by hand, or in the network lab - agree on a run and form their group."""

import time
from pathlib import Path

from drivetrain.engine.parallel.process_group import Ranks, join
from drivetrain.engine.rendezvous import agree_on_run, run_store
from drivetrain.errors import DrivetrainError
from rank_processes import on_kept_ranks


def agree_and_join(late_rank: int) -> tuple[str, float]:
    ranks = Ranks.from_environment()
    if ranks.rank == late_rank:
        time.sleep(0.3)
    store = run_store(ranks)
    path = agree_on_run(ranks, lambda: Path("/runs/one"), store)
    with join(ranks, "cpu", 1.0) as group:
        return str(path), group.maximum(float(ranks.rank))


def test_the_store_of_the_agreement_serves_the_group_too_whoever_comes_late() -> None:
    for late_rank in (0, 1, 2):
        assert on_kept_ranks(agree_and_join, 3, late_rank) == [("/runs/one", 2.0)] * 3


def fail_to_make() -> str:
    ranks = Ranks.from_environment()

    def make_run() -> Path:
        raise DrivetrainError("no corpus there")

    try:
        agree_on_run(ranks, make_run, run_store(ranks))
    except DrivetrainError as error:
        return str(error)
    return "it went on"


def test_a_run_that_cannot_be_made_is_told_to_every_rank_before_the_store_ends() -> None:
    assert on_kept_ranks(fail_to_make, 3) == ["no corpus there"] * 3
