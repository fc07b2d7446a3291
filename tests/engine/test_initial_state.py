"""A run that starts from another run's checkpoint: it goes on where that one stood, or says what is wrong."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from drivetrain.archive.reader import Run, open_run
from drivetrain.cli.beginning import Beginning
from drivetrain.cli.train_command import run_train, train_to_end
from drivetrain.config import load_config
from drivetrain.engine.initial_state import other_data
from drivetrain.errors import DrivetrainError
from runs_on_the_spot import Tiny, losses_of

SETTINGS = (
    "training.train_iters=8",
    "checkpoint.save_interval=4",
    "training.eval_iters=0",
    "model.hidden_dropout=0.1",
    "run.deterministic=true",
)
PLAIN = Beginning()
STATE = "checkpoint.initial_load_model_only=false"


def at(path: Path | str) -> str:
    return f"checkpoint.initial_load_path={path}"


@pytest.fixture(scope="module")
def former(tmp_path_factory: pytest.TempPathFactory, tiny_corpus: Path) -> Run:
    """A run of eight steps, of which steps 4 and 8 are saved."""
    return open_run(Tiny(tmp_path_factory.mktemp("former"), tiny_corpus).train(*SETTINGS)["run"])


@pytest.fixture
def checkpoint(former: Run) -> Path:
    return former.path / "checkpoints" / "step-00000004"


def test_a_new_run_goes_on_where_the_checkpoint_stands_to_the_bit(
    tiny: Tiny, former: Run, checkpoint: Path
) -> None:
    run = open_run(tiny.train(*SETTINGS, at(checkpoint), STATE)["run"])
    expected = losses_of(former)
    assert losses_of(run) == {step: expected[step] for step in range(5, 9)}
    start = next(event for event in run.events() if event["kind"] == "start")
    assert start["step"] == 4
    for key in ("progress/tokens", "progress/samples", "progress/flops", "train/loss_ema"):
        assert run.metrics()[-1].get(key) == former.metrics()[-1].get(key), key
    ends = [one.path / "checkpoints" / "step-00000008" for one in (former, run)]
    for name in ("model/model.safetensors", "optimizer.safetensors"):
        old, new = (load_file(end / name) for end in ends)
        assert old.keys() == new.keys()
        assert all(old[key].equal(new[key]) for key in old), name


def test_weights_alone_begin_at_step_one(tiny: Tiny, checkpoint: Path) -> None:
    run = open_run(tiny.train(*SETTINGS, at(checkpoint / "model"))["run"])
    assert list(losses_of(run)) == list(range(1, 9))


def refusal(tiny: Tiny, *overrides: str, beginning: Beginning = PLAIN, dry: bool = False) -> str:
    with pytest.raises(DrivetrainError) as caught:
        run_train(
            str(tiny.file),
            [*SETTINGS, *overrides],
            num_processes=1,
            dry=dry,
            overfit=False,
            as_json=True,
            beginning=beginning,
        )
    assert not tiny.runs.exists(), "nothing is left behind"
    return str(caught.value)


def test_a_run_in_place_of_its_checkpoint_is_refused_with_the_newest_one(tiny: Tiny, former: Run) -> None:
    said = refusal(tiny, at(former.path), STATE)
    assert f"it is a run, whose newest checkpoint is {former.path / 'checkpoints' / 'step-00000008'}" in said


def test_a_folder_of_weights_in_place_of_a_checkpoint_is_refused(tiny: Tiny, checkpoint: Path) -> None:
    assert "use checkpoint.initial_load_model_only=true" in refusal(tiny, at(checkpoint / "model"), STATE)


def test_a_checkpoint_in_place_of_its_weights_is_refused_with_both_ways_to_use_it(
    tiny: Tiny, checkpoint: Path
) -> None:
    said = refusal(tiny, at(checkpoint))
    assert f"its weights alone are in {checkpoint / 'model'}" in said
    assert "with checkpoint.initial_load_model_only=false the run goes on from it" in said
    assert "is a checkpoint" not in refusal(tiny, at(checkpoint.parent))


@pytest.mark.parametrize("state", [STATE, "checkpoint.initial_load_model_only=true"])
def test_a_dry_run_looks_at_what_the_run_would_start_from(
    tiny: Tiny, checkpoint: Path, capsys: pytest.CaptureFixture[str], state: str
) -> None:
    missing = tiny.folder / "no" / "such"
    assert str(missing) in refusal(tiny, at(missing), state, dry=True)
    right, wrong = (checkpoint, checkpoint / "model")[:: 1 if state == STATE else -1]
    assert f"initial_load_model_only={'true' if state == STATE else 'false'}" in refusal(
        tiny, at(wrong), state, dry=True
    )
    settings = {"num_processes": 1, "dry": True, "overfit": False, "as_json": True}
    assert run_train(str(tiny.file), [*SETTINGS, at(right), state], **settings) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "dry run"


def change_a_byte(path: Path) -> None:
    file = path / "optimizer.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (change_a_byte, "the content of optimizer.safetensors has changed"),
        (shutil.rmtree, "manifest.json is missing"),
    ],
)
def test_a_damaged_checkpoint_is_refused_before_a_run_exists(
    harm: Callable[[Path], None], words: str, tiny: Tiny, checkpoint: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "step-00000004"
    shutil.copytree(checkpoint, copy)
    harm(copy)
    assert words in refusal(tiny, at(copy), STATE)


def test_a_checkpoint_that_is_damaged_before_the_run_has_one_of_its_own_is_refused_when_it_starts_again(
    tiny: Tiny, checkpoint: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "step-00000004"
    shutil.copytree(checkpoint, copy)
    path = Path(tiny.train(*SETTINGS, at(copy), STATE)["run"])
    shutil.rmtree(path / "checkpoints")
    events = (path / "events.jsonl").read_text()
    (path / "events.jsonl").write_text(events.replace('"status":"finished"', '"status":"interrupted"'))
    change_a_byte(copy)
    with pytest.raises(DrivetrainError, match=r"the content of optimizer.safetensors has changed"):
        train_to_end(path, 1)


@pytest.mark.parametrize("steps", [3, 4])
def test_a_checkpoint_that_leaves_nothing_to_train_is_refused(
    steps: int, tiny: Tiny, checkpoint: Path
) -> None:
    said = refusal(tiny, at(checkpoint), STATE, f"training.train_iters={steps}")
    assert f"training.train_iters = {steps} leaves nothing to train; use 5 or more" in said


@pytest.mark.parametrize("override", ["model.num_layers=3", "model.hidden_size=64"])
def test_a_checkpoint_of_another_model_is_refused_before_a_run_exists(
    override: str, tiny: Tiny, checkpoint: Path
) -> None:
    assert "another model" in refusal(tiny, at(checkpoint), STATE, override)


@pytest.mark.parametrize(
    ("beginning", "option"), [(Beginning(probe=True), "--probe"), (Beginning(perturb_ulp=1), "--perturb-ulp")]
)
def test_what_belongs_to_the_first_step_is_refused(
    beginning: Beginning, option: str, tiny: Tiny, checkpoint: Path
) -> None:
    said = refusal(tiny, at(checkpoint), STATE, beginning=beginning)
    assert said.startswith(f"{option} belongs to the first step of a run")
    assert f"checkpoint.initial_load_path={checkpoint}/model checkpoint.initial_load_model_only=true" in said
    assert beginning.origin(load_config(str(tiny.file), [at(checkpoint / "model")]).config).probe == (
        option == "--probe"
    )


def test_a_position_in_other_data_is_said_to_be_one(former: Run, checkpoint: Path, tmp_path: Path) -> None:
    own = str(former.manifest["dataset"]["fingerprint"])
    assert other_data(checkpoint, own) is None
    said = other_data(checkpoint, "0" * 64)
    assert said is not None
    assert "another corpus" in said
    assert other_data(tmp_path / "checkpoints" / "step-00000004", "0" * 64) is None, "nobody knows"


def test_a_warning_of_other_data_is_kept_with_the_run(
    tiny: Tiny, former: Run, checkpoint: Path, tmp_path: Path
) -> None:
    run_path = tmp_path / "elsewhere"
    shutil.copytree(former.path, run_path)
    manifest = json.loads((run_path / "run.json").read_text())
    manifest["dataset"]["fingerprint"] = "0" * 64
    (run_path / "run.json").write_text(json.dumps(manifest))
    run = open_run(tiny.train(*SETTINGS, at(run_path / "checkpoints" / checkpoint.name), STATE)["run"])
    warnings = [event["message"] for event in run.events() if event["kind"] == "warning"]
    assert any("the position in the data is a number of samples of that one" in text for text in warnings)
