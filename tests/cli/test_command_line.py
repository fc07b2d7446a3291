"""The frame of the command line: help, exit codes, start-up, what stays free of torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain.cli.application import VERBS
from forkserver import run_drivetrain
from runs_on_the_spot import Tiny

WITHOUT_TORCH = """
import sys
for name in ("torch", "safetensors", "tokenizers", "pyarrow"):
    sys.modules[name] = None
sys.argv = ["drivetrain", *{arguments!r}]
from drivetrain.cli import main
main()
"""


def run(*arguments: str, cwd: Path | None = None) -> "subprocess.CompletedProcess[str]":
    return run_drivetrain(arguments, cwd or Path.cwd(), dict(os.environ), timeout=300)


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_has_help_with_an_example(verb: str) -> None:
    done = run(verb, "--help")
    assert done.returncode == 0, done.stderr
    texts = done.stdout
    if "Commands" in texts:
        commands = {
            "data": ("prepare", "inspect"),
            "runs": ("list", "show", "tag"),
            "bench": ("gemm", "memory"),
            "lab": ("up", "run", "show", "down"),
            "config": ("import",),
            "ops": ("list", "check"),
        }[verb]
        texts = "".join(run(verb, command, "--help").stdout for command in commands)
    assert "drivetrain " + verb in texts.replace("Usage: drivetrain", "").replace("Usage:", "")


def test_python_runs_the_package_as_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "drivetrain", "check", "llama-2m", "model.num_layers=0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=240)
    assert (done.returncode, done.stdout) == (2, "")
    assert "model.num_layers" in done.stderr


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['drivetrain', '--help']\n"
        "from drivetrain.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'numpy', 'pydantic', 'pyarrow', 'transformers', 'orjson', 'tomlkit'} & set(sys.modules)\n"
        "sys.exit(f'imported: {sorted(heavy)}' if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "lama-2m"),
        ("train", "llama-2m", "training.train_itrs=3"),
        ("train", "llama-2m", "training.train_iters=many"),
        ("train", "llama-2m", "training.global_batch_size=7"),
        ("train", "llama-2m", "data.data_path=/no/such/corpus"),
        ("train", "no/such/file.toml"),
        ("check", "llama-2m", "model.num_layers=0"),
        ("mfu", "llama-2m", "--step-time", "1", "--devices", "1", "--device", "H100", "--dtype", "bf16"),
        ("runs", "show", "nothing"),
        ("compare", "nothing", "nothing-else"),
        ("data", "inspect", "no/such/prefix"),
        ("data", "prepare", "no-such-file.txt", "--output", "out"),
        ("generate", "nothing"),
        ("bench", "gemm", "--sustain", "soon"),
        ("train", "llama-2m", "--nproc", "0"),
        ("train", "llama-2m", "run.device=cuda", "training.train_iters=1"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(arguments: tuple[str, ...], tmp_path: Path) -> None:
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.strip()
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not (tmp_path / "runs").exists(), "nothing is left behind"


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for verb in (("train",), ("runs", "show"), ("generate",)):
        done = run(*verb, str(tmp_path / "folder"))
        assert done.returncode == 2
        assert "run.json" in done.stderr or "no run" in done.stderr


def test_check_answers_1_for_broken_rules_and_reports_them_all() -> None:
    done = run("check", "llama-2m", "training.global_batch_size=7", "lr_schedule.min_lr=5", "--json")
    assert done.returncode == 1, done.stderr
    document = json.loads(done.stdout)
    assert document["accepted"] is False
    assert len(document["violations"]) >= 2


def test_check_counts_what_it_accepts() -> None:
    document = json.loads(run("check", "llama2-7b", "--json").stdout)
    assert document["counts"]["parameters"] == 6_738_415_616
    shapes = json.loads(run("check", "llama-2m", "--shapes", "--json").stdout)["shapes"]
    assert (
        sum(shape["elements"] for shape in shapes)
        == json.loads(run("check", "llama-2m", "--json").stdout)["counts"]["parameters"]
    )


def test_check_shows_the_place_of_every_rank_and_warns_of_a_group_that_leaves_its_machine() -> None:
    layout = (
        "parallelism.tensor_model_parallel_size=2",
        "parallelism.pipeline_model_parallel_size=2",
        "training.micro_batch_size=1",
    )
    document = json.loads(run("check", "llama-2m", *layout, "--json").stdout)
    assert document["devices"] == 4, "the product of the sizes"
    assert document["layout"]["ranks"][3] == {"rank": 3, "host": 0, "tp": 1, "pp": 1}
    assert document["layout"]["warnings"] == []
    shown = run(
        "check",
        "llama-2m",
        *layout,
        "parallelism.rank_order=dp-pp-tp-cp",
        "--devices",
        "8",
        "--per-host",
        "4",
    )
    assert "  host 1: 4(dp0 pp0 tp1) 5(dp1 pp0 tp1) 6(dp0 pp1 tp1) 7(dp1 pp1 tp1)" in shown.stdout
    assert (
        "warning: 4 of 4 tensor-parallel groups lie on several machines (the first is 0, 4)" in shown.stderr
    )
    assert run("check", "llama-2m", "--devices", "8", "--per-host", "3").returncode == 2


def test_dry_run_builds_and_leaves_nothing(tmp_path: Path) -> None:
    done = run("train", "llama2-7b", "--dry-run", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["parameters"] == 6_738_415_616
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--help",), 0),
        (("check", "llama-10m"), 0),
        (
            (
                "mfu",
                "llama2-7b",
                "--step-time",
                "10",
                "--devices",
                "8",
                "--device",
                "H100-SXM-80GB",
                "--json",
            ),
            0,
        ),
        (("runs", "list"), 0),
        (("train", "llama-2m"), 2),
    ],
)
def test_the_base_install_works_without_torch(arguments: tuple[str, ...], code: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH.format(arguments=list(arguments))],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        timeout=240,
    )
    assert done.returncode == code, done.stderr
    if code == 2:
        assert "drivetrain[train]" in done.stderr


def test_overfit_batch_learns_one_batch_by_heart(tiny: Tiny) -> None:
    done = tiny.run(
        "train", str(tiny.file), "training.train_iters=400", "optimizer.lr=1e-2", "--overfit-batch", "--json"
    )
    document = json.loads(done.stdout)
    assert done.returncode == 0, document
    assert document["learned"]
    assert document["last_loss"] < 0.05
    assert not tiny.runs.exists()


def test_overfit_batch_diagnoses_a_learning_rate_that_moves_nothing(tiny: Tiny) -> None:
    done = tiny.run(
        "train",
        str(tiny.file),
        *("training.train_iters=12", "optimizer.lr=1e-9", "memory.device_memory_limit_bytes=1000"),
        "--overfit-batch",
    )
    assert done.returncode == 1
    assert "memory.device_memory_limit_bytes has no effect" in done.stderr
    assert "hardly moved" in done.stdout


def test_generate_streams_the_same_text_for_the_same_seed(tiny: Tiny) -> None:
    document = tiny.train()
    first = tiny.run("generate", document["run"], "--prompt", "import ", "--max-new-tokens", "12", "--json")
    second = tiny.run("generate", document["run"], "--prompt", "import ", "--max-new-tokens", "12")
    assert first.returncode == 0, first.stderr
    text = json.loads(first.stdout)["text"]
    assert second.stdout == "import " + text + "\n"
    assert tiny.run("generate", document["run"], "--temperature", "-1").returncode == 2
