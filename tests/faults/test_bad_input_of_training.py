"""Bad input of ``train``: found by the launcher, in one message, before a run directory exists."""

import json
from pathlib import Path

import pytest

from drivetrain.archive.reader import open_run
from drivetrain.cli.train_command import new_run, run_train
from drivetrain.config import load_config
from drivetrain.errors import DrivetrainError
from runs_on_the_spot import Tiny


def refusal(tiny: Tiny, *overrides: str, source: str | None = None, **options: object) -> str:
    given = {"num_processes": None, "dry": False, "overfit": False, "as_json": True, **options}
    with pytest.raises(DrivetrainError) as caught:
        run_train(str(tiny.file) if source is None else source, overrides, **given)  # type: ignore[arg-type]
    assert not tiny.runs.exists(), "nothing is left behind"
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.transform=no_such_module.function", "cannot be imported"),
        ("data.transform=os.no_such_function", "has no 'no_such_function'"),
        ("data.transform=os.getcwd", "it raised TypeError"),
        ("data.transform=builtins.len", "it returned int"),
        ("checkpoint.initial_load_path=/no/such/folder", "does not exist"),
        ("model.seq_length=100000", "the train split"),
        ("data.split=99999,1", "the validation split"),
        ("data.tokenizer_path=/no/such/tokenizer.json", "no tokenizer"),
        ("model.vocab_size=300", "outside model.vocab_size = 300"),
        ("run.device=cuda", "run.device=cuda"),
        (f"data.data_path={'x' * 5000}", "too long"),
    ],
)
@pytest.mark.parametrize("num_processes", [1, 2])
def test_what_is_wrong_with_the_inputs_is_said_before_a_run_exists(
    tiny: Tiny, override: str, message: str, num_processes: int
) -> None:
    try:
        said = refusal(tiny, override, num_processes=num_processes)
    except OSError as error:
        # The command line shows what the system says and exits with 2.
        said = str(error)
    assert message in said


def test_initial_weights_of_another_shape_are_refused_before_a_run_exists(tiny: Tiny, tmp_path: Path) -> None:
    from drivetrain.engine.model.huggingface import export_folder
    from drivetrain.engine.model.initialization import initialize
    from drivetrain.engine.precision import compute_dtype

    config = load_config(str(tiny.file)).config
    from drivetrain.engine.model.decoder import Decoder

    decoder = Decoder(config.model, compute_dtype(config.precision))
    initialize(decoder, 1)
    (tmp_path / "exported").mkdir()
    export_folder(decoder.state_dict(), config.model, tmp_path / "exported")
    path = f"checkpoint.initial_load_path={tmp_path / 'exported'}"
    assert "model.num_layers is 2 there and 3 here" in refusal(tiny, path, "model.num_layers=3")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dry": True, "overfit": True}, "give one of them"),
        ({"num_processes": 2, "overfit": True}, "drop --nproc"),
        ({"source": ""}, "no preset is called ''"),
        ({"source": "x" * 5000}, "can't be looked up"),
    ],
)
def test_a_request_that_would_have_no_effect_is_refused(
    tiny: Tiny, options: dict[str, object], message: str
) -> None:
    assert message in refusal(tiny, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("option", ["dry", "overfit", "num_processes"])
def test_options_for_one_process_are_refused_under_torchrun(
    tiny: Tiny, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert "under torchrun" in refusal(tiny, **{option: 2 if option == "num_processes" else True})  # type: ignore[arg-type]


def test_a_run_is_continued_with_as_many_processes_as_it_had(
    tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    path = new_run(load_config(str(tiny.file), ["training.micro_batch_size=2"]), 2)
    code = run_train(str(path), (), num_processes=None, dry=True, overfit=False, as_json=True)
    assert code == 0
    assert json.loads(capsys.readouterr().out)["num_microbatches"] == 2, "8 sequences / 2 / 2 processes"


def test_an_evaluation_that_runs_out_of_held_out_text_says_so(tiny: Tiny) -> None:
    document = tiny.train("training.eval_iters=1000", "training.train_iters=2")
    warnings = [
        event["message"] for event in open_run(document["run"]).events() if event["kind"] == "warning"
    ]
    assert any("eval_iters asks for 1,000 global batches" in message for message in warnings)
