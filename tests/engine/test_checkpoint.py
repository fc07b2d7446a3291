"""Checkpoints: resume to the bit, damaged ones are passed over, old ones pruned."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from drivetrain.config.model import ModelConfig
from drivetrain.engine.checkpoint import (
    damage,
    find_latest,
    load_model,
    set_aside,
)
from drivetrain.engine.optimizer import optimizer_state
from drivetrain.engine.random_state import deterministic, seed_everything
from drivetrain.errors import CheckpointError
from tiny_training import MODELS, OWN, Training, names, save_two_checkpoints, unexpected


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder with sound checkpoints of steps 1 and 2."""
    save_two_checkpoints(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", MODELS)
def test_a_resumed_run_equals_one_without_interruption_to_the_bit(name: str, tmp_path: Path) -> None:
    with deterministic(True):
        seed_everything(3, 0)
        straight = Training(MODELS[name])
        straight.train(3)
        straight.save(tmp_path)
        expected = straight.train(4)

        seed_everything(99, 0)
        resumed = Training(MODELS[name], seed=99)
        path = find_latest(tmp_path, unexpected)
        assert path is not None
        trainer_state = resumed.load(path)
        assert trainer_state == {"samples": 6, "flops": 2**80 + 3, "loss_ema": 0.1 + 0.2}
        assert resumed.train(4) == expected
    for (parameter_name, a), b in zip(
        straight.decoder.named_parameters(), resumed.decoder.parameters(), strict=True
    ):
        assert torch.equal(a, b), parameter_name
    a_state, b_state = optimizer_state(straight.optimizer), optimizer_state(resumed.optimizer)
    assert all(torch.equal(a_state[key], b_state[key]) for key in a_state)


@pytest.mark.parametrize(("name", "model_format"), [("llama", "huggingface"), ("own", "drivetrain")])
def test_the_state_says_which_format_the_weights_have(name: str, model_format: str, tmp_path: Path) -> None:
    training = Training(MODELS[name])
    path = training.save(tmp_path)
    state = json.loads((path / "state.json").read_bytes())
    assert state["schema"] == 1
    assert state["model_format"] == model_format
    assert ModelConfig(**state["model"]) == MODELS[name]
    assert (path / "model" / "config.json").exists() == (model_format == "huggingface")
    with safe_open(next((path / "model").glob("*.safetensors")), framework="pt") as file:
        assert all(file.get_tensor(key).dtype == torch.float32 for key in file.keys())  # noqa: SIM118


def test_the_tokenizer_travels_with_the_weights(tmp_path: Path) -> None:
    tokenizer = tmp_path / "somewhere.json"
    tokenizer.write_text('{"version": "1.0"}')
    path = Training(OWN).save(tmp_path / "checkpoints", tokenizer_file=tokenizer)
    assert (path / "model" / "tokenizer.json").read_text() == '{"version": "1.0"}'


def test_nothing_is_unpickled(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    path = find_latest(saved, unexpected)
    assert path is not None
    Training(OWN).load(path)


def test_only_the_weights_can_be_loaded(saved: Path) -> None:
    training, other = Training(OWN), Training(OWN, seed=5)
    training.load(saved / "step-00000002")
    load_model(saved / "step-00000002", other.decoder)
    for a, b in zip(training.decoder.parameters(), other.decoder.parameters(), strict=True):
        assert torch.equal(a, b)


def test_every_file_is_in_the_manifest(saved: Path) -> None:
    path = saved / "step-00000002"
    manifest = json.loads((path / "manifest.json").read_bytes())
    files = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}
    assert set(manifest["files"]) == files - {"manifest.json"}
    assert {"state.json", "optimizer.safetensors", "random/r00000.safetensors"} <= files


# Damage.


def flip_a_byte(path: Path) -> None:
    file = path / "optimizer.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


def truncate(path: Path) -> None:
    file = path / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-7])


def delete_a_file(path: Path) -> None:
    (path / "random" / "r00000.safetensors").unlink()


def delete_the_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def cut_the_manifest(path: Path) -> None:
    (path / "manifest.json").write_text('{"schema": 1, "files": {"stat')


def empty_the_manifest(path: Path) -> None:
    (path / "manifest.json").write_text('{"schema": 1, "token": "", "files": {}}')


def point_outside(path: Path) -> None:
    entry = {"size": 1, "sha256": ""}
    (path / "manifest.json").write_text(json.dumps({"schema": 1, "files": {"../secret": entry}}))


DAMAGES: dict[Callable[[Path], None], str] = {
    flip_a_byte: "content of optimizer.safetensors has changed",
    truncate: "model/model.safetensors has",
    delete_a_file: "random/r00000.safetensors is missing",
    delete_the_manifest: "manifest.json is missing",
    cut_the_manifest: "can't be read",
    empty_the_manifest: "lists no files",
    point_outside: "outside the checkpoint",
}


@pytest.mark.parametrize("harm", DAMAGES, ids=lambda harm: harm.__name__)
def test_a_damaged_newest_checkpoint_is_reported_and_the_one_before_used(
    harm: Callable[[Path], None], saved: Path
) -> None:
    harm(saved / "step-00000002")
    reports: list[tuple[Path, str]] = []
    assert find_latest(saved, lambda path, reason: reports.append((path, reason))) == saved / "step-00000001"
    [(path, reason)] = reports
    assert path == saved / "step-00000002"
    assert DAMAGES[harm] in reason


def test_all_damaged_is_an_error_that_lists_every_reason(saved: Path) -> None:
    flip_a_byte(saved / "step-00000001")
    delete_the_manifest(saved / "step-00000002")
    reports: list[str] = []
    with pytest.raises(
        CheckpointError, match=r"step-00000001: the content of(.|\n)*start a new run|start a new"
    ):
        find_latest(saved, lambda path, reason: reports.append(path.name))
    assert reports == ["step-00000002", "step-00000001"]


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert find_latest(tmp_path, unexpected) is None
    assert find_latest(tmp_path / "missing", unexpected) is None


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    training = Training(OWN)
    for training.step in (99_999_999, 100_000_000):
        training.save(tmp_path)
    assert find_latest(tmp_path, unexpected) == tmp_path / "step-100000000"


def test_a_checkpoint_set_aside_is_not_found_again(saved: Path) -> None:
    flip_a_byte(saved / "step-00000002")
    assert set_aside(saved / "step-00000002") == saved / "damaged-step-00000002"
    assert find_latest(saved, unexpected) == saved / "step-00000001"


@pytest.mark.parametrize("name", ["optimizer.safetensors", "model/model.safetensors", "state.json"])
def test_a_file_that_is_none_is_an_error_of_the_checkpoint(name: str, saved: Path) -> None:
    (saved / "step-00000002" / name).write_bytes(b"garbage")
    with pytest.raises(CheckpointError):
        Training(OWN).load(saved / "step-00000002")


def test_a_checkpoint_of_another_model_is_refused(saved: Path) -> None:
    wider = OWN.model_copy(update={"hidden_size": 32})
    with pytest.raises(CheckpointError, match="another model"):
        Training(wider).load(saved / "step-00000002")


# Pruning and replacing.


def test_the_newest_k_stay(tmp_path: Path) -> None:
    training = Training(OWN)
    for training.step in range(1, 6):
        training.save(tmp_path, keep_latest_k=3)
    assert names(tmp_path) == ["step-00000003", "step-00000004", "step-00000005"]
    training.step = 6
    training.save(tmp_path, keep_latest_k=1)
    assert names(tmp_path) == ["step-00000006"]


def test_pruning_happens_after_the_new_one_is_in_place(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def look(folder: Path, step: int, keep_latest_k: int) -> None:
        seen.append(names(folder))

    monkeypatch.setattr("drivetrain.engine.checkpoint.save.prune", look)
    training = Training(OWN)
    training.step = 3
    training.save(saved, keep_latest_k=1)
    assert seen == [["step-00000001", "step-00000002", "step-00000003"]]


def test_a_damaged_checkpoint_takes_no_place_among_those_kept(saved: Path) -> None:
    truncate(saved / "step-00000002")
    training = Training(OWN)
    training.step = 3
    training.save(saved, keep_latest_k=2)
    assert find_latest(saved, unexpected) == saved / "step-00000003"
    assert damage(saved / "step-00000001") is None


def test_a_later_damaged_checkpoint_does_not_push_out_the_one_just_saved(saved: Path) -> None:
    (saved / "step-00000002").rename(saved / "step-00000009")
    delete_the_manifest(saved / "step-00000009")
    training = Training(OWN)
    training.step = 3
    training.save(saved, keep_latest_k=1)
    assert damage(saved / "step-00000003") is None


def test_the_same_step_can_be_saved_again(saved: Path) -> None:
    flip_a_byte(saved / "step-00000002")
    training = Training(OWN)
    training.step = 2
    training.save(saved)
    assert find_latest(saved, unexpected) == saved / "step-00000002"
    assert names(saved) == ["step-00000001", "step-00000002"]
