"""Faults that are planted are named and priced: the harness by itself, a small one by default, all of them at length.

What a fault costs in truth, and how near the diagnosis comes to it, ``benchmarks/diagnosis.py`` measures on a quiet
machine: no test looks at a time.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from scenario import (
    MODULES,
    Place,
    Scenario,
    all_scenarios,
    cost_of,
    diagnosed,
    losses,
    names_are_right,
    plain_steps_s,
    run,
    steps_between,
    unfounded,
)

from drivetrain.diagnose.causes import CAUSES
from drivetrain.errors import EnvironmentFault
from runs_on_the_spot import Tiny


def finding(
    cause: str, subject: str, ms: float | None, part_of: str | None = None, **more: Any
) -> dict[str, Any]:
    plain = {"rule": "account_classes", "kind": "loss", "share": None if ms is None else ms / 100}
    return {"cause": cause, "subject": subject, "ms_per_step": ms, "part_of": part_of, **plain, **more}


def scenario(*causes: str, accepted: tuple[str, ...] = (), where: Any = "process") -> Scenario:
    def nothing(place: Place) -> Any:
        raise AssertionError("nothing is run here")

    return Scenario(" + ".join(causes), causes, accepted or causes[:1], where, nothing, nothing, "made up")


def line(step: int, time: float, *tags: str) -> Mapping[str, Any]:
    return {"step": step, "time": time, "tags": list(tags)}


WAITING = finding("data.waiting", "data.loader", 20.0)
TRANSFORM = finding("data.slow_transform", "mine:slow", 19.0, "data.loader", rule="data_operations")
COLLECTOR = finding("host.garbage_collection", "host.gc", 12.0)
ACTIVATIONS = finding("kernels.memory_bound_operators", "compute.activation", 9.0)
PADDING = finding("data.padding", "padding", 8.0, "compute", rule="padding")


def test_steps_are_told_by_what_lies_between_their_records_apart_from_warm_up_and_the_profiler() -> None:
    lines = [line(1, 0.0, "warmup"), line(2, 9.0, "warmup"), line(3, 10.0), line(4, 11.0), line(5, 12.5)]
    lines += [
        line(6, 20.0, "profile"),
        line(7, 30.0, "profile"),
        line(8, 40.0),
        line(9, 41.0),
        line(10, 43.0),
    ]
    lines += [line(12, 44.0, "compile"), line(13, 60.0)]
    # Those of 10 (from the record of 9, the last that settles) and of 11 and 12 together; the last line is no step's.
    assert steps_between(lines) == [1.0, 1.5, 2.0, 0.5]


def test_a_class_and_what_explains_it_are_one_loss() -> None:
    assert losses([TRANSFORM, WAITING, COLLECTOR]) == [TRANSFORM, COLLECTOR]
    small = {**TRANSFORM, "ms_per_step": 5.0}
    assert losses([WAITING, COLLECTOR, small]) == [WAITING, COLLECTOR], "a part of what was said"
    assert losses([ACTIVATIONS, PADDING]) == [ACTIVATIONS, PADDING], "padding is in all computation"
    assert losses([PADDING, ACTIVATIONS]) == [PADDING], "it explains half of it and more"


def test_a_planted_cause_is_a_loss_of_its_own_in_a_wide_group() -> None:
    logging = finding("host.logging", "train.py(3): log", 30.0, "host", rule="log_frames")
    assert losses([logging, COLLECTOR]) == [logging]
    assert losses([logging, COLLECTOR, {**COLLECTOR, "ms_per_step": 1.0}], {"host.garbage_collection"}) == [
        logging,
        COLLECTOR,
    ]


def test_the_first_findings_name_what_was_planted_in_its_order() -> None:
    both = scenario("data.slow_transform", "host.garbage_collection", accepted=("data.waiting",))
    assert names_are_right(both, ["data.slow_transform", "host.garbage_collection", "data.padding"])
    assert names_are_right(both, ["data.waiting", "host.garbage_collection"])
    assert not names_are_right(both, ["host.garbage_collection", "data.slow_transform"])
    assert not names_are_right(both, ["data.slow_transform", "data.padding", "host.garbage_collection"])
    assert not names_are_right(both, ["data.slow_transform"])


def test_the_cost_is_that_of_the_findings_which_name_the_causes() -> None:
    both = scenario("data.slow_transform", "host.garbage_collection")
    assert cost_of(both, [TRANSFORM, WAITING, COLLECTOR]) == 31.0
    assert cost_of(both, [TRANSFORM, WAITING]) is None
    unknown = finding("host.garbage_collection", "gc", None)
    assert cost_of(both, [TRANSFORM, unknown, COLLECTOR]) is None, "the one that stands first says so"


def test_a_clean_process_claims_nothing_but_work_and_ranks_nothing_of_what_was_planted() -> None:
    alone, ranks = scenario("data.padding"), scenario("communication.slow_link", where="ranks")
    link = finding("communication.slow_link", "rank 1", 30.0, rule="slow_links")
    wire = finding("communication.exposed", "communication.dp.transfer", 30.0)
    both = finding("kernels.products_below_peak", "compute.matmul and compute.attention", 60.0)
    setting = finding("host.thread_oversubscription", "run.num_threads", None, rule="thread_counts")
    assert unfounded(alone, [both, ACTIVATIONS, wire], 0.02) == []
    assert unfounded(alone, [TRANSFORM, COLLECTOR, setting], 0.15) == [TRANSFORM, setting]
    assert unfounded(ranks, [link, wire, COLLECTOR], 0.02) == [link]
    assert unfounded(ranks, [wire, COLLECTOR], 0.02) == []


def test_scenarios_have_documented_causes_and_say_how_they_are_made() -> None:
    scenarios = all_scenarios()
    assert {path.stem for path in Path(__file__).parent.glob("*_faults.py")} <= {
        *MODULES,
        Path(__file__).stem,
    }
    for one in scenarios:
        assert {*one.causes, *one.accepted} <= CAUSES.keys(), one.name
        assert one.accepted, one.name
        assert len(set(one.causes)) == len(one.causes), one.name
        assert one.why, one.name
    assert sum(len(one.causes) == 2 for one in scenarios) >= 5
    assert len(scenarios) >= 24


COLLECTS = """
import gc

from torch.optim.optimizer import register_optimizer_step_post_hook

register_optimizer_step_post_hook(lambda *_: gc.collect())


def keep(ids):
    return ids
"""
WINDOW = ("training.eval_iters=0", "profiler.profile=true", "profiler.profile_step_start=5")


def test_a_collection_in_every_update_of_a_tiny_model_is_the_first_finding(tiny: Tiny) -> None:
    (tiny.folder / "collects.py").write_text(COLLECTS)
    done = tiny.train(*WINDOW, "profiler.profile_step_end=8", "data.transform=collects:keep")
    found = losses(diagnosed(Path(done["run"])))
    assert found[0]["cause"] == "host.garbage_collection"
    assert found[0]["share"] > 0.1


def _ran(one: Scenario, place: Place) -> list[Mapping[str, Any]]:
    """The losses that are found; a machine on which it cannot be run skips it."""
    try:
        path = run(one.faulty(place))
    except EnvironmentFault as error:
        pytest.skip(str(error))
    assert plain_steps_s(path)
    return losses(diagnosed(path), one.causes)


BY_NAME = {one.name: one for one in all_scenarios()}


@pytest.mark.long
@pytest.mark.parametrize("name", ["data.slow_transform of batches", "host.garbage_collection"])
def test_a_planted_fault_is_named_first(name: str, tmp_path: Path) -> None:
    found = _ran(BY_NAME[name], Place(tmp_path))
    assert names_are_right(BY_NAME[name], [one["cause"] for one in found]), [one["cause"] for one in found]


@pytest.fixture(scope="module")
def one_place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("faults"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", list(BY_NAME))
def test_every_planted_fault_is_named_first(name: str, one_place: Place) -> None:
    found = _ran(BY_NAME[name], one_place)
    assert names_are_right(BY_NAME[name], [one["cause"] for one in found]), [one["cause"] for one in found]
