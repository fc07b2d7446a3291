"""What becomes of each request on this machine: put into effect, refused with a reason, looked at again."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from drivetrain.catalogue import catalogue, entry
from drivetrain.config import RunConfig, load_config
from drivetrain.engine.capabilities import CAPABILITY_NAMES
from drivetrain.engine.data.corpus import ensure_corpus
from drivetrain.engine.data.loader import BatchLoader
from drivetrain.engine.devices import Device, select_device
from drivetrain.engine.model.decoder import Decoder
from drivetrain.engine.optimisations.discovery import implementations
from drivetrain.engine.optimisations.implementation import Building
from drivetrain.engine.optimisations.in_effect import Optimisations, finding_of
from drivetrain.engine.optimizer import build_optimizer, why_not_fused
from drivetrain.measure.optimisation import OptimisationRecord
from runs_on_the_spot import Tiny

PLAIN = [
    "fusion.compile=false",
    "optimizer.fused=false",
    "precision.params_dtype=fp32",
    "data.num_workers=0",
    "overlap.bucket_size_mb=0",
    "data.packing=pad",
    "training.micro_batch_size=1",
]


def building_of(*overrides: str, num_ranks: int = 1) -> Building:
    config = load_config("llama-2m", [*PLAIN, "run.device=cpu", *overrides]).config
    return Building(config=config, device=select_device(config.run), num_ranks=num_ranks)


def prepared(building: Building) -> Optimisations:
    optimisations = Optimisations(building)
    optimisations.prepare("choices")
    with torch.device("meta"):
        building.decoder = Decoder(building.config.model, building.compute_dtype)
    optimisations.prepare("model")
    return optimisations


def record_of(optimisations: Optimisations, name: str) -> OptimisationRecord:
    (found,) = [record for record in optimisations.records() if record.name == name]
    return found


def test_each_entry_has_one_implementation_and_each_implementation_an_entry() -> None:
    assert sorted(implementations()) == [one.name for one in catalogue()]


def test_each_capability_that_an_entry_needs_is_one_that_doctor_shows() -> None:
    assert {one.capability for one in catalogue()} - {None} <= set(CAPABILITY_NAMES)


def test_what_is_not_requested_leaves_the_plain_way() -> None:
    building = building_of()
    optimisations = prepared(building)
    assert building.compute_dtype == torch.float32
    assert (building.fused_update, building.num_workers, building.bucket_size_mb) == (False, 0, None)
    assert not any(record.requested or record.active for record in optimisations.records())
    assert optimisations.findings() == []


def test_each_request_leaves_its_choice_and_is_active() -> None:
    building = building_of(
        "precision.params_dtype=bf16",
        "optimizer.fused=true",
        "data.num_workers=3",
        "overlap.bucket_size_mb=1.5",
        num_ranks=2,
    )
    optimisations = prepared(building)
    assert building.compute_dtype == torch.bfloat16
    assert (building.fused_update, building.num_workers, building.bucket_size_mb) == (True, 3, 1.5)
    for name in ("bf16", "fused_adamw", "data_workers", "ddp_bucket"):
        record = record_of(optimisations, name)
        assert (record.requested, record.active) == (True, True), name
    assert record_of(optimisations, "ddp_bucket").value == 1.5


def test_fused_update_without_a_kernel_for_the_device_is_not_in_effect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    supported = "drivetrain.engine.ops.adamw._get_fused_kernels_supported_devices"
    monkeypatch.setattr(supported, lambda: ["cuda"])
    assert "no fused AdamW for cpu" in str(why_not_fused("cpu"))
    building = building_of("optimizer.fused=true")
    optimisations = prepared(building)
    (finding,) = optimisations.findings()
    assert finding.startswith("optimizer.fused = true is not in effect: torch")
    assert not building.fused_update
    model = torch.nn.Linear(3, 3)
    adamw = build_optimizer(model, building.config.optimizer, fused=building.fused_update)
    before = model.weight.clone()
    model(torch.ones(3)).sum().backward()
    adamw.step()
    assert not torch.equal(before, model.weight), "the run goes on with the update it has"


@pytest.mark.parametrize("variable", ["TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"])
def test_compile_that_the_environment_forbids_is_not_in_effect(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "1")
    (finding,) = prepared(building_of("fusion.compile=true")).findings()
    assert finding == f"fusion.compile = true is not in effect: {variable}=1 is set; the blocks run eagerly"


def test_compile_without_a_compiler_is_not_in_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    building = building_of("fusion.compile=true")
    (finding,) = prepared(building).findings()
    assert "no C++ compiler" in finding
    assert building.decoder is not None
    assert all(
        getattr(block, "_compiled_call_impl", None) is None for block in building.decoder.blocks.values()
    )


def test_bf16_without_units_for_it_is_in_effect_and_said_to_be_emulated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("drivetrain.engine.capabilities.cpu_flags", frozenset)
    building = building_of("precision.params_dtype=bf16")
    optimisations = prepared(building)
    assert building.compute_dtype == torch.bfloat16
    record = record_of(optimisations, "bf16")
    assert record.active
    assert not record.without_effect
    (finding,) = optimisations.findings()
    assert finding.startswith("precision.params_dtype = bf16 is in effect, but the processor has none of")


@pytest.mark.parametrize(
    ("pipeline", "told"),
    [
        (("pipeline_model_parallel_size=2", "pipeline_schedule=zbv"), "leave the schedule zbv none"),
        (
            ("pipeline_model_parallel_size=2", "pipeline_schedule=dualpipev"),
            "leave the schedule dualpipev none",
        ),
        (("pipeline_model_parallel_size=2", "pipeline_schedule=1f1b"), None),
        (("pipeline_schedule=zbv",), None),
    ],
)
def test_compiled_blocks_leave_a_zero_bubble_schedule_nothing_to_fill_bubbles_with_and_say_so(
    pipeline: tuple[str, ...], told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiles = SimpleNamespace(available=True, reason=None)
    monkeypatch.setattr("drivetrain.engine.optimisations.compile.capability", lambda *_: compiles)
    monkeypatch.setattr(Decoder, "compile_blocks", lambda *_, **__: None)
    building = building_of(
        "fusion.compile=true", *(f"parallelism.{field}" for field in pipeline), num_ranks=2
    )
    record = record_of(prepared(building), "compile")
    assert record.active
    assert record.reason is None if told is None else told in str(finding_of(record))


def test_a_bucket_for_one_process_is_a_finding_only_where_somebody_asked_for_it() -> None:
    default = prepared(building_of("overlap.bucket_size_mb=25"))
    record = record_of(default, "ddp_bucket")
    assert (record.requested, record.active) == (False, False)
    assert record.reason == "one process has nobody to communicate with"
    assert default.findings() == []
    (finding,) = prepared(building_of("overlap.bucket_size_mb=3")).findings()
    assert finding == (
        "overlap.bucket_size_mb = 3.0 is not in effect: one process has nobody to communicate with"
    )


@pytest.fixture
def workers(tiny: Tiny) -> tuple[RunConfig, BatchLoader]:
    config = load_config(str(tiny.file), ["data.num_workers=2"]).config
    return config, BatchLoader(config, ensure_corpus(config.data, config.model), "train", num_samples=64)


def test_workers_are_counted_when_training_begins(workers: tuple[RunConfig, BatchLoader]) -> None:
    config, loader = workers
    with loader:
        optimisations = prepared(Building(config=config, device=select_device(config.run), num_ranks=1))
        alive = {record.name: record for record in optimisations.begin(loader)}["data_workers"]
        assert (alive.active, alive.reason) == (True, None)
        for child in loader._children:
            child.kill()
            child.join()
        dead = {record.name: record for record in optimisations.begin(loader)}["data_workers"]
        assert (dead.active, dead.reason) == (False, "0 of 2 worker processes are alive")
        assert finding_of(dead) == "data.num_workers = 2 is not in effect: 0 of 2 worker processes are alive"


def test_a_run_with_nothing_left_to_train_starts_no_workers(tiny: Tiny) -> None:
    config = load_config(str(tiny.file), ["data.num_workers=2"]).config
    optimisations = prepared(Building(config=config, device=select_device(config.run), num_ranks=1))
    with BatchLoader(config, ensure_corpus(config.data, config.model), "train", num_samples=0) as loader:
        record = {record.name: record for record in optimisations.begin(loader)}["data_workers"]
    assert (record.active, record.reason) == (False, "no step is left to train")


@pytest.mark.parametrize(
    ("graphs", "frames", "active", "reason"),
    [
        (0, (0, 0), False, "no graph"),
        (4, (9, 9), True, None),
        (
            6,
            (12, 7),
            True,
            "gave up on 5 pieces of code, which ran eagerly: forward at model.py:7 (no C++ compiler)",
        ),
    ],
)
def test_the_end_shows_what_became_of_compilation(
    graphs: int,
    frames: tuple[int, int],
    active: bool,
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    monkeypatch.setattr(
        "drivetrain.engine.optimisations.compile.capability",
        lambda name, device: SimpleNamespace(available=True, reason=None),
    )
    # What compiling does is tested elsewhere; what torch counted of it is what matters here.
    monkeypatch.setattr(Decoder, "compile_blocks", lambda self, name_kernels: None)
    optimisations = prepared(building_of("fusion.compile=true"))
    assert record_of(optimisations, "compile").active, "asked for, and nothing speaks against it yet"
    counters = {"stats": {"unique_graphs": graphs}, "frames": dict(zip(("total", "ok"), frames, strict=True))}
    failed = SimpleNamespace(
        compile_id="3/0",
        co_name="forward",
        co_filename="model.py",
        co_firstlineno=7,
        recompile_reason=None,
        fail_type="BackendCompilerFailed",
        fail_reason="no C++ compiler\nand more",
        fail_user_frame_filename=None,
        fail_user_frame_lineno=None,
    )
    records = [failed] * (frames[0] - frames[1])
    kept = SimpleNamespace(counters=counters, get_compilation_metrics=lambda: records)
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", kept)
    changed = optimisations.end()
    record = record_of(optimisations, "compile")
    assert record.active == active
    assert (reason or "") in (record.reason or "")
    assert [one.name for one in changed] == (["compile"] if reason else []), "only news is told again"
    assert optimisations.end() == ()


def test_a_gpu_has_a_fused_kernel() -> None:
    config = building_of("optimizer.fused=true").config
    building = Building(config=config, device=Device("cuda", "a GPU", torch.device("cuda"), 1), num_ranks=1)
    optimisations = Optimisations(building)
    optimisations.prepare("choices")
    assert building.fused_update
    assert entry("fused_adamw").requested(config)
