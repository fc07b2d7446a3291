"""Checkpoints: resume to the bit, whole or not at all, damaged ones passed over, all ranks together."""

import errno
import json
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from drivetrain.config.model import ModelConfig
from drivetrain.config.training import OptimizerConfig
from drivetrain.engine.checkpoint import (
    damage,
    find_latest,
    load_checkpoint,
    load_model,
    remove_leftovers,
    save_checkpoint,
    set_aside,
)
from drivetrain.engine.checkpoint import save as save_module
from drivetrain.engine.model.batch import whole_sequences
from drivetrain.engine.model.decoder import Decoder
from drivetrain.engine.model.initialization import initialize
from drivetrain.engine.optimizer import build_optimizer, clip_gradients, optimizer_state
from drivetrain.engine.random_state import deterministic, restore_random_state, seed_everything
from drivetrain.errors import CheckpointError, EnvironmentFault

LLAMA = ModelConfig(
    num_layers=2, hidden_size=16, num_attention_heads=4, num_query_groups=2, seq_length=8, vocab_size=50
)
GPT = ModelConfig(
    num_layers=1,
    hidden_size=16,
    num_attention_heads=2,
    seq_length=8,
    vocab_size=50,
    normalization="LayerNorm",
    position_embedding_type="learned_absolute",
    activation_func="gelu",
    add_bias_linear=True,
    hidden_dropout=0.1,
)
OWN = ModelConfig(
    num_layers=1,
    hidden_size=16,
    num_attention_heads=2,
    seq_length=8,
    vocab_size=50,
    normalization="RMSNorm",
    position_embedding_type="learned_absolute",
    activation_func="swiglu",
    hidden_dropout=0.1,
)
MODELS = {"llama": LLAMA, "gpt": GPT, "own": OWN}


class Training:
    """A loop small enough to be read at a glance: decoder, optimizer, counters."""

    def __init__(self, model: ModelConfig, seed: int = 0) -> None:
        self.model = model
        self.decoder = Decoder(model, torch.float32)
        initialize(self.decoder, seed)
        self.optimizer = build_optimizer(self.decoder, OptimizerConfig(lr=1e-2))
        self.step = 0

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            batch = whole_sequences(torch.randint(self.model.vocab_size, (2, 8)))
            loss = self.decoder.loss_sum(batch) / batch.num_valid_tokens
            loss.backward()
            clip_gradients(self.decoder.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
            losses.append(loss.item())
        return losses

    def save(self, folder: Path, keep_latest_k: int = 2, **arguments: Any) -> Path:
        return save_checkpoint(
            folder,
            self.step,
            model=self.model,
            decoder=self.decoder,
            optimizer=self.optimizer,
            trainer_state={"samples": 2 * self.step, "flops": 2**80 + self.step, "loss_ema": 0.1 + 0.2},
            keep_latest_k=keep_latest_k,
            **arguments,
        )

    def load(self, path: Path) -> Mapping[str, Any]:
        loaded = load_checkpoint(path, self.decoder, self.optimizer)
        assert loaded.random_state is not None
        restore_random_state(loaded.random_state)
        self.step = loaded.step
        return loaded.trainer_state


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder with sound checkpoints of steps 1 and 2."""
    seed_everything(0, 0)
    training = Training(OWN)
    for _ in range(2):
        training.train(1)
        training.save(tmp_path)
    return tmp_path


def unexpected(path: Path, reason: str) -> None:
    raise AssertionError(f"{path} is damaged: {reason}")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


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


# Full disks and killed processes.


@pytest.mark.parametrize("name", ["save_file", "seal", "publish", "export_folder"])
def test_a_full_disk_leaves_the_former_checkpoints_and_says_how_many_bytes_lack(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    training = Training(LLAMA)
    training.save(tmp_path)
    training.step = 3
    monkeypatch.setattr(f"drivetrain.engine.checkpoint.save.{name}", full)
    with pytest.raises(
        EnvironmentFault, match=r"No space left on device.*needs [\d,]+ bytes, [\d,]+ bytes are free"
    ):
        training.save(tmp_path, keep_latest_k=1)
    assert names(tmp_path) == ["step-00000000"]
    assert find_latest(tmp_path, unexpected) == tmp_path / "step-00000000"


def test_room_is_looked_for_before_anything_is_written(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 1000

    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage())
    training = Training(OWN)
    training.step = 3
    with pytest.raises(EnvironmentFault, match=r"no room.*1,000 bytes are free"):
        training.save(saved)
    assert names(saved) == ["step-00000001", "step-00000002"]


WRITER = f"""
import resource, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch
torch.set_num_threads(1)
from drivetrain.errors import EnvironmentFault
from test_checkpoint import OWN, Training
"""


def run_python(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER + code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_write_that_the_system_refuses_leaves_the_former_checkpoint(tmp_path: Path) -> None:
    process = run_python(
        f"""
folder = Path({str(tmp_path)!r})
training = Training(OWN)
training.save(folder)
training.step = 1
resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
try:
    training.save(folder)
except EnvironmentFault as fault:
    print(fault)
"""
    )
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "File too large" in output
    assert names(tmp_path) == ["step-00000000"]
    assert find_latest(tmp_path, unexpected) == tmp_path / "step-00000000"


KILLED_AT_EVERY_FILE_OPERATION = """
import os, shutil, signal
from drivetrain.engine.checkpoint import find_latest, remove_leftovers

def kill_at(operation):
    seen = 0
    def hook(event, arguments):
        nonlocal seen
        if any(isinstance(argument, (str, Path)) and str(argument).startswith(str(work)) for argument in arguments):
            seen += 1
            if seen == operation:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)

def save_in_a_child(operation):
    pid = os.fork()
    if pid == 0:
        kill_at(operation)
        training.save(work, keep_latest_k=1)
        os._exit(0)
    return os.waitpid(pid, 0)[1]

def unexpected(path, reason):
    raise AssertionError(f"killed at {operation}: {path} is damaged: {reason}")

training = Training(OWN)
origin, work = folder / "origin", folder / "work"
for training.step in (1, 2):
    training.save(origin)
training.step = new_step
outcomes, operation, status = set(), 0, 1
while status != 0:
    operation += 1
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(origin, work)
    status = save_in_a_child(operation)
    assert status == 0 or os.WTERMSIG(status) == signal.SIGKILL, status
    assert find_latest(work, unexpected) is not None
    remove_leftovers(work)
    newest = find_latest(work, unexpected)
    assert newest.name in ("step-00000002", "step-00000003"), newest
    assert not list(work.glob(".*")), list(work.iterdir())
    outcomes.add((newest.name, status == 0))
print(operation, sorted(outcomes))
"""


@pytest.mark.parametrize("new_step", [2, 3])
def test_kill_9_at_every_file_operation_of_a_save_leaves_a_sound_checkpoint(
    new_step: int, tmp_path: Path
) -> None:
    code = f"folder = Path({str(tmp_path)!r})\nnew_step = {new_step}\n" + KILLED_AT_EVERY_FILE_OPERATION
    process = run_python(code)
    output, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    operations, outcomes = output.split(" ", 1)
    assert int(operations) > 20
    new = f"step-{new_step:08d}"
    # Some kills come before the rename that counts, some (while pruning) after it; the last round has none.
    assert outcomes.strip() == str(sorted({("step-00000002", False), (new, False), (new, True)}))


def test_leftovers_of_dead_processes_go_and_those_of_live_ones_stay(saved: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    dead = saved / f".tmp-step-00000003-{process.pid}-0a"
    replaced = saved / f".old-step-00000001-{process.pid}-0a"
    live = saved / ".tmp-step-00000003-1-0a"
    for path in (dead, replaced, live):
        path.mkdir()
        (path / "state.json").write_text("{}")
    assert remove_leftovers(saved) == [replaced, dead]
    assert names(saved) == [live.name, "step-00000001", "step-00000002"]
    assert remove_leftovers(saved / "missing") == []


# Several ranks.


def on_ranks(world_size: int, work: Callable[[int, Callable[[], None]], object]) -> list[object]:
    """Run ``work(rank, barrier)`` on threads; returns what each returned or raised."""
    barrier = threading.Barrier(world_size, timeout=60)
    results: list[object] = [None] * world_size

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank, lambda: barrier.wait() and None)
        except EnvironmentFault as fault:
            results[rank] = fault

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_every_rank_keeps_its_own_generators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = iter(range(3))
    monkeypatch.setattr(
        "drivetrain.engine.checkpoint.save.capture_random_state",
        lambda: {"torch_cpu": torch.tensor([next(states)])},
    )
    training = [Training(OWN, seed=7) for _ in range(3)]
    paths = on_ranks(
        3, lambda rank, barrier: training[rank].save(tmp_path, rank=rank, world_size=3, barrier=barrier)
    )
    path = tmp_path / "step-00000000"
    assert paths == [path] * 3
    assert damage(path) is None
    loaded = [
        load_checkpoint(path, training[rank].decoder, training[rank].optimizer, rank=rank, world_size=3)
        for rank in range(3)
    ]
    kept = [int(one.random_state["torch_cpu"]) for one in loaded if one.random_state is not None]
    assert sorted(kept) == [0, 1, 2]


def test_another_number_of_ranks_has_no_generators_to_continue_from(saved: Path) -> None:
    training = Training(OWN)
    loaded = load_checkpoint(
        saved / "step-00000002", training.decoder, training.optimizer, rank=1, world_size=2
    )
    assert loaded.random_state is None
    assert (loaded.step, loaded.world_size) == (2, 1)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_disk_that_is_full_on_one_rank_is_an_error_on_all_of_them(
    failing: int, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(temporary: Path, rank: int) -> None:
        if rank == failing:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(temporary, rank)

    write = save_module._write_random_state
    monkeypatch.setattr(save_module, "_write_random_state", full)
    training = [Training(OWN) for _ in range(2)]
    # The step exists already, so a rank can't take the folder of that name for the new checkpoint.
    for one in training:
        one.step = 2

    def work(rank: int, barrier: Callable[[], None]) -> Path:
        return training[rank].save(saved, rank=rank, world_size=2, barrier=barrier)

    results = on_ranks(2, work)
    assert all(isinstance(result, EnvironmentFault) for result in results), results
    assert "No space left" in str(results[failing])
    assert names(saved) == ["step-00000001", "step-00000002"]
    assert find_latest(saved, unexpected) == saved / "step-00000002"
