"""Bad input of ``train``: found by the launcher, in one message, before a run directory exists."""

import json
from pathlib import Path

import pytest

from drivetrain.archive.reader import open_run
from drivetrain.cli.train_command import new_run, run_train
from drivetrain.config import load_config
from drivetrain.errors import ConfigurationError, DrivetrainError
from rank_processes import free_port
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
        ({"dry": True, "max_restarts": 2}, "--max-restarts watches over a run, and --dry-run makes none"),
        ({"overfit": True, "max_restarts": 2}, "watches over a run, and --overfit-batch makes none"),
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


TP, PP, DP, ZERO, LIMIT = (
    "parallelism.tensor_model_parallel_size=2",
    "parallelism.pipeline_model_parallel_size=2",
    "parallelism.data_parallel_size=2",
    "parallelism.zero_stage=1",
    "memory.device_memory_limit_bytes=100000000",
)
IDLE = "note: no effect: lr_schedule.lr_wsd_decay_tokens, because"


@pytest.mark.parametrize("size", [TP, PP, DP])
def test_a_batch_is_overfitted_in_one_process_and_sizes_of_several_are_refused(tiny: Tiny, size: str) -> None:
    said = refusal(tiny, size, "training.micro_batch_size=1", overfit=True)
    assert said == f"--overfit-batch trains in one process; use {size.replace('=2', '=1')}"


def test_what_has_no_effect_is_named_before_a_batch_is_overfitted(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("drivetrain.cli.overfit.run_overfit", lambda loaded, as_json: 0)
    overrides = ["lr_schedule.lr_wsd_decay_tokens=10", ZERO, LIMIT]
    assert (
        run_train(str(tiny.file), overrides, num_processes=None, dry=False, overfit=True, as_json=True) == 0
    )
    said = capsys.readouterr().err
    assert IDLE in said
    assert "no effect: parallelism.zero_stage, because there is one data-parallel rank" in said


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("under_torchrun", [False, True])
def test_what_has_no_effect_is_named_when_a_run_is_continued(
    under_torchrun: bool,
    by_name: bool,
    tiny: Tiny,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    overrides = ["lr_schedule.lr_wsd_decay_tokens=10", "run.name=again"]
    path = new_run(load_config(str(tiny.file), overrides), 1)
    source, given = (str(tiny.file), overrides) if by_name else (str(path), [])
    capsys.readouterr()

    def stop(*_arguments: object) -> None:
        raise DrivetrainError("not trained here")

    monkeypatch.setattr("drivetrain.engine.worker.work", stop)
    if under_torchrun:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", **place}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("drivetrain.engine.rendezvous.agree_on_run", lambda _ranks, make, _store: make())
    with pytest.raises(DrivetrainError, match="not trained here"):
        run_train(source, given, num_processes=None, dry=False, overfit=False, as_json=True, resume=by_name)
    assert capsys.readouterr().err.count(IDLE) == 1


@pytest.mark.parametrize(
    ("overrides", "world_size", "message"),
    [
        ([DP], 4, "parallelism.data_parallel_size: 2 does not equal the number of processes, 4"),
        ([], 16, "training.global_batch_size"),
    ],
)
def test_a_run_that_torchrun_continues_with_processes_that_do_not_fit_is_refused(
    overrides: list[str], world_size: int, message: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = new_run(load_config(str(tiny.file), ["training.micro_batch_size=2", *overrides]), 2)
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", str(world_size))):
        monkeypatch.setenv(name, value)

    def trained(*_arguments: object) -> None:
        raise AssertionError("it was started")

    monkeypatch.setattr("drivetrain.engine.worker.work", trained)
    with pytest.raises(ConfigurationError) as caught:
        run_train(str(path), (), num_processes=None, dry=False, overfit=False, as_json=True)
    assert message in str(caught.value)


@pytest.mark.parametrize("share", [TP, PP, ZERO])
def test_a_memory_limit_that_cannot_be_counted_is_refused_by_every_verb(tiny: Tiny, share: str) -> None:
    overrides = [share, LIMIT, "training.micro_batch_size=1"]
    why = "memory.device_memory_limit_bytes: on a CPU it is held by counting one step of a rank"
    assert why in refusal(tiny, *overrides, dry=True, num_processes=2)
    assert why in refusal(tiny, *overrides, num_processes=2)
    checked = tiny.run("check", str(tiny.file), *overrides, "--devices", "2", "--json")
    document = json.loads(checked.stdout)
    assert (checked.returncode, document["accepted"]) == (1, False)
    assert [violation["rule"] for violation in document["violations"]] == ["memory-limit-counts-whole-ranks"]


def test_a_step_has_as_many_micro_batches_as_the_ranks_that_are_there_share(tiny: Tiny) -> None:
    """The configuration may name more ranks than were started past the command line, which refuses it."""
    from drivetrain.engine.parallel.process_group import Ranks
    from drivetrain.engine.worker import work

    path = new_run(load_config(str(tiny.file), [DP, "training.train_iters=1", "training.eval_iters=0"]), 2)
    assert work(path, Ranks()).outcome.status == "finished"
    (line,) = open_run(path).metrics()
    assert line["progress/tokens"] == 8 * 32, "a whole global batch"
