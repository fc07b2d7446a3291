"""``drivetrain launch``: what is checked before a file is written, and what is in it."""

import json
import os
import shlex
import stat
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from drivetrain.cli.application import application
from drivetrain.errors import DrivetrainError

CLUSTER = ("--container", "image:1", "--volume", "training:/data", "run.runs_dir=/data/runs")
SMALL = ("training.micro_batch_size=2",)
"""What several processes can share."""


class Place:
    """An empty folder, and the verb in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes = ""

    def launch(self, *arguments: str) -> dict[str, Any]:
        done = CliRunner().invoke(application(), ["launch", *arguments, "--json"])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        assert done.exit_code == 0, done.output
        self.notes = done.stderr
        document: dict[str, Any] = json.loads(done.stdout)
        return document

    def refused(self, *arguments: str) -> str:
        before = sorted(self.folder.iterdir())
        with pytest.raises(DrivetrainError) as refusal:
            self.launch(*arguments)
        assert sorted(self.folder.iterdir()) == before, "nothing is written"
        return str(refusal.value)

    def script(self, document: dict[str, Any]) -> str:
        return (self.folder / document["file"]).read_text()

    def arguments(self, document: dict[str, Any]) -> list[str]:
        """What a rank is started with."""
        if document["kind"] == "slurm":
            words = shlex.split(self.script(document), comments=True)
            words = words[words.index("train=(") + 1 :]
            return words[: words.index(")")]
        last = json.loads(self.script(document))["items"][-1]["spec"]
        pod = last.get("template") or last["pytorchReplicaSpecs"]["Worker"]["template"]
        words = pod["spec"]["containers"][0]["args"]
        return list(words[words.index("-m") :])


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.chdir(tmp_path)
    return Place(tmp_path)


def program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_a_batch_script_starts_the_run_that_was_checked(place: Place) -> None:
    document = place.launch(
        "llama-2m",
        "training.micro_batch_size=2",
        "--slurm",
        "--nodes",
        "2",
        "--per-node",
        "4",
        "--name",
        "first",
    )
    assert document == {
        "kind": "slurm",
        "file": "first.sbatch",
        "world_size": 8,
        "command": ["sbatch", "first.sbatch"],
        "submitted": None,
    }
    assert place.arguments(document) == [
        *("-m", "drivetrain", "train", "llama-2m", "training.micro_batch_size=2"),
        *("run.name=first", "run.device=cuda", "--resume"),
    ]
    assert "#SBATCH --gpus-per-node=4\n" in place.script(document)
    assert "note: run.device=cuda, because the job asks for a GPU for each process" in place.notes


@pytest.mark.parametrize("kind", ["--kubernetes", "--pytorchjob"])
def test_a_manifest_brings_its_configuration_file(place: Place, kind: str) -> None:
    (place.folder / "mine.toml").write_text('preset = "llama-2m"\n# a remark\n')
    document = place.launch(
        "mine.toml", kind, *CLUSTER, "--name", "first", "--nodes", "2", "run.device=cpu", *SMALL
    )
    assert document["command"] == ["kubectl", "apply", "-f", "first.json"]
    assert document["world_size"] == 2
    config_map = json.loads(place.script(document))["items"][0]
    assert config_map["data"] == {"config.toml": 'preset = "llama-2m"\n# a remark\n'}
    assert place.arguments(document)[2:4] == ["train", "/etc/drivetrain/config.toml"]
    assert "nvidia.com/gpu" not in place.script(document)


def test_a_file_is_named_by_its_place_and_a_preset_by_its_name(place: Place) -> None:
    (place.folder / "mine.toml").write_text('preset = "llama-2m"\n')
    document = place.launch("mine.toml", "--slurm")
    assert place.arguments(document)[3] == str(place.folder / "mine.toml")
    (place.folder / "llama-2m").mkdir()
    assert place.arguments(place.launch("llama-2m", "--slurm"))[3] == "llama-2m"


def test_two_jobs_of_one_configuration_are_two_runs(place: Place) -> None:
    files = {place.launch("llama-2m", "--slurm")["file"] for _ in range(4)}
    assert len(files) == 4
    assert all(file.startswith("llama-2m-") for file in files)


def test_every_broken_rule_is_named_and_nothing_is_written(place: Place) -> None:
    message = place.refused(
        *("llama-2m", "--slurm", "--nodes", "3", "lr_schedule.min_lr=5", "training.global_batch_size=32")
    )
    assert "training.global_batch_size" in message
    assert "lr_schedule.min_lr" in message
    place.launch("llama-2m", "--slurm", "--nodes", "2", "training.global_batch_size=32")


def test_groups_that_leave_a_host_are_warned_of(place: Place) -> None:
    layout = (*SMALL, "parallelism.tensor_model_parallel_size=2", "parallelism.rank_order=dp-pp-tp-cp")
    place.launch("llama-2m", *layout, "--slurm", "--nodes", "2", "--per-node", "2")
    assert "warning: 2 of 2 tensor-parallel groups lie on several machines" in place.notes


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "give one of --slurm, --kubernetes or --pytorchjob (given: none)"),
        (("--slurm", "--kubernetes"), "given: --slurm and --kubernetes"),
        (("--slurm", "--namespace", "team"), "--namespace means nothing to --slurm"),
        (("--kubernetes", *CLUSTER, "--time", "60"), "--time means nothing to --kubernetes"),
        (("--pytorchjob", *CLUSTER, "--partition", "gpu"), "--partition means nothing to --pytorchjob"),
        (("--kubernetes",), "give --container IMAGE"),
        (("--kubernetes", "--container", "image"), "run.runs_dir = runs is on no volume"),
        (("--kubernetes", *CLUSTER, "--name", "My_Run"), "'my-run' would do"),
        (("--kubernetes", *CLUSTER, "--volume", "training"), "expected NAME:PATH"),
        (("--slurm", "--volume", "/scratch:/data"), "add --container"),
        (("--slurm", "--name", "a b"), "run.name"),
        (("--slurm", "--name", ""), "run.name"),
        (("--slurm", "--name", '"x"'), "run.name"),
        (("--slurm", "--out", ""), "give another --out"),
        (("--slurm", "--name", "one", "run.name=other"), "--name one and run.name=other"),
        (("--slurm", "--time", "soon"), "days-hours:minutes"),
        (("--slurm", "--time", "3"), "give more than 240 s"),
        (("--slurm", "--account", "a b"), "--account: 'a b'"),
        (("--slurm", "--env", "RANK=1"), "--env RANK"),
        (("--slurm", "training.train_itrs=3"), "training.train_iters"),
        (("--slurm", "data.data_path=a\udcff"), "valid Unicode"),
    ],
)
def test_bad_input_is_one_message_and_leaves_nothing(
    place: Place, arguments: tuple[str, ...], words: str
) -> None:
    assert words in place.refused("llama-2m", *arguments)


def test_a_name_is_a_name_also_where_it_is_the_word_for_no_value(place: Place) -> None:
    document = place.launch("llama-2m", "--slurm", "--name", "none")
    assert document["file"] == "none.sbatch"
    assert 'run.name="none"' in place.arguments(document)
    assert "#SBATCH --job-name=none\n" in place.script(document)


def test_no_file_is_overwritten(place: Place) -> None:
    (place.folder / "link.sbatch").symlink_to("nowhere")
    assert "is there already" in place.refused("llama-2m", "--slurm", "--out", "link.sbatch")
    (place.folder / "job.sbatch").write_text("mine")
    assert "is there already" in place.refused("llama-2m", "--slurm", "--out", "job.sbatch")
    assert (place.folder / "job.sbatch").read_text() == "mine"
    assert "the folder no does not exist" in place.refused("llama-2m", "--slurm", "--out", "no/job.sbatch")


def test_only_a_scheduler_that_is_there_is_given_the_file(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(place.folder / "programs"))
    assert "--submit needs sbatch" in place.refused("llama-2m", "--slurm", "--submit")
    assert "--submit needs kubectl" in place.refused("llama-2m", "--kubernetes", *CLUSTER, "--submit")
    system = os.defpath
    monkeypatch.setenv("PATH", f"{place.folder / 'programs'}:{system}")
    program(
        place.folder / "programs", "sbatch", f'echo "$@" > {place.folder}/asked; echo "Submitted batch job 7"'
    )
    document = place.launch("llama-2m", "--slurm", "--submit", "--out", "job.sbatch")
    assert document["submitted"] == "Submitted batch job 7"
    assert (place.folder / "asked").read_text() == "job.sbatch\n"
    program(place.folder / "programs", "kubectl", 'echo "forbidden: $4" >&2; exit 3')
    with pytest.raises(
        DrivetrainError, match=r"kubectl refused the job \(exit code 3\): forbidden: ?; the file"
    ):
        place.launch("llama-2m", "--kubernetes", *CLUSTER, "--submit", "--out", "job.json")
    assert json.loads((place.folder / "job.json").read_text())["kind"] == "List", "what was written stays"


def test_nothing_is_submitted_unless_that_is_asked(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    program(place.folder / "programs", "sbatch", f"touch {place.folder}/asked")
    monkeypatch.setenv("PATH", f"{place.folder / 'programs'}:{os.defpath}")
    assert place.launch("llama-2m", "--slurm")["submitted"] is None
    assert not (place.folder / "asked").exists()


def a_run(place: Place, status: str) -> str:
    from drivetrain.archive.writer import RunWriter
    from drivetrain.config import load_config, to_toml

    keys = ("config_hash", "layout", "provenance", "devices", "dataset", "seed")
    manifest: dict[str, Any] = {key: {} for key in keys}
    config = load_config("llama-2m", ["run.device=cpu", *SMALL]).config
    with RunWriter.create(
        place.folder / "runs", "begun", config_toml=to_toml(config), manifest=manifest
    ) as writer:
        writer.event("end", status=status, reason="a test")
        return str(writer.path)


def test_a_run_goes_on_under_slurm_with_its_own_configuration(place: Place) -> None:
    run = a_run(place, "interrupted")
    document = place.launch(run, "--slurm", "--nodes", "2", "--out", "more.sbatch")
    assert place.arguments(document) == ["-m", "drivetrain", "train", run]
    assert "cannot be changed" in place.refused(run, "training.train_iters=3", "--slurm")
    assert "has a name" in place.refused(run, "--slurm", "--name", "other")
    assert "pods have folders of their own" in place.refused(run, "--kubernetes", *CLUSTER[:4])
    assert "is finished" in place.refused(a_run(place, "finished"), "--slurm")


def test_a_pod_that_reads_data_from_nowhere_is_noted(place: Place) -> None:
    place.launch("llama-2m", "--kubernetes", *CLUSTER, "data.data_path=/data/corpus")
    assert "data_path" not in place.notes
    place.launch("llama-2m", "--kubernetes", *CLUSTER, "data.data_path=/database/corpus")
    assert "/database/corpus is on no volume: it must be in the image" in place.notes


def test_a_container_that_reads_data_from_nowhere_is_noted(place: Place) -> None:
    mounted = ("--slurm", "--container", "image:1", "--volume", "/scratch:/data")
    for inside in ("data.data_path=/data/corpus", "data.data_path=corpus"):
        place.launch("llama-2m", *mounted, inside)
        assert "data_path" not in place.notes
    place.launch("llama-2m", *mounted, "data.data_path=/scratch/corpus")
    assert "/scratch/corpus is on no volume: it must be in the image" in place.notes
    place.launch("llama-2m", "--slurm", "data.data_path=/scratch/corpus")
    assert "data_path" not in place.notes, "there is no container"
