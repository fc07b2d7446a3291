"""Causes that the files of a run tell: each on figures that have it and on figures that have it not."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from test_diagnosis import MS, account, config_with, window
from test_overlap_advice import communication

from drivetrain.config import LaunchFacts
from drivetrain.diagnose import Facts, Finding, diagnose
from drivetrain.diagnose.run_figures import Maintenance, RunFigures
from drivetrain.measure.account import Account, RankAccount, StepAccount

WAITING: Mapping[str, int] = {"compute.matmul": 70 * MS, "data.loader": 30 * MS}
STEPS: Mapping[str, float] = {"time/step_s": 0.1, "time/data_wait_s": 0.03}


def figures(means: Mapping[str, float] | None = None, **more: Any) -> RunFigures:
    """Twenty steady steps of 100 ms on a machine of eight cores, one process of eight threads."""
    plain: dict[str, Any] = {
        "steady_steps": 20,
        "logged_steps": 20,
        "segment_steps": 20,
        "threads": 8,
        "cores": 8,
        "local_processes": 1,
    }
    return RunFigures(means={**STEPS, **(means or {})}, **(plain | more))


def findings(
    cause: str,
    files: RunFigures | None,
    *overrides: str,
    classes: Mapping[str, int] | None = None,
    made: Account | None = None,
    world_size: int = 1,
    **more: Any,
) -> list[Finding]:
    """Of one cause, claimed or not."""
    made = made or account(classes or {"compute.matmul": 100 * MS}, peak=False)
    config = config_with(*overrides)
    diagnosis = diagnose(
        Facts(made, "a run", config, LaunchFacts(world_size=world_size), figures=files, **more)
    )
    return [one for one in diagnosis.findings if one.cause == cause]


# ---- data ---------------------------------------------------------------------------------------------------------


def test_too_few_workers_are_found_with_the_number_that_would_do() -> None:
    # A step trains for 70 ms; its batches take 150 ms to build: three processes.
    slow = figures({"data/build_s": 0.15, "data/transform_s": 0.12, "data/read_s": 0.02})
    (found,) = findings("data.too_few_workers", slow, "data.num_workers=1", classes=WAITING)
    assert found.cost_ns == 30 * MS
    assert found.part_of == "data.loader"
    (remedy,) = found.remedies
    assert (remedy.name, remedy.change) == ("data_workers", {"data.num_workers": 3})
    assert remedy.estimate == pytest.approx(100 / 70)
    assert remedy.memory_bytes == 0
    assert not findings("data.too_few_workers", slow, "data.num_workers=3", classes=WAITING)
    assert not findings("data.too_few_workers", slow, "data.num_workers=1"), "nobody waits"
    crowded = replace(slow, local_processes=4)
    assert not findings("data.too_few_workers", crowded, "data.num_workers=1", classes=WAITING), (
        "each of four processes would want three of eight cores"
    )


def test_where_no_number_of_workers_would_do_or_a_transform_is_the_cause_it_is_not_their_number() -> None:
    hopeless = figures({"data/build_s": 1.0, "data/transform_s": 0.9})
    assert not findings("data.too_few_workers", hopeless, "data.num_workers=1", classes=WAITING)
    own = figures({"data/build_s": 0.1, "data/transform_s": 0.06})
    assert not findings("data.too_few_workers", own, classes=WAITING)
    plain = figures({"data/build_s": 0.1, "data/transform_s": 0.01})
    assert findings("data.too_few_workers", plain, classes=WAITING)


def test_a_slow_transform_stands_before_the_class_whose_time_it_is() -> None:
    found = diagnose(
        Facts(
            account(WAITING),
            "a run",
            config_with("data.transform=mine:slow"),
            LaunchFacts(world_size=1),
            data_operations={"mine:slow": 0.008, "read": 0.002},
        )
    ).of("loss")
    assert [one.cause for one in found][:2] == ["data.slow_transform", "data.waiting"]
    assert [one.name for one in found[0].remedies]


def test_no_estimate_is_above_the_bound_of_its_finding() -> None:
    # The entry predicts for all of data.loader; this operation is four fifths of it.
    facts = Facts(
        account(WAITING),
        "a run",
        config_with("data.transform=mine:slow"),
        LaunchFacts(world_size=1),
        data_operations={"mine:slow": 0.008, "read": 0.002},
    )
    remedies = {
        (finding.cause, one.name): one for finding in diagnose(facts).findings for one in finding.remedies
    }
    part = remedies["data.slow_transform", "data_workers"]
    assert part.ratio == pytest.approx(100 / 76)
    assert part.estimate == part.ratio
    assert "no more than the cost of this finding" in str(part.estimate_rule)
    whole = remedies["data.waiting", "data_workers"]
    assert whole.estimate == pytest.approx(100 / 70)
    assert all(
        one.estimate is None or one.ratio is None or one.estimate <= one.ratio for one in remedies.values()
    )


def test_reading_that_becomes_fast_was_a_cold_cache() -> None:
    means = {"data/read_s": 0.03, "data/build_s": 0.04}
    early = {**STEPS, "data/read_s": 0.05, "data/build_s": 0.06, "time/data_wait_s": 0.06}
    late = {**STEPS, "data/read_s": 0.01, "data/build_s": 0.02, "time/data_wait_s": 0.01}
    (found,) = findings("data.cold_cache", figures(means, early=early, late=late))
    # Of 40 ms of building 20 ms are reading that later steps do not need: half of 30 ms of waiting.
    assert found.cost_ns == pytest.approx(15 * MS)
    assert not findings("data.cold_cache", figures(means, early=early, late=early))
    little = {**late, "data/read_s": 0.04}
    slowly = figures({"data/read_s": 0.045, "data/build_s": 0.055}, early=early, late=little)
    assert not findings("data.cold_cache", slowly), "it hardly falls"
    assert not findings("data.cold_cache", figures(means)), "too few steps to tell"


def test_padding_costs_its_share_of_computation_and_of_effective_mfu() -> None:
    made = account({"compute.matmul": 50 * MS, "idle": 50 * MS}, peak=True)
    (found,) = findings("data.padding", figures(padding=0.4), "data.packing=pad", made=made)
    assert found.cost_ns == pytest.approx(20 * MS)
    assert made.waterfall is not None
    assert found.points == pytest.approx(0.4 * (made.waterfall.mfu or 0.0))
    assert [remedy.name for remedy in found.remedies] == ["packing"]
    assert not findings("data.padding", figures(padding=0.0), made=made)
    updates = {"compute.matmul": 50 * MS, "compute.optimizer": 50 * MS}
    (found,) = findings("data.padding", figures(padding=0.4), "data.packing=pad", classes=updates)
    assert found.cost_ns == pytest.approx(20 * MS), "an update takes as long without padding"


# ---- communication, pipeline ----------------------------------------------------------------------------------------


def test_gradients_in_fp32_cost_half_of_their_exposed_transfer() -> None:
    classes = {
        "compute.matmul": 60 * MS,
        "communication.dp.transfer": 30 * MS,
        "communication.dp.wait": 10 * MS,
    }
    bf16 = "precision.params_dtype=bf16"
    (found,) = findings("communication.fp32_on_the_wire", None, bf16, classes=classes, world_size=2)
    assert found.cost_ns == 15 * MS
    assert [remedy.name for remedy in found.remedies] == ["grad_reduce_dtype"]
    for overrides, world_size in (
        ((bf16, "precision.grad_reduce_dtype=bf16"), 2),
        (("precision.params_dtype=fp32",), 2),
        ((bf16,), 1),
    ):
        assert not findings(
            "communication.fp32_on_the_wire", None, *overrides, classes=classes, world_size=world_size
        )


@pytest.mark.parametrize(("stage", "gradients"), [(0, 1), (1, 2 / 3), (2, 1 / 2), (3, 1 / 3)])
def test_parameters_that_travel_are_no_gradients(stage: int, gradients: float) -> None:
    classes = {"compute.matmul": 70 * MS, "communication.dp.transfer": 30 * MS}
    (found,) = findings(
        "communication.fp32_on_the_wire",
        None,
        "precision.params_dtype=bf16",
        f"parallelism.zero_stage={stage}",
        classes=classes,
        world_size=2,
    )
    assert found.cost_ns == pytest.approx(15 * MS * gradients)
    assert found.confidence == ("medium" if stage == 0 else "low")


def test_half_the_bytes_come_off_what_is_waited_for_and_stand_before_bytes_that_take_too_long() -> None:
    bf16 = ("precision.params_dtype=bf16", "overlap.bucket_size_mb=1")
    # 80 ms under way, 30 of them under computation: in bf16 40, of which 30 find it again.
    said = communication(wire_s=0.08, exposed_s=0.05, backward_idle_s=0.002)
    classes = {"compute.matmul": 50 * MS, "communication.dp.transfer": 50 * MS}
    facts = Facts(
        account(classes), "a run", config_with(*bf16), LaunchFacts(world_size=2), communication=said
    )
    found = diagnose(facts).of("loss")
    assert [one.cause for one in found][:2] == ["communication.fp32_on_the_wire", "communication.too_much"]
    assert found[0].cost_ns == pytest.approx(40 * MS)
    assert found[1].cost_ns == pytest.approx(50 * MS)
    hidden = communication(wire_s=0.08, exposed_s=0.01, backward_idle_s=0.002)
    (well,) = findings(
        "communication.fp32_on_the_wire", None, *bf16, classes=classes, world_size=2, communication=hidden
    )
    assert well.cost_ns == pytest.approx(10 * MS), "no more than is waited for"
    # Of 80 ms bytes move for 60: the rest is waiting for a rank, or what calls cost.
    slow = communication(wire_s=0.08, exposed_s=0.05, backward_idle_s=0.002, fixed=5e-3, rate=40e6 / 0.06)
    (bytes_alone,) = findings(
        "communication.fp32_on_the_wire", None, *bf16, classes=classes, world_size=2, communication=slow
    )
    assert bytes_alone.cost_ns == pytest.approx(30 * MS)


PIPELINE = ("parallelism.pipeline_model_parallel_size=2",)


def test_a_pipeline_with_few_micro_batches_wants_smaller_ones() -> None:
    classes = {"compute.matmul": 75 * MS, "bubble.warmup": 12 * MS, "bubble.cooldown": 13 * MS}
    few = (*PIPELINE, "training.micro_batch_size=4", "training.global_batch_size=16")
    (found,) = findings("pipeline.too_few_micro_batches", None, *few, classes=classes, world_size=2)
    assert found.cost_ns == 25 * MS
    assert "4 micro-batches for 2 ranks" in found.evidence[0].text
    (remedy,) = found.remedies
    assert remedy.change == {"training.micro_batch_size": 2}
    # 1/5 of a step becomes 1/9.
    assert remedy.estimate == pytest.approx(100 / (100 - 25 * (1 - (1 / 9) / (1 / 5))))
    many = (*PIPELINE, "training.micro_batch_size=1", "training.global_batch_size=32")
    assert not findings("pipeline.too_few_micro_batches", None, *many, classes=classes, world_size=2)


def test_without_bubbles_in_the_records_the_formula_stands_in_and_says_so() -> None:
    few = (*PIPELINE, "training.micro_batch_size=4", "training.global_batch_size=16")
    waiting = {"compute.matmul": 70 * MS, "communication.pp.unsplit": 30 * MS}
    (found,) = findings("pipeline.too_few_micro_batches", None, *few, classes=waiting, world_size=2)
    assert found.cost_ns == pytest.approx(20 * MS)
    assert found.confidence == "low"
    little = {"compute.matmul": 95 * MS, "communication.pp.unsplit": 5 * MS}
    (found,) = findings("pipeline.too_few_micro_batches", None, *few, classes=little, world_size=2)
    assert found.cost_ns == 5 * MS, "no more than the stages can have stood"
    assert not findings("pipeline.too_few_micro_batches", None, *few, world_size=2), "they compute all along"


def ranks(*compute_ms: int) -> Account:
    """One rank a stage, each with two equal steps of 100 ms."""
    made = []
    for rank, milliseconds in enumerate(compute_ms):
        one = window({"compute.matmul": milliseconds * MS, "bubble.imbalance": (100 - milliseconds) * MS})
        steps = tuple(StepAccount(number, one, number, number + 1, number == 0) for number in range(3))
        made.append(RankAccount(rank, "device", one, steps))
    return replace(account({"compute.matmul": 100 * MS}), ranks=tuple(made))


def test_the_slow_stage_is_named_and_gives_a_layer_away() -> None:
    layers = (*PIPELINE, "model.num_layers=6", "parallelism.pipeline_model_parallel_layout=4,2")
    (found,) = findings("pipeline.unbalanced_stages", None, *layers, made=ranks(80, 40), world_size=2)
    assert found.cost_ns == pytest.approx(20 * MS)
    assert found.part_of == "bubble", "the account has that time already"
    assert found.evidence[0].ranks == (0,)
    (remedy,) = found.remedies
    assert remedy.change == {"parallelism.pipeline_model_parallel_layout": "3,3"}
    assert remedy.estimate == pytest.approx(100 / 80)
    assert not findings("pipeline.unbalanced_stages", None, *layers, made=ranks(60, 60), world_size=2)


def test_a_stage_without_a_trace_leaves_the_question_open() -> None:
    made = ranks(80, 40)
    alone = replace(made, ranks=made.ranks[:1])
    three = ("parallelism.pipeline_model_parallel_size=3", "training.micro_batch_size=1")
    assert not findings("pipeline.unbalanced_stages", None, *three, made=made, world_size=3)
    config = config_with(*PIPELINE)
    diagnosis = diagnose(Facts(alone, "a run", config, LaunchFacts(world_size=2)))
    assert not [one for one in diagnosis.findings if one.cause == "pipeline.unbalanced_stages"]
    (open_question,) = [one for one in diagnosis.not_asked if one.rule == "unbalanced_stages"]
    assert open_question.reason == "it needs traces of several ranks"


def test_deep_accumulation_costs_the_hosts_part_of_what_is_too_many() -> None:
    classes = {"compute.matmul": 60 * MS, "host.launch": 30 * MS, "host.python": 10 * MS}
    deep = ("training.micro_batch_size=1", "training.global_batch_size=32")
    (found,) = findings("pipeline.accumulation_too_deep", None, *deep, classes=classes)
    assert found.cost_ns == pytest.approx(40 * MS * (1 - 8 / 32))
    (remedy,) = found.remedies
    assert remedy.change == {"training.micro_batch_size": 4}
    shallow = ("training.micro_batch_size=2", "training.global_batch_size=32")
    assert not findings("pipeline.accumulation_too_deep", None, *shallow, classes=classes)


# ---- host -----------------------------------------------------------------------------------------------------------


def test_logging_every_step_is_found_where_it_takes_time() -> None:
    (found,) = findings("host.logging", figures({"time/hooks_s": 0.02}))
    assert found.cost_ns == pytest.approx(20 * MS)
    assert found.remedies[0].change == {"monitor.log_interval": 10}
    assert found.remedies[0].estimate == pytest.approx(100 / (100 - 18))
    assert not findings("host.logging", figures({"time/hooks_s": 0.02}), "monitor.log_interval=10")
    assert not findings("host.logging", figures({"time/hooks_s": 0.0001}))


def test_more_threads_than_cores_are_a_setting_of_unknown_cost_that_stands_before_losses() -> None:
    config = config_with()
    files = figures(threads=4, local_processes=4)
    diagnosis = diagnose(Facts(account(), "a run", config, LaunchFacts(world_size=4), figures=files))
    first = diagnosis.findings[0]
    assert (first.kind, first.cause) == ("setting", "host.thread_oversubscription")
    assert first.cost_ns is None
    assert first.remedies[0].change == {"run.num_threads": 2}
    for fine in (figures(threads=2, local_processes=4), figures(threads=4, local_processes=4, cores=None)):
        assert not findings("host.thread_oversubscription", fine)
    on_device = replace(files, device_type="cuda")
    assert not findings("host.thread_oversubscription", on_device), "the device computes"
    (crowded,) = findings("host.thread_oversubscription", figures(threads=1, local_processes=9))
    assert crowded.remedies == ()
    assert "start fewer" in str(crowded.no_remedy)


def test_steps_with_the_collector_cost_what_they_are_longer() -> None:
    files = figures(excess_s={"gc": {5: 0.1, 15: 0.1}})
    (found,) = findings("host.garbage_collection", files)
    assert found.cost_ns == pytest.approx(10 * MS)
    assert found.share == pytest.approx(10 / 110)
    assert found.evidence[0].steps == (5, 15)
    assert not findings("host.garbage_collection", figures())


CUDA = {"device_type": "cuda", "device_name": "NVIDIA H100 80GB HBM3"}
SHARED_LAYERS = ("parallelism.tensor_model_parallel_size=2", "parallelism.sequence_parallel=true")


@pytest.mark.parametrize(
    ("overrides", "value", "wrong"),
    [
        (SHARED_LAYERS, None, True),
        (SHARED_LAYERS, "8", True),
        (SHARED_LAYERS, "1", False),
        (("parallelism.zero_stage=3",), "1", True),
        (("parallelism.zero_stage=3",), None, False),
        ((), None, False),
    ],
)
def test_connections_of_the_device_are_held_against_the_layout(
    overrides: tuple[str, ...], value: str | None, wrong: bool
) -> None:
    environment = {} if value is None else {"CUDA_DEVICE_MAX_CONNECTIONS": value}
    found = findings(
        "environment.max_connections", figures(environment=environment, **CUDA), *overrides, world_size=2
    )
    assert bool(found) is wrong
    on_cpu = figures(environment=environment)
    assert not findings("environment.max_connections", on_cpu, *overrides, world_size=2)


def test_where_gradients_are_reduced_beside_tensor_parallelism_one_connection_is_no_sure_advice() -> None:
    files = figures(environment={}, **CUDA)
    (alone,) = findings("environment.max_connections", files, *SHARED_LAYERS, world_size=2)
    (beside,) = findings("environment.max_connections", files, *SHARED_LAYERS, world_size=4)
    assert "try both" not in str(alone.no_remedy)
    assert "try both" in str(beside.no_remedy)


# ---- memory, shapes, maintenance -----------------------------------------------------------------------------------


def test_recomputation_beside_free_memory_buys_nothing() -> None:
    classes = {"compute.matmul": 75 * MS, "recompute": 25 * MS}
    on = ("memory.recompute_granularity=full",)
    free = figures({"memory/process_rss_peak_bytes": 3e9}, memory_bytes=16_000_000_000)
    (found,) = findings("memory.recompute_without_need", free, *on, classes=classes)
    assert found.cost_ns == 25 * MS
    assert found.remedies[0].name == "recompute"
    assert found.remedies[0].change == {"memory.recompute_granularity": "none"}
    shared = replace(free, local_processes=4)
    assert not findings("memory.recompute_without_need", shared, *on, classes=classes), "12 of 16 GB are used"
    full = figures({"memory/process_rss_peak_bytes": 12e9}, memory_bytes=16_000_000_000)
    assert not findings("memory.recompute_without_need", full, *on, classes=classes)
    limited = (*on, "memory.device_memory_limit_bytes=4000000000")
    assert not findings("memory.recompute_without_need", free, *limited, classes=classes)


def test_offloaded_state_that_is_waited_for_names_what_was_moved() -> None:
    files = figures({"offload/exposed_s": 0.02, "offload/moved_bytes": 5e6})
    (found,) = findings("memory.stalling_offload", files, "memory.optimizer_offload_fraction=1.0")
    assert found.cost_ns == pytest.approx(20 * MS)
    assert [(one.name, one.change) for one in found.remedies] == [
        ("optimizer_offload", {"memory.optimizer_offload_fraction": 0.0})
    ]
    assert not findings("memory.stalling_offload", figures({"offload/exposed_s": 0.0}))


AGAIN = {"function": "forward", "place": "model.py:12", "why": "x was 8 and became 7", "count": 2}


def test_recompilations_cost_the_steps_that_compiled_and_name_line_and_guard() -> None:
    files = figures(recompilations=(AGAIN,), excess_s={"compile": {11: 0.5, 14: 0.5}})
    (found,) = findings("shapes.recompilation", files)
    assert found.cost_ns == pytest.approx(50 * MS)
    assert found.subject == "model.py:12"
    assert found.evidence[0].place == "model.py:12"
    assert "x was 8 and became 7" in found.evidence[0].text
    assert not findings("shapes.recompilation", figures(excess_s={"compile": {11: 0.5}}))


def test_a_graph_break_is_named_by_its_line_and_has_no_cost() -> None:
    files = figures(graph_breaks=({"place": "model.py:30", "why": "masked_select", "count": 6},))
    (found,) = findings("kernels.graph_break", files)
    assert (found.subject, found.cost_ns, found.kind) == ("model.py:30", None, "setting")
    assert not findings("kernels.graph_break", figures())


@pytest.mark.parametrize(
    ("cause", "kind", "leaf", "most"),
    [
        ("maintenance.checkpoint_too_often", "checkpoint", "checkpoint.save_interval", 0.01),
        ("maintenance.evaluation_too_often", "evaluation", "training.eval_interval", 0.02),
    ],
)
def test_what_interrupts_training_too_often_is_given_an_interval_that_keeps_it_small(
    cause: str, kind: str, leaf: str, most: float
) -> None:
    # 20 steps of 100 ms, and 0.5 s beside them.
    files = figures(maintenance={kind: Maintenance(0.5, 4)})
    (found,) = findings(cause, files, f"{leaf}=5")
    assert found.cost_ns == pytest.approx(25 * MS)
    assert found.share == pytest.approx(0.2)
    change = found.remedies[0].change
    assert change is not None
    each = 0.025 * 5 / change[leaf]
    assert each / (each + 0.1) <= most
    shorter = 0.025 * 5 / (change[leaf] - 1)
    assert shorter / (shorter + 0.1) > most, "no longer than need be"
    assert found.remedies[0].ratio == pytest.approx(125 / 100)
    assert not findings(cause, figures(maintenance={kind: Maintenance(0.01, 1)}), f"{leaf}=5")
    assert not findings(cause, figures(), f"{leaf}=5")


@pytest.mark.parametrize(
    ("cause", "kind", "leaf"),
    [
        ("maintenance.checkpoint_too_often", "checkpoint", "checkpoint.save_interval"),
        ("maintenance.evaluation_too_often", "evaluation", "training.eval_interval"),
    ],
)
def test_an_interruption_that_the_window_holds_is_one_loss_and_its_cause_comes_first(
    cause: str, kind: str, leaf: str
) -> None:
    made = account({"compute.matmul": 70 * MS, f"maintenance.{kind}": 30 * MS}, peak=False)
    files = figures(maintenance={kind: Maintenance(0.5, 4)})
    config, launch = config_with(f"{leaf}=5"), LaunchFacts(world_size=1)
    first, second, *_ = diagnose(Facts(made, "a run", config, launch, figures=files)).of("loss")
    assert [first.cause, second.cause] == [cause, f"maintenance.{kind}"]
    assert first.part_of == second.subject
    assert first.cost_ns == pytest.approx(25 * MS)
    assert first.share == pytest.approx(0.25), "the step has it already"
    assert first.remedies[0].ratio == pytest.approx(100 / 75)


def test_without_files_of_a_run_what_only_they_tell_is_withheld_with_the_reason() -> None:
    diagnosis = diagnose(Facts(account(), "traces"))
    reasons = {one.rule: one.reason for one in diagnosis.not_asked}
    assert "settings of other traces are unknown" in reasons["too_few_workers"]
    assert "traces alone hold no events" in reasons["graph_breaks"]
    document = diagnosis.to_document()
    assert {one["rule"] for one in document["not_asked"]} == set(reasons)
    assert all(one["causes"] for one in document["not_asked"])
