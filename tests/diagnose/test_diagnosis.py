"""Rules of diagnosis on accounts made by hand: what is found, what it costs, and what is proposed against it."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drivetrain.catalogue import catalogue
from drivetrain.config import LaunchFacts, RunConfig, load_config, operator_fields
from drivetrain.diagnose import LEAST_SHARE, Diagnosis, Facts, Finding, diagnose
from drivetrain.diagnose.rule import rules
from drivetrain.diagnose.rules import account_classes
from drivetrain.diagnose.rules.account_classes import CAUSE_OF_CLASS
from drivetrain.diagnose.rules.fallbacks import ENTRY_OF_WORD
from drivetrain.measure.account import (
    CLASSES,
    Account,
    CommunicationVerdict,
    RankAccount,
    StepAccount,
    Straggler,
    Window,
)
from drivetrain.measure.corpora import transform_key
from drivetrain.measure.optimisation import Evidence, OptimisationRecord
from drivetrain.measure.peaks import Peak
from drivetrain.measure.waterfall import RankTime, WaterfallFlops, waterfall
from drivetrain.report.diagnosis_text import diagnosis_text
from drivetrain.trace.expectations import EXPECTATIONS
from drivetrain.trace.health import Finding as HealthFinding
from drivetrain.trace.synchronisation import SynchronisationPoint, Synchronisations

MS = 1_000_000
STEP: Mapping[str, int] = {
    "compute.matmul": 50 * MS,
    "compute.norm": 10 * MS,
    "communication.dp.wait": 8 * MS,
    "data.loader": 20 * MS,
    "host.launch": 5 * MS,
    "host.sync": 6 * MS + 500_000,
    "host.gc": 500_000,
}
"""100 ms."""


def window(classes: Mapping[str, int]) -> Window:
    total = sum(classes.values())
    return Window(total, total, 0, None, None, None, None, None, None, dict(classes), 0)


def account(classes: Mapping[str, int] = STEP, *, peak: bool = False, **more: Any) -> Account:
    """One rank with a slow first step and two equal ones; with a peak its matrix products reach half of it."""
    one, first = window(classes), window({**classes, "maintenance.compile": 900 * MS})
    steps = (
        StepAccount(6, first, 0, 1, True),
        StepAccount(7, one, 1, 2, False),
        StepAccount(8, one, 2, 3, False),
    )
    time = RankTime(0, one.window_ns, dict(classes))
    flops = WaterfallFlops({"compute.matmul": 25 * MS}, Peak(1e9, "made up"), Peak(0.8e9, "measured here"))
    drawn = waterfall(
        [time], flops if peak else None, order=CLASSES, window="steps 7 to 8, rank 0", reason="no peak"
    )
    return Account(health=(), ranks=(RankAccount(0, "device", one, steps),), waterfall=drawn, **more)


def of_two(made: Account) -> Account:
    """The same with a second rank like the first."""
    (only,) = made.ranks
    return replace(made, ranks=(only, replace(only, rank=1)))


def config_with(*overrides: str) -> RunConfig:
    plain = [
        "precision.params_dtype=fp32",
        "fusion.compile=false",
        "optimizer.fused=false",
        "data.num_workers=0",
        "training.micro_batch_size=2",
    ]
    return load_config("llama-2m", [*plain, *overrides]).config


def facts(*overrides: str, world_size: int = 1, made: Account | None = None, **more: Any) -> Facts:
    """Of a run of ours."""
    return Facts(
        made or account(), "a run", config_with(*overrides), LaunchFacts(world_size=world_size), **more
    )


def found(diagnosis: Diagnosis, subject: str) -> Finding:
    (finding,) = [finding for finding in diagnosis.findings if finding.subject == subject]
    return finding


# ---- classes ----------------------------------------------------------------------------------------------------


def test_losses_are_ranked_by_what_they_cost_of_a_steady_step() -> None:
    diagnosis = diagnose(facts(made=account(peak=True)))
    losses = [(finding.subject, finding.cost_ns) for finding in diagnosis.of("loss")]
    assert losses == [
        ("data.loader", 20 * MS),
        ("compute.matmul", pytest.approx(18.75 * MS)),
        ("compute.norm", 10 * MS),
        ("communication.dp.wait", 8 * MS),
        ("host.sync", 6.5 * MS),
        ("host.launch", 5 * MS),
    ]
    assert diagnosis.mean_ns == 100 * MS
    assert diagnosis.is_step


def test_costs_in_points_are_those_of_the_waterfall() -> None:
    made = account(peak=True)
    diagnosis = diagnose(facts(made=made))
    assert made.waterfall is not None
    bars = {bar.class_name: bar.points for bar in made.waterfall.bars if bar.class_name is not None}
    classes = [finding for finding in diagnosis.of("loss") if finding.rule == "account_classes"]
    assert {finding.subject: finding.points for finding in classes} == {
        name: points for name, points in bars.items() if name != "host.gc"
    }
    assert diagnosis.mfu == 25.0
    assert diagnosis.worst_points == 20.0


def test_without_a_peak_points_are_unknown_with_the_reason_and_products_have_no_cost() -> None:
    diagnosis = diagnose(facts())
    assert diagnosis.worst_points is None
    assert all(
        finding.points is None and finding.unknown["points"] == "no peak" for finding in diagnosis.findings
    )
    products = found(diagnosis, "compute.matmul")
    assert products.cost_ns is None
    assert products.share == 0.5
    assert "no peak" in products.unknown["cost_ns"]
    assert diagnosis.findings[-1] is products, "what has no known cost comes last"


def test_below_the_least_share_nothing_is_claimed_but_counted() -> None:
    diagnosis = diagnose(facts())
    assert "host.gc" not in [finding.subject for finding in diagnosis.findings]
    assert [finding.subject for finding in diagnosis.small] == ["host.gc"]
    document = diagnosis.to_document()
    assert document["least_share"] == LEAST_SHARE
    assert document["below_least_share"] == [
        {"cause": "host.garbage_collection", "subject": "host.gc", "share": 0.005}
    ]
    assert "1 smaller classes, 0.5% together" in diagnosis_text(diagnosis)


def test_the_worst_loss_may_be_one_that_is_too_small_to_be_claimed() -> None:
    # The products take what the device sustains, and nothing more: 25 ms at 0.8.
    diagnosis = diagnose(facts(made=account({"compute.matmul": 31_250_000, "host.gc": 250_000}, peak=True)))
    assert diagnosis.of("loss") == ()
    assert diagnosis.worst is not None
    assert diagnosis.worst.subject == "host.gc"
    assert diagnosis.worst_points == pytest.approx(100 * 0.25 / 31.5, abs=1e-5)


def test_every_class_of_an_account_has_a_cause_in_words() -> None:
    for name in (*CLASSES, "unexplained"):
        assert any(name == start or name.startswith(f"{start}.") for start, *_ in CAUSE_OF_CLASS), name


def test_unexplained_time_is_a_loss_that_nothing_treats() -> None:
    one = Window(100, 90, 10, None, None, None, None, None, None, {"compute.norm": 90}, 10)
    time = RankTime(0, 100, {"compute.norm": 90}, 10)
    made = Account(
        health=(),
        ranks=(RankAccount(0, "device", one, ()),),
        waterfall=waterfall([time], None, order=CLASSES, reason="no peak"),
    )
    diagnosis = diagnose(facts(made=made))
    assert not diagnosis.is_step
    assert found(diagnosis, "unexplained").no_remedy == "no entry of the catalogue treats it"
    assert found(diagnosis, "unexplained").cost_ns == 10


# ---- remedies ---------------------------------------------------------------------------------------------------


def test_a_class_names_the_entries_that_treat_it_with_field_value_and_upper_bound() -> None:
    remedies = found(diagnose(facts()), "data.loader").remedies
    assert [one.name for one in remedies] == ["data_workers", "prefetch", "sample_cache"]
    remedy = remedies[0]
    assert (remedy.name, remedy.field, remedy.change) == (
        "data_workers",
        "data.num_workers",
        {"data.num_workers": 1},
    )
    assert remedy.ratio == 100 / (100 - 20)
    assert remedy.numerics == "exact"
    assert "try data_workers (data.num_workers=1, at most 1.25x)" in diagnosis_text(diagnose(facts()))


def test_what_is_requested_already_is_no_remedy_but_its_knob_is_named() -> None:
    loader = found(diagnose(facts("data.num_workers=2")), "data.loader")
    assert [one.name for one in loader.remedies] == ["sample_cache"]
    asked = " ".join(one.text for one in loader.evidence)
    assert "asked for already: data_workers, to be tuned by data.num_workers from 1 to 16" in asked


def test_an_entry_that_can_have_no_effect_is_no_remedy_and_says_why() -> None:
    waiting = found(diagnose(facts(world_size=1)), "communication.dp.wait")
    assert waiting.remedies == ()
    assert "ddp_bucket: one process has nobody to communicate with" in str(waiting.no_remedy)
    assert [
        remedy.name for remedy in found(diagnose(facts(world_size=2)), "communication.dp.wait").remedies
    ] == ["ddp_bucket"]


def test_a_class_without_an_entry_says_so() -> None:
    made = account({"copy.d2d": 60 * MS, "idle": 40 * MS})
    assert not any(
        "copy.d2d".startswith(treated) or treated == "copy" for one in catalogue() for treated in one.treats
    )
    assert found(diagnose(facts(made=made)), "copy.d2d").no_remedy == "no entry of the catalogue treats it"


def test_of_foreign_traces_the_settings_are_unknown_but_what_shows_in_use_is_not_proposed() -> None:
    foreign = Facts(
        account(), "traces", in_use=frozenset({"compile"}), ruled_out={"fused_adamw": "no update"}
    )
    diagnosis = diagnose(foreign)
    names = {remedy.name for finding in diagnosis.findings for remedy in finding.remedies}
    assert names >= {"bf16", "data_workers", "ddp_bucket"}
    assert names.isdisjoint({"compile", "fused_adamw"})
    for remedy in found(diagnosis, "data.loader").remedies:
        assert remedy.change is None
        assert remedy.note is not None
    assert "may be in use already" in diagnosis_text(diagnosis)
    assert "fused_adamw" not in {remedy.name for remedy in found(diagnosis, "host.launch").remedies}


OF_DATA = {"packing": ["data.packing=pad"], "bake_transforms": ["data.transform=numpy.sort"]}
SHARED = {
    "overlap_param_gather": ["parallelism.zero_stage=1"],
    "prefetch_blocks": ["parallelism.zero_stage=3"],
    "tp_chunks": ["parallelism.tensor_model_parallel_size=2"],
    "tp_async_gradient": ["parallelism.tensor_model_parallel_size=2"],
    "tp_symmetric_memory": [
        "parallelism.tensor_model_parallel_size=2",
        "parallelism.sequence_parallel=true",
        "run.device=cuda",
    ],
}
ON_TWO_MACHINES = LaunchFacts(world_size=4, local_world_size=2)


def test_an_entry_treats_a_class_of_time_or_relieves_a_category_of_memory() -> None:
    assert all(entry.treats or entry.relieves for entry in catalogue())


@pytest.mark.parametrize(
    "entry", [entry for entry in catalogue() if entry.treats], ids=lambda entry: entry.name
)
def test_every_entry_is_proposed_for_what_it_treats_and_only_while_it_is_not_requested(entry: Any) -> None:
    treated = next(name for name in CLASSES if any(f"{name}.".startswith(f"{one}.") for one in entry.treats))
    made = account({treated: 60 * MS, "idle": 40 * MS})
    launch = ON_TWO_MACHINES if entry.name == "hierarchical_collectives" else LaunchFacts(world_size=2)
    # Buckets all in one, and a checkpoint in the middle: there is something to switch on for every entry.
    plain = ["overlap.bucket_size_mb=0", "checkpoint.save_interval=2"]
    if entry.name in operator_fields():
        # An operator is a move of its own where the level is on and leaves it out.
        plain += ["fusion.level=core", f"fusion.{entry.name}=off"]
    if entry.name in ("layer_norm", "add_layer_norm"):
        plain.append("model.normalization=LayerNorm")
    if entry.name == "bias_dropout_add":
        plain.append("model.hidden_dropout=0.1")
    if entry.name == "micro_batch":
        plain.append("training.micro_batch_size=1")
    plain += OF_DATA.get(entry.name, [])
    plain += SHARED.get(entry.name, [])
    off = config_with(*plain)
    change = entry.on(off, launch)
    assert change is not None
    proposed = {r.name for r in found(diagnose(Facts(made, "a run", off, launch)), treated).remedies}
    assert entry.name in proposed
    on = config_with(*plain, *(f"{leaf}={_toml(value)}" for leaf, value in change.items()))
    proposed = {r.name for r in found(diagnose(Facts(made, "a run", on, launch)), treated).remedies}
    assert entry.name not in proposed


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# ---- what is not in effect --------------------------------------------------------------------------------------


def record(name: str, field: str, **more: Any) -> OptimisationRecord:
    return OptimisationRecord(name, field, True, **{"requested": True, "active": True, **more})


def test_a_request_without_effect_comes_first_with_its_reason() -> None:
    sabotaged = record("compile", "fusion.compile", active=False, reason="no C++ compiler")
    diagnosis = diagnose(facts("fusion.compile=true", records=(sabotaged,)))
    first = diagnosis.findings[0]
    assert (first.rule, first.subject) == ("without_effect", "compile")
    assert first.text == "fusion.compile = true was requested and is not in effect"
    texts = [one.text for one in first.evidence]
    assert texts == ["no C++ compiler", "what it treats takes 15.000 ms of 100.000 ms"]
    (evidence,) = [one for one in found(diagnosis, "host.launch").evidence if one.source == "configuration"]
    assert evidence.text.startswith(
        "asked for already: compile (without effect), micro_batch, to be tuned by "
    )


def test_an_operator_that_others_served_in_part_is_found_with_their_calls() -> None:
    partly = OptimisationRecord(
        "rms_norm",
        "fusion.rms_norm",
        "triton",
        requested=True,
        active=True,
        reason="3 of 12 calls were served otherwise: triton cannot serve int8",
        served={"triton": 9, "eager": 3},
    )
    first = diagnose(facts("fusion.rms_norm=triton", records=(partly,))).findings[0]
    assert (first.rule, first.kind, first.subject) == ("without_effect", "not_in_effect", "rms_norm")
    assert (
        first.text == "fusion.rms_norm = triton was requested and did not serve all calls: of 12 3 by eager"
    )
    assert first.evidence[0].text.endswith("triton cannot serve int8")
    chosen = replace(partly, value="auto", reason=None)
    assert not [
        one
        for one in diagnose(facts("fusion.rms_norm=auto", records=(chosen,))).findings
        if one.rule == "without_effect"
    ]


def test_a_request_that_the_window_contradicts_is_found() -> None:
    contradicted = record("fused_adamw", "optimizer.fused", evidence=Evidence("absent", "no fused kernel"))
    shown = record("bf16", "precision.params_dtype", evidence=Evidence("shown", "4 products"))
    diagnosis = diagnose(facts(records=(contradicted, shown)))
    (finding,) = diagnosis.of("not_in_effect")
    assert finding.text == "optimizer.fused = true was requested and does not show in the profiled steps"
    assert "absent: no fused kernel" in [one.text for one in finding.evidence]


def test_a_fallback_is_a_finding_and_is_not_said_twice() -> None:
    health = (
        HealthFinding("expected_flash_partly", "warning", "flash ran only in part", 1),
        HealthFinding("expected_bf16_absent", "warning", "bf16 did not run", 1),
        HealthFinding("expected_compile_unknown", "note", "nobody knows", 1),
    )
    made = replace(account(), health=health)
    assert [finding.subject for finding in diagnose(facts(made=made)).of("not_in_effect")] == [
        "bf16",
        "flash",
    ]
    known = record("bf16", "precision.params_dtype", evidence=Evidence("absent", "no product in bf16"))
    diagnosis = diagnose(facts(made=made, records=(known,)))
    assert [(finding.rule, finding.subject) for finding in diagnosis.of("not_in_effect")] == [
        ("without_effect", "bf16"),
        ("fallbacks", "flash"),
    ]


def test_expectations_and_entries_that_are_the_same_thing_exist() -> None:
    assert {word.replace("_", "-") for word in ENTRY_OF_WORD} <= set(EXPECTATIONS)
    assert set(ENTRY_OF_WORD.values()) <= {entry.name for entry in catalogue()}


# ---- ranks, waits, health ---------------------------------------------------------------------------------------


def test_a_late_rank_is_part_of_the_waiting_and_carries_the_verdict() -> None:
    verdict = CommunicationVerdict(
        "dp", "all_reduce", (0, 1), 8, ("slow_rank",), 1, 7.0 * MS, 6.5 * MS, 1.0, None, None, None, None
    )
    made = of_two(account(peak=True, stragglers=(Straggler(1, 5, 8, 7.0 * MS),), verdicts=(verdict,)))
    late = found(diagnose(facts(made=made)), "rank 1")
    assert late.cause == "communication.slow_rank"
    assert (late.cost_ns, late.points, late.share) == (7.0 * MS, 7.0, 0.07)
    assert late.part_of == "communication.dp.wait"
    assert [one.text for one in late.evidence] == [
        "last at 5 of 8 matched collectives; cost as a mean over the other ranks and all recorded steps",
        "slow rank in all_reduce of group dp",
    ]


def test_a_slow_link_is_found_with_both_bandwidths() -> None:
    verdict = CommunicationVerdict(
        "dp",
        "all_reduce",
        (0, 1),
        8,
        ("slow_link",),
        None,
        0.0,
        None,
        5.0 * MS,
        3.0 * MS,
        1e9,
        4e9,
        "own_best",
    )
    link = found(diagnose(facts(made=of_two(account(verdicts=(verdict,))))), "dp all_reduce of ranks 0, 1")
    assert link.cost_ns == 3.0 * MS
    assert link.evidence[0].text == "8 of them: 1.00 GB/s against 4.00 GB/s of its own best"


def waits(
    *, has_device: bool = True, hint: str | None = None, frame: str | None = "train.py(10): log"
) -> Any:
    point = SynchronisationPoint(
        "cudaStreamSynchronize", ("aten::item",), None, frame, False, 4, 40 * MS, 4 * MS, 8 * MS
    )
    return Synchronisations((point,), 2, has_device, hint, 0)


def test_a_line_that_waits_for_the_device_is_found_with_its_cost_a_step() -> None:
    diagnosis = diagnose(facts(waits=waits(), waits_source="trace of rank 0"))
    line = found(diagnosis, "train.py(10): log")
    assert (line.cost_ns, line.part_of) == (6 * MS, "host")
    assert line.evidence[0].text == (
        "aten::item > cudaStreamSynchronize: 2.0 a step over 2 steps, 20.000 ms of host time"
    )
    without = diagnose(facts(waits=waits(frame=None, hint="record stacks"), waits_source="trace"))
    assert found(without, "aten::item > cudaStreamSynchronize").cost_ns == 6 * MS
    assert "record stacks" in diagnosis_text(without)


def test_without_a_device_no_line_is_blamed() -> None:
    diagnosis = diagnose(facts(waits=waits(has_device=False)))
    assert not [finding for finding in diagnosis.findings if finding.rule == "synchronisation_points"]


@pytest.mark.parametrize("figure", ["idle_ns", "busy_ns"])
def test_where_the_idle_time_is_withheld_no_line_is_blamed(figure: str) -> None:
    made = replace(account(), health=(HealthFinding("truncated", "warning", "it broke off", 1, (figure,)),))
    diagnosis = diagnose(facts(made=made, waits=waits(), waits_source="trace of rank 0"))
    assert not [finding for finding in diagnosis.findings if finding.rule == "synchronisation_points"]


def test_health_findings_that_withhold_figures_are_said() -> None:
    made = replace(
        account(),
        health=(
            HealthFinding("zero_timestamps", "error", "records at time 0", 3, ("idle_ns",)),
            HealthFinding("first_step", "note", "the first one is suspect", 1),
        ),
    )
    (withheld,) = diagnose(facts(made=made)).of("withheld")
    assert (withheld.subject, withheld.evidence[0].text) == ("zero_timestamps", "withheld: idle_ns")


# ---- operations of the data pipeline -----------------------------------------------------------------------------


def test_the_slowest_operation_is_named_with_its_part_of_the_waiting() -> None:
    operations = {"read": 0.001, "mine:slow": 0.008, "collate": 0.001}
    finding = found(diagnose(facts("data.transform=mine:slow", data_operations=operations)), "mine:slow")
    assert (finding.rule, finding.part_of) == ("data_operations", "data.loader")
    assert finding.cost_ns == pytest.approx(0.8 * 20 * MS)
    assert (
        "80% of building a micro-batch: mine:slow 8 ms, read 1 ms, collate 1 ms" in finding.evidence[0].text
    )
    (baked,) = [one for one in finding.remedies if one.name == "bake_transforms"]
    assert baked.change is not None
    assert str(baked.change["data.data_path"]).endswith("/corpus.baked-" + transform_key("mine:slow"))


def test_operations_are_nothing_to_speak_of_where_no_step_waits() -> None:
    made = account({"compute.matmul": 100 * MS})
    findings = diagnose(facts(made=made, data_operations={"read": 1.0})).findings
    assert "read" not in {one.subject for one in findings}


# ---- the whole --------------------------------------------------------------------------------------------------


def test_each_rule_is_found_by_its_file() -> None:
    folder = Path(account_classes.__file__).parent
    assert {rule.name for rule in rules()} == {
        path.stem for path in folder.glob("*.py") if path.stem != "__init__"
    }


def test_an_account_without_losses_says_so() -> None:
    diagnosis = diagnose(facts(made=account({"compute.matmul": 100 * MS}, peak=False)))
    assert [finding.subject for finding in diagnosis.of("loss")] == ["compute.matmul"]
    quiet = replace(diagnosis, findings=())
    assert "no loss of 1% of a step or more was found" in diagnosis_text(quiet)


def test_the_document_has_a_reason_for_each_unknown_figure() -> None:
    for finding in diagnose(facts()).to_document()["findings"]:
        assert (finding["ms_per_step"] is None) == (finding["ms_per_step_reason"] is not None)
        assert finding["mfu_points"] is None
        assert finding["mfu_points_reason"]
        assert finding["remedies"] or finding["no_remedy"]


def test_the_example_of_the_documentation_is_what_is_printed() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "diagnose.md").read_text(encoding="utf-8")
    example = page.partition("*Example.*")[2].split("```")[1].strip("\n")
    made = account({"compute.matmul": 80 * MS, "data.loader": 20 * MS}, peak=True)
    printed = diagnosis_text(diagnose(facts(made=made))).splitlines()
    for line in example.splitlines():
        assert line in printed
