"""Offload in whole runs: the same losses to the bit, figures in the run directory, honest records, refused requests."""

import pytest

from drivetrain.archive.reader import open_run
from drivetrain.catalogue.rules import all_rules
from drivetrain.config import LaunchFacts, load_config, violations
from drivetrain.engine.devices import select_device
from drivetrain.engine.memory.offload_activations import ActivationOffload, LayerTensors
from drivetrain.engine.model.decoder import Decoder
from drivetrain.engine.optimisations.implementation import Building
from drivetrain.engine.optimisations.in_effect import Optimisations
from runs_on_the_spot import Tiny, losses_of

BOTH = ["memory.optimizer_offload_fraction=1", "memory.cpu_offloading_num_layers=1"]
FEW = ["training.train_iters=4", "training.eval_iters=0"]


def test_a_run_has_the_losses_of_the_plain_one_and_says_what_travelled_and_that_nothing_was_saved(
    tiny: Tiny,
) -> None:
    plain = open_run(tiny.train(*FEW)["run"])
    document = tiny.train(*FEW, *BOTH)
    run = open_run(document["run"])
    assert losses_of(run) == losses_of(plain)
    weights = [path / "checkpoints" / "step-00000004" / "model" for path in (run.path, plain.path)]
    first, second = ((folder / "model.safetensors").read_bytes() for folder in weights)
    assert first == second
    for line in run.metrics():
        assert line["offload/moved_bytes"] == pytest.approx(run.metrics()[0]["offload/moved_bytes"])
        assert line["offload/exposed_s"] >= 0
    assert not any("offload/moved_bytes" in line for line in plain.metrics())
    records = {one["name"]: one for one in document["optimisations"]}
    for name in ("optimizer_offload", "activation_offload"):
        assert (records[name]["requested"], records[name]["active"]) == (True, True)
        assert "no memory is saved" in records[name]["reason"]
    assert sum("no memory is saved" in finding for finding in document["findings"]) == 2


@pytest.mark.long
def test_a_run_goes_on_to_the_bit_from_a_checkpoint_that_was_saved_with_another_share(tiny: Tiny) -> None:
    whole = open_run(tiny.train(*FEW, *BOTH, "checkpoint.save_interval=2")["run"])
    start = [
        "checkpoint.initial_load_model_only=false",
        f"checkpoint.initial_load_path={whole.path / 'checkpoints' / 'step-00000002'}",
    ]
    for share in ("0", "0.4"):
        run = open_run(tiny.train(*FEW, *start, f"memory.optimizer_offload_fraction={share}")["run"])
        assert losses_of(run) == {step: loss for step, loss in losses_of(whole).items() if step > 2}


@pytest.mark.parametrize("fraction", ["-0.1", "1.01", "all"])
def test_a_share_outside_of_0_to_1_is_refused(fraction: str, tiny: Tiny) -> None:
    done = tiny.run("check", str(tiny.file), f"memory.optimizer_offload_fraction={fraction}")
    assert done.returncode == 2
    assert "memory.optimizer_offload_fraction" in done.stderr
    assert "Traceback" not in done.stderr


def broken(*overrides: str) -> dict[str, str]:
    config = load_config("llama-2m", overrides).config
    return {found.rule: str(found) for found in violations(config, LaunchFacts(), all_rules())}


def test_more_layers_than_there_are_are_refused_and_the_most_is_named() -> None:
    layers = load_config("llama-2m", []).config.model.num_layers
    found = broken(f"memory.cpu_offloading_num_layers={layers + 1}")
    assert list(found) == ["offloaded-layers-exist"]
    assert f"the nearest legal value is {layers}" in found["offloaded-layers-exist"]
    assert broken(f"memory.cpu_offloading_num_layers={layers}") == {}


def test_layers_that_are_computed_again_are_not_moved_as_well() -> None:
    found = broken("memory.cpu_offloading_num_layers=1", "memory.recompute_granularity=full")
    assert list(found) == ["offload-without-recompute"]
    assert broken("memory.optimizer_offload_fraction=0.5", "memory.recompute_granularity=full") == {}


def optimisations_of(*overrides: str) -> Optimisations:
    config = load_config("llama-2m", ["run.device=cpu", "fusion.compile=false", *overrides]).config
    building = Building(config=config, device=select_device(config.run), num_ranks=1)
    found = Optimisations(building)
    found.prepare("choices")
    building.decoder = Decoder(config.model, building.compute_dtype)
    found.prepare("model")
    return found


def status_of(optimisations: Optimisations, name: str) -> tuple[bool, str | None]:
    (found,) = [record for record in optimisations.records() if record.name == name]
    return found.active, found.reason


def test_a_share_into_which_no_parameter_fits_is_not_in_effect() -> None:
    from drivetrain.engine.optimizer import build_optimizer

    found = optimisations_of("memory.optimizer_offload_fraction=1e-9")
    building = found.building
    assert building.decoder is not None
    build_optimizer(building.decoder, building.config.optimizer, offload=building.state_offload)
    found.begin(None)  # type: ignore[arg-type]
    active, reason = status_of(found, "optimizer_offload")
    assert not active
    assert "the smallest is more than this share" in str(reason)


def test_layers_whose_tensors_all_stay_where_they_are_are_not_in_effect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LayerTensors, "_moves", lambda *_: False)
    found = optimisations_of("memory.cpu_offloading_num_layers=2")
    assert isinstance(found.building.activation_offload, ActivationOffload)
    assert status_of(found, "activation_offload")[0]
    found.end()
    active, reason = status_of(found, "activation_offload")
    assert not active
    assert "nothing to move" in str(reason)


def test_a_memory_limit_counts_what_is_on_the_host_as_well_and_the_step_that_counts_leaves_no_trace(
    tiny: Tiny,
) -> None:
    plain = open_run(tiny.train(*FEW)["run"])
    limited = open_run(tiny.train(*FEW, *BOTH, "memory.device_memory_limit_bytes=1e9")["run"])
    assert losses_of(limited) == losses_of(plain)
    # Nor does it count as copies of the first step.
    assert len({line["offload/moved_bytes"] for line in limited.metrics()}) == 1
    (count,) = [one for one in limited.events() if one.get("what") == "memory_count"]
    assert count["peak_bytes"] == sum(count["by_category"].values()) > 0
