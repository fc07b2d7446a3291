"""Launchers: their templates, and how the processes that they start are known to have ended."""

import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from drivetrain.archive.reader import open_run
from drivetrain.archive.tunes import list_tunes, open_tune
from drivetrain.errors import DrivetrainError, EnvironmentFault
from drivetrain.lab import Lab, missing
from drivetrain.tune.launched import STOP, began_file
from drivetrain.tune.launcher import HowItEnded, LaunchedRanks, Launcher
from drivetrain.tune.trainer import CommandLineTrainer
from runs_on_the_spot import Tiny

FAKE = Path(__file__).with_name("fake_launcher.py")
NASTY = ["a b", "c'd", '"e"', "$HOME", "{command}", "`x`", "", "ü;rm", "new\nline"]


def fake(*options: str) -> str:
    """A template of the fake launcher, each word quoted."""
    return f"{shlex.join([sys.executable, str(FAKE), *options])} -- {{command}}"


# Templates.


def test_the_words_of_the_command_take_the_place_of_the_placeholder_as_they_are() -> None:
    launcher = Launcher.parse("srun --ntasks={world_size} 'two words' {{x}} {command} end")
    assert launcher.command(NASTY, 8) == ["srun", "--ntasks=8", "two words", "{x}", *NASTY, "end"]


def test_a_command_line_is_read_back_by_a_shell_to_the_same_words() -> None:
    launcher = Launcher.parse("bash -c 'cd / && exec {command_line}'")
    program = "import json, sys; print(json.dumps(sys.argv[1:]))"
    words = launcher.command([sys.executable, "-S", "-c", program, *NASTY], 2)
    done = subprocess.run(words, stdout=subprocess.PIPE, check=True)
    assert json.loads(done.stdout) == NASTY


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("", "has no place for the command: write {command} or {command_line} once"),
        ("srun", "has no place for the command"),
        ("srun {command} {command}", "has 2 places"),
        ("srun {command} {command_line}", "has 2 places"),
        ("srun 'x {command}'", "must be a word of its own"),
        ("srun {comand}", "did you mean {command}?"),
        ("srun {} {command}", "{} is no placeholder"),
        ("srun { {command}", "a lone '{'"),
        ("srun 'x {command}", "it cannot be split into words as a shell would"),
        ("{command}", "a launcher is a program that starts it"),
        ("srun \0 {command}", "null character"),
    ],
)
def test_what_is_no_template_is_refused_with_what_is_wrong(template: str, message: str) -> None:
    with pytest.raises(DrivetrainError) as refused:
        Launcher.parse(template)
    assert message in str(refused.value)


def test_a_program_that_is_not_there_is_named() -> None:
    with pytest.raises(EnvironmentFault, match="no program 'no-such-launcher'"):
        Launcher.parse("no-such-launcher {command}").require_program()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["llama-2m", "--launcher", "srun"], "has no place for the command"),
        (["llama-2m", "--launcher", "no-such-launcher {command}"], "no program 'no-such-launcher'"),
        (["--replay", "x", "--launcher", "srun {command}"], "drop --launcher"),
    ],
)
def test_a_launcher_that_cannot_start_anything_is_refused_before_a_folder_is_made(
    tiny: Tiny, arguments: list[str], message: str
) -> None:
    done = tiny.run("tune", *arguments)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert not (tiny.folder / "tunes").exists()


# How processes ended.

Launch = Callable[..., HowItEnded]


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """Have the fake launcher run a program on ranks, and say how it ended."""

    def launched(program: str, *options: str, ranks: int = 2, expected: int | None = None) -> HowItEnded:
        made = LaunchedRanks(tmp_path / "attempt-0000", ranks if expected is None else expected)
        inside = made.command([sys.executable, "-S", "-c", f"import os, sys, time\n{program}"], tmp_path)
        words = Launcher.parse(fake(str(ranks), *options)).command(inside, ranks)
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        return made.ended(done.returncode, lambda: done.stdout + done.stderr)

    return launched


def test_all_ended_well_and_rank_zero_has_its_say(launch: Launch, tmp_path: Path) -> None:
    rank = "os.environ['RANK']"
    ended = launch(f"print('out', {rank}); print('run: here', {rank}, file=sys.stderr)")
    assert ended == HowItEnded(0, "run: here 0\n", False)
    assert (tmp_path / "attempt-0000" / "rank-0.out").read_text() == "out 0\n"


def test_a_process_starts_in_the_directory_of_the_tune(launch: Launch, tmp_path: Path) -> None:
    assert launch("sys.stderr.write(os.getcwd())", ranks=1).text == str(tmp_path)


def test_the_exit_code_is_that_of_the_process_and_not_of_the_launcher(launch: Launch) -> None:
    ended = launch("print('error: bad', file=sys.stderr); sys.exit(2)")
    assert (ended.code, ended.text) == (2, "error: bad\n")


def test_who_failed_first_is_the_cause_and_not_who_waited_for_it(launch: Launch) -> None:
    program = """
if os.environ["RANK"] == "0":
    time.sleep(1.0)
    print("error: the other has gone", file=sys.stderr)
    sys.exit(1)
print("error: I am the cause", file=sys.stderr)
sys.exit(2)"""
    assert launch(program) == HowItEnded(2, "error: I am the cause\n", False)


def test_a_signal_is_known_by_its_number(launch: Launch) -> None:
    assert launch(f"os.kill(os.getpid(), {int(signal.SIGABRT)})", ranks=1).code == -signal.SIGABRT


def test_a_process_that_was_killed_while_memory_was_there_did_not_run_out_of_it(launch: Launch) -> None:
    ended = launch(f"os.kill(os.getpid(), {int(signal.SIGKILL)})", ranks=1)
    assert (ended.code, ended.memory_kill) == (-signal.SIGKILL, False)


@pytest.mark.parametrize(
    ("options", "ranks", "expected", "message"),
    [
        (("--only", "1"), 2, 2, "it started 1 of 2 processes of the run"),
        (("--only", "0"), 2, 2, "it started 0 of 2 processes"),
        ((), 3, 2, "the launcher starts 3 processes, and the tune is of 2 processes"),
        (("--without", "MASTER_PORT"), 2, 2, "the launcher does not set MASTER_PORT for the processes"),
        (("--nonsense",), 2, 2, "unrecognized arguments: --nonsense"),
    ],
)
def test_a_launcher_that_does_not_do_its_part_is_no_result_of_a_configuration(
    launch: Launch, options: tuple[str, ...], ranks: int, expected: int, message: str
) -> None:
    with pytest.raises(EnvironmentFault, match="the launcher did not do its part") as refused:
        launch("pass", *options, ranks=ranks, expected=expected)
    assert message in str(refused.value)


def test_a_launcher_may_be_ended_by_a_signal_without_a_name(tmp_path: Path) -> None:
    ranks = LaunchedRanks(tmp_path / "attempt-0000", 1)
    with pytest.raises(EnvironmentFault, match=r"ended by signal 40\): it started 0 of 1"):
        ranks.require_begun(-40, lambda: "")


def test_processes_that_the_launcher_took_along_crashed(tmp_path: Path) -> None:
    ranks = LaunchedRanks(tmp_path / "attempt-0000", 1)
    words = ranks.command([sys.executable, "-S", "-c", "import time; time.sleep(600)"], tmp_path)
    process = subprocess.Popen(words)
    while not began_file(ranks.folder, 0).exists():
        time.sleep(0.01)
    process.kill()
    ended = ranks.ended(-process.wait(), lambda: "")
    assert ended.code == 1
    assert "before rank 0 on" in ended.text


def test_processes_end_where_the_folder_says_stop_and_can_save(tmp_path: Path) -> None:
    ranks = LaunchedRanks(tmp_path / "attempt-0000", 1)
    program = """
import signal, sys, time
def save(*_):
    print("saved", file=sys.stderr)
    sys.exit(130)
signal.signal(signal.SIGTERM, save)
print("ready", file=sys.stderr, flush=True)
time.sleep(600)"""
    process = subprocess.Popen(ranks.command([sys.executable, "-S", "-c", program], tmp_path))
    while not ranks.log.exists() or not ranks.log.read_text():
        time.sleep(0.01)
    ranks.ask_to_stop()
    assert (ranks.folder / STOP).exists()
    assert process.wait() == 130
    assert ranks.ended(130, lambda: "") == HowItEnded(130, "ready\nsaved\n", False)


# Real runs.


@pytest.mark.long
def test_runs_that_a_launcher_starts_end_as_runs_of_this_machine_do(tiny: Tiny) -> None:
    (tiny.folder / "faults.py").write_text(
        "import os\ndef die(ids):\n    if os.environ['RANK'] == '1':\n        os.abort()\n    return ids\n"
    )
    cases = {
        "finished": ["training.train_iters=2"],
        "refused": ["training.global_batch_size=9"],
        "out_of_memory": ["memory.device_memory_limit_bytes=1000"],
        "crash": ["data.transform=faults:die"],
    }
    launcher = Launcher.parse(fake("2"))
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tiny.folder)}
    with CommandLineTrainer(
        tiny.folder / "logs", directory=tiny.folder, environment=environment, launcher=launcher
    ) as trainer:
        attempts = {name: trainer.train(tiny.file, case, world_size=2) for name, case in cases.items()}
        profile = trainer.profile(tiny.file, [], steps=2, world_size=2)
    assert {name: one.outcome for name, one in attempts.items()} == {name: name for name in cases}
    finished = attempts["finished"]
    assert finished.run is not None
    assert finished.summary is not None
    assert open_run(finished.run).manifest["layout"]["world_size"] == 2
    assert finished.summary["steps"] == 2
    assert "global_batch_size" in attempts["refused"].message
    assert "device_memory_limit_bytes = 1,000" in attempts["out_of_memory"].message
    assert "SIGABRT" in attempts["crash"].message
    assert profile.outcome == "finished", profile.message
    assert profile.run is not None
    account = json.loads((profile.run / "account.json").read_text())
    assert {rank["rank"] for rank in account["windows"][0]["account"]["ranks"]} == {0, 1}


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("only_labs_here")
def test_a_tune_in_the_lab_keeps_its_launcher_and_goes_on_with_it(tiny: Tiny) -> None:
    labs = tiny.folder / "labs"
    reason = missing(labs)
    if reason is not None:
        pytest.skip(reason)
    environment = {"DRIVETRAIN_LAB_DIR": str(labs), "OMP_WAIT_POLICY": "PASSIVE"}
    launcher = f"{shlex.join([sys.executable, '-m', 'drivetrain'])} lab run --name tuning -- {{command}}"
    lab = Lab(2, 1, "50mbit", folder=labs)
    begun = ["tune", str(tiny.file), "training.train_iters=600", "overlap.bucket_size_mb=0", "--nproc", "2"]
    # Nothing is saved while the steps run, so that the ladder has a baseline and nothing to try: no time decides.
    only = ["--only", "async_save"]
    # There is no lab yet: that is the launcher's fault, and no result.
    failed = tiny.run(*begun, *only, "--launcher", launcher, environment=environment)
    assert failed.returncode == 2, failed.stderr
    assert "the launcher did not do its part" in failed.stderr
    assert "there is no lab called tuning" in failed.stderr
    (path,) = list_tunes(tiny.folder / "tunes")
    assert open_tune(str(path)).document["pieces"] == []
    lab.make("tuning")
    try:
        done = tiny.run("tune", str(path), "--json", environment=environment)
    finally:
        lab.take_down()
    assert done.returncode == 1, done.stderr
    document = open_tune(str(path)).document
    assert document["status"] == "finished"
    assert document["settings"]["launcher"] == launcher
    assert any(name.startswith("communication.") for name in document["baseline"]["classes"])
    run = Path(document["baseline"]["run"])
    assert run.is_relative_to(path.resolve())
    assert open_run(run).manifest["layout"]["world_size"] == 2
