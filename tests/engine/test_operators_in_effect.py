"""Operators that a run asks for: who serves, what is recorded of it, and the tuned file that all ranks must share."""

from pathlib import Path

import pytest
import torch

from drivetrain.config import RunConfig, load_config
from drivetrain.engine.devices import select_device
from drivetrain.engine.model.batch import Batch, whole_sequences
from drivetrain.engine.model.decoder import Decoder
from drivetrain.engine.model.initialization import initialize
from drivetrain.engine.operators_of_run import require_usable_tuned_file, selection_of_run
from drivetrain.engine.ops.selection import Choice, Selection
from drivetrain.engine.optimisations.implementation import Building
from drivetrain.engine.optimisations.in_effect import Optimisations
from drivetrain.engine.optimisations.service import Service, service_of_all_ranks
from drivetrain.engine.parallel.process_group import ProcessGroup, Ranks, join
from drivetrain.engine.training_run import Logbook
from drivetrain.errors import DrivetrainError, EnvironmentFault
from drivetrain.measure.optimisation import OptimisationRecord
from rank_processes import on_ranks

SMALL = [
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.num_attention_heads=4",
    "model.num_query_groups=2",
    "model.ffn_hidden_size=48",
    "model.vocab_size=61",
    "model.kv_channels=8",
    "precision.params_dtype=fp32",
    "run.device=cpu",
]


def config_of(*overrides: str) -> RunConfig:
    return load_config("llama-2m", [*SMALL, *overrides]).config


def built(*overrides: str, allow_fallback: bool = False) -> tuple[Optimisations, Decoder, list[Choice]]:
    told: list[Choice] = []
    config = config_of(*overrides)
    building = Building(
        config=config,
        device=select_device(config.run),
        num_ranks=1,
        operators=Selection(allow_fallback=allow_fallback, on_fallback=told.append),
    )
    optimisations = Optimisations(building)
    optimisations.prepare("choices")
    building.decoder = Decoder(config.model, torch.float32)
    initialize(building.decoder, 3)
    optimisations.prepare("model")
    return optimisations, building.decoder, told


def record_of(optimisations: Optimisations, name: str) -> OptimisationRecord:
    (found,) = [record for record in optimisations.records() if record.name == name]
    return found


def batch() -> Batch:
    return whole_sequences(torch.arange(48).view(2, 24) % 61)


def test_who_served_is_counted_in_the_record_at_the_end() -> None:
    optimisations, decoder, _ = built("fusion.glu=eager", "fusion.rms_norm=eager")
    assert dict(record_of(optimisations, "glu").served) == {}
    decoder.loss_sum(batch())
    news = {record.name: record for record in optimisations.end()}
    assert dict(news["glu"].served) == {"eager": 2}
    # One before attention in each block, and the final one; those before the MLP are in add_rms_norm's place.
    assert dict(news["rms_norm"].served) == {"eager": 5}
    assert news["glu"].value == "eager"
    assert optimisations.findings() == []
    assert OptimisationRecord.from_document(news["glu"].to_document()) == news["glu"]


def test_a_backend_that_cannot_serve_ends_the_run_with_those_that_can() -> None:
    _, decoder, _ = built("fusion.glu=triton")
    with pytest.raises(
        DrivetrainError, match=r"fusion\.glu = triton: triton cannot serve .*those that can: eager"
    ):
        decoder.loss_sum(batch())


def test_a_fallback_is_told_once_for_each_kind_of_call_and_is_a_finding_at_the_end() -> None:
    optimisations, decoder, told = built("fusion.glu=triton", allow_fallback=True)
    for _ in range(3):
        decoder.loss_sum(batch())
    assert [choice.backend.name for choice in told] == ["eager"]
    optimisations.end()
    record = record_of(optimisations, "glu")
    assert (record.requested, record.active) == (True, False)
    assert dict(record.served) == {"eager": 6}
    assert "triton cannot serve" in str(record.reason)
    assert [
        text for text in optimisations.findings() if text.startswith("fusion.glu = triton is not in effect")
    ]


def test_a_fallback_of_some_calls_is_in_effect_with_a_reservation() -> None:
    optimisations, decoder, _ = built("fusion.glu=eager")
    decoder.loss_sum(batch())
    served = optimisations.building.operators.served
    # As if the tail of an epoch had had a shape that the backend refuses.
    optimisations.building.operators.requested["glu"] = "inductor"
    served["glu", "inductor"] = 6
    optimisations.end()
    record = record_of(optimisations, "glu")
    assert record.active
    assert str(record.reason).startswith("2 of 8 calls were served otherwise")


def test_an_operator_of_which_no_call_was_made_is_not_in_effect() -> None:
    optimisations, _, _ = built("fusion.glu=eager")
    optimisations.end()
    assert record_of(optimisations, "glu").reason == "no call of it was made"


def test_a_level_puts_its_operators_into_effect_and_says_nothing_of_what_the_model_has_not() -> None:
    optimisations, decoder, _ = built(
        "fusion.level=all",
        "fusion.glu=off",
        *(f"fusion.{name}=eager" for name in ("rms_norm", "add_rms_norm", "rotary")),
    )
    decoder.loss_sum(batch())
    optimisations.end()
    active = {record.name for record in optimisations.records() if record.active}
    assert {"fusion_level", "rms_norm", "attention", "linear_cross_entropy"} <= active
    assert not {"glu", "layer_norm", "bias_dropout_add"} & active
    assert optimisations.findings() == []


def as_a_stage_of_two(_: None) -> tuple[dict[str, dict[str, int]], dict[str, tuple[str, ...]], list[str]]:
    """Rank 1 alone calls operators, one of them by another backend than the one that was asked for."""
    with join(Ranks.from_environment(), "cpu", 1.0) as group:
        optimisations, decoder, _ = built("fusion.glu=triton", "fusion.rotary=eager", allow_fallback=True)
        if group.ranks.rank == 1:
            decoder.loss_sum(batch())
        optimisations.building.service = service_of_all_ranks(optimisations.building.operators, group)
        optimisations.end()
        service = optimisations.building.service
        return (
            {operator: dict(calls) for operator, calls in service.served.items()},
            dict(service.reasons),
            optimisations.findings(),
        )


def test_what_another_rank_served_is_in_the_record_of_the_rank_that_writes_it() -> None:
    for served, reasons, findings in on_ranks(as_a_stage_of_two, 2, None):
        assert served == {"glu": {"eager": 2}, "rotary": {"eager": 4}}
        assert "triton cannot serve" in reasons["glu"][0]
        assert [text for text in findings if "fusion.glu = triton is not in effect: triton cannot" in text]
        assert not [text for text in findings if "no call of it was made" in text]


def test_calls_of_ranks_are_added_and_reasons_kept_once() -> None:
    one = Service({"glu": {"eager": 2}}, {"glu": ("no Triton",)})
    other = Service(
        {"glu": {"eager": 1, "triton": 4}, "linear": {"eager": 3}}, {"glu": ("no Triton", "too wide")}
    )
    both = Service.sum_of([one, other])
    assert both.served == {"glu": {"eager": 3, "triton": 4}, "linear": {"eager": 3}}
    assert both.reasons == {"glu": ("no Triton", "too wide")}


def alone(config: RunConfig) -> Selection:
    return selection_of_run(config, select_device(config.run), ProcessGroup(Ranks()), Logbook())


def test_a_tuned_file_that_is_named_and_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DrivetrainError, match=r"absent\.toml"):
        alone(config_of("fusion.level=core", f"fusion.tuned_file={tmp_path / 'absent.toml'}"))


def test_a_damaged_tuned_file_is_refused_and_one_that_nobody_needs_is_not_read(tmp_path: Path) -> None:
    damaged = tmp_path / "ops.tuned.toml"
    damaged.write_text("schema == 1\n", encoding="utf-8")
    with pytest.raises(DrivetrainError, match="line 1"):
        alone(config_of("fusion.level=core", f"fusion.tuned_file={damaged}"))
    assert alone(config_of("fusion.glu=eager", f"fusion.tuned_file={damaged}")).tuned is None


def test_a_tuned_file_that_cannot_be_read_is_refused_before_there_is_a_run(tmp_path: Path) -> None:
    absent = f"fusion.tuned_file={tmp_path / 'absent.toml'}"
    with pytest.raises(EnvironmentFault, match=r"absent\.toml"):
        require_usable_tuned_file(config_of("fusion.level=core", absent))
    require_usable_tuned_file(config_of("fusion.glu=eager", absent))


def with_a_file_of_its_own(folder: str) -> str:
    with join(Ranks.from_environment(), "cpu", 1.0) as group:
        path = Path(folder) / f"rank{group.ranks.rank}.toml"
        path.write_text("schema = [" if group.ranks.rank else "", encoding="utf-8")
        config = config_of("fusion.level=core", f"fusion.tuned_file={path}")
        try:
            selection_of_run(config, select_device(config.run), group, Logbook())
        except DrivetrainError as error:
            return f"{type(error).__name__}: {error}"
        return "went on"


def test_a_rank_that_cannot_read_its_file_stops_all(tmp_path: Path) -> None:
    said = on_ranks(with_a_file_of_its_own, 2, str(tmp_path))
    assert "went on" not in said


def test_ranks_with_different_files_are_refused(tmp_path: Path) -> None:
    said = on_ranks(with_other_files, 2, str(tmp_path))
    assert all(text.startswith(EnvironmentFault.__name__) for text in said), said
    assert "not the same on all ranks" in said[0]


def with_other_files(folder: str) -> str:
    from drivetrain.engine.ops.tuned_file import environment_here
    from drivetrain.engine.ops_tuning.writing import write_tuned

    with join(Ranks.from_environment(), "cpu", 1.0) as group:
        path = Path(folder) / f"rank{group.ranks.rank}.toml"
        environment = dict(environment_here())
        if group.ranks.rank:
            environment["device"] = "another"
        write_tuned(path, environment, ())
        config = config_of("fusion.level=core", f"fusion.tuned_file={path}")
        try:
            selection_of_run(config, select_device(config.run), group, Logbook())
        except DrivetrainError as error:
            return f"{type(error).__name__}: {error}"
        return "went on"


class Said:
    """In the place of a terminal."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def lines_of(config: RunConfig) -> list[str]:
    """What a run of ``config`` says in two steps and an evaluation."""
    said = Said()
    logbook = Logbook(console=said)  # type: ignore[arg-type]
    device = select_device(config.run)
    selection = selection_of_run(config, device, ProcessGroup(Ranks()), logbook)
    building = Building(config=config, device=device, num_ranks=1, operators=selection)
    optimisations = Optimisations(building)
    building.decoder = Decoder(config.model, torch.float32)
    initialize(building.decoder, 3)
    optimisations.prepare("model")
    for _ in range(2):
        building.decoder.loss_sum(batch())
    with torch.no_grad():
        building.decoder.loss_sum(batch())
    return said.lines


def test_a_fallback_of_training_and_evaluation_is_one_warning() -> None:
    (line,) = lines_of(config_of("fusion.glu=triton", "fusion.allow_fallback=true"))
    assert line.startswith("warning: triton cannot serve glu(")
    assert line.endswith("; eager serves instead")


def test_an_operator_that_was_not_tuned_is_one_warning_whatever_its_calls(tmp_path: Path) -> None:
    from drivetrain.engine.ops.tuned_file import environment_here
    from drivetrain.engine.ops_tuning.writing import write_tuned

    path = tmp_path / "ops.tuned.toml"
    write_tuned(path, environment_here(), ())
    lines = lines_of(config_of("fusion.linear=auto", "fusion.attention=auto", f"fusion.tuned_file={path}"))
    # Four products with weights a layer, of three shapes.
    assert sorted(line.partition("no choice for ")[2].partition("(")[0] for line in lines) == [
        "attention",
        "linear",
    ]
    assert all(f"{path} has no choice for" in line for line in lines)
