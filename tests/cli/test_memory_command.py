"""``drivetrain memory``: the table, the files, what it suggests, and bad input."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from drivetrain.cli.memory_command import run_memory
from drivetrain.config import LaunchFacts, RunConfig, load_config
from drivetrain.diagnose.memory_advice import suggestions
from drivetrain.engine.dry_run_processes import Failure
from drivetrain.engine.memory import predict_ranks as prediction
from drivetrain.engine.memory.predict import predict_memory
from drivetrain.errors import DrivetrainError
from drivetrain.measure.memory import CATEGORIES, MemoryByCategory, timeline_of
from drivetrain.report.memory_figure import memory_svg
from drivetrain.report.memory_text import bytes_words, memory_text
from runs_on_the_spot import Tiny


def small() -> RunConfig:
    """Two layers, a step of two micro-batches."""
    return load_config(
        "llama-2m",
        [
            *("data.data_path=corpus", "fusion.compile=false", "model.num_layers=2"),
            *("training.micro_batch_size=4", "training.global_batch_size=8"),
        ],
    ).config


@pytest.mark.long
def test_a_few_steps_are_measured_and_their_run_can_be_shown_again(tiny: Tiny) -> None:
    figure = tiny.folder / "figure.svg"
    done = tiny.run(
        "memory", str(tiny.file), "fusion.compile=false", "--measure", "--json", "--figure", str(figure)
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    (rank,) = document["ranks"]
    assert rank["predicted"]["source"] == "predicted"
    assert rank["measured"]["source"] == "measured"
    assert abs(rank["deviations"]["activations"]["relative"]) < 0.03
    assert ElementTree.parse(figure).getroot().tag.endswith("svg")
    run = tiny.only_run()
    assert json.loads((run.path / "memory.json").read_text())["ranks"][0]["rank"] == 0
    assert (run.path / "memory.svg").is_file()
    again = tiny.run("memory", str(run.path))
    assert again.returncode == 0, again.stderr
    assert "predicted" in again.stdout
    assert "deviation" in again.stdout
    assert "what the largest categories suggest" in again.stdout


def test_a_configuration_is_predicted_without_a_run(tiny: Tiny) -> None:
    done = tiny.run("memory", str(tiny.file), "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    (rank,) = document["ranks"]
    assert rank["measured"] is None
    assert rank["predicted"]["peak_bytes"] == sum(rank["predicted"]["at_peak"].values())
    assert not tiny.runs.exists()


@pytest.mark.long
def test_what_is_offloaded_is_predicted_as_if_it_were_on_the_device() -> None:
    config = small()
    moves = {"cpu_offloading_num_layers": 1, "optimizer_offload_fraction": 0.5}
    offloaded = config.model_copy(update={"memory": config.memory.model_copy(update=moves)})
    plain, found = predict_memory(config), predict_memory(offloaded)
    assert found.own_peaks == plain.own_peaks
    assert [line for line in found.not_counted if line.startswith("offload")]


@pytest.mark.long
def test_ranks_of_a_pipeline_are_predicted_each_by_itself(tiny: Tiny) -> None:
    done = tiny.run(
        "memory",
        str(tiny.file),
        "parallelism.pipeline_model_parallel_size=2",
        "fusion.compile=false",
        "--json",
    )
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout)["ranks"]
    assert {"embedding", "layer 0"} <= set(first["predicted"]["by_layer"])
    assert "layer 1" not in first["predicted"]["by_layer"]
    assert "layer 1" in second["predicted"]["by_layer"]


def test_a_run_without_a_profile_of_its_memory_is_named(tiny: Tiny) -> None:
    run = tiny.train_on_ranks(1, "training.train_iters=1", "training.eval_iters=0", "fusion.compile=false")
    done = tiny.run("memory", str(run.path))
    assert done.returncode == 2
    assert "was not profiled" in done.stderr
    assert "--measure" in done.stderr
    done = tiny.run("memory", str(run.path), "--measure")
    assert done.returncode == 2
    assert "--measure has no effect on a run" in done.stderr


@pytest.mark.long
def test_a_profile_without_allocations_is_named(tiny: Tiny) -> None:
    run = tiny.train_on_ranks(
        1,
        *("training.train_iters=5", "training.eval_iters=0", "fusion.compile=false", "profiler.profile=true"),
        *("profiler.profile_step_start=4", "profiler.profile_step_end=5"),
    )
    done = tiny.run("memory", str(run.path))
    assert done.returncode == 2
    assert "profiler.profile_memory was off" in done.stderr


def test_what_is_no_configuration_and_no_run_is_bad_input(tiny: Tiny) -> None:
    done = tiny.run("memory", str(tiny.folder / "nothing"))
    assert done.returncode == 2
    assert "nothing" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("name", "why"), [("tiny.toml", "name it"), ("nowhere/memory.svg", "no folder")])
def test_a_figure_overwrites_no_other_file_and_needs_a_folder(name: str, why: str, tiny: Tiny) -> None:
    before = tiny.file.read_text()
    done = tiny.run("memory", str(tiny.file), "--measure", "--figure", str(tiny.folder / name))
    assert done.returncode == 2
    assert why in done.stderr
    assert tiny.file.read_text() == before
    assert not tiny.runs.exists()


def test_an_impossible_configuration_is_bad_input(tiny: Tiny) -> None:
    done = tiny.run("memory", str(tiny.file), "training.micro_batch_size=3")
    assert done.returncode == 2
    assert "micro_batch_size" in done.stderr
    done = tiny.run("memory", str(tiny.file), "--ranks", "4")
    assert done.returncode == 2
    assert "the nearest to 4 is 0" in done.stderr


def held(rank: int) -> MemoryByCategory:
    """A prediction of 100 bytes of each category."""
    each = dict.fromkeys(CATEGORIES, 100)
    return MemoryByCategory(
        rank=rank,
        world_size=2,
        source="predicted",
        peak_bytes=100 * len(CATEGORIES),
        at_peak=each,
        own_peaks=each,
        phase="backward",
        peak_after="aten.mm",
        by_layer={},
        timeline=timeline_of("allocations", [(0.0, "forward", tuple(each.values()))], 1.0),
        not_counted=(),
    )


def test_a_rank_without_a_prediction_is_named_and_the_answer_is_no(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def show(answers: dict[int, MemoryByCategory | Failure], figure: Path | None = None) -> int:
        monkeypatch.setattr(prediction, "predict_ranks", lambda *_, **__: answers)
        return run_memory(
            str(tiny.file), (), num_processes=2, ranks="0,1", measure=False, figure=figure, as_json=True
        )

    assert show({0: held(0), 1: held(1)}) == 0
    assert json.loads(capsys.readouterr().out)["failed"] == []
    figure = tiny.folder / "figure.svg"
    assert show({0: Failure("it ended with signal 9"), 1: held(1)}, figure) == 1
    shown = capsys.readouterr()
    document = json.loads(shown.out)
    assert document["failed"] == [{"rank": 0, "error": "it ended with signal 9", "traceback": None}]
    assert [one["predicted"] is None for one in document["ranks"]] == [True, False]
    assert "rank 0 has no prediction: it ended with signal 9" in shown.err
    assert ElementTree.parse(figure).getroot().tag.endswith("svg")
    with pytest.raises(DrivetrainError, match="rank 1: it ended"):
        show({0: Failure("so did this"), 1: Failure("it ended with signal 9")})


def test_suggestions_come_from_the_catalogue_and_from_layouts() -> None:
    config = small()
    memory = predict_memory(config)
    found = suggestions(memory, config, LaunchFacts(world_size=1))
    assert "activations" in {one.category for one in found}
    assert "recompute" in {one.by for one in found}
    assert any(one.change for one in found)
    requested = config.model_copy(
        update={"memory": config.memory.model_copy(update={"recompute_granularity": "full"})}
    )
    (again,) = [
        one for one in suggestions(memory, requested, LaunchFacts(world_size=1)) if one.by == "recompute"
    ]
    assert again.change is None
    assert "requested already" in again.note


def test_the_figure_is_an_svg_without_scripts_and_names_every_category_it_shows() -> None:
    config = small()
    memory = predict_memory(config)
    figure = memory_svg([memory], "Memory of <a & b>")
    root = ElementTree.fromstring(figure)
    assert "script" not in figure
    words = "".join(root.itertext())
    for name in ("parameters", "optimizer", "gradients", "activations", "temporaries"):
        assert name in words
    text = memory_text(memory, None)
    assert "layer 0 to 1" in text
    assert "total" in text


@pytest.mark.parametrize(
    ("nbytes", "words"),
    [(0, "0 bytes"), (999, "999 bytes"), (1536, "1.5 KiB"), (2**20, "1 MiB"), (2**40, "1 TiB")],
)
def test_bytes_in_words(nbytes: int, words: str) -> None:
    assert bytes_words(nbytes) == words


def test_a_trace_of_another_trainer_tells_nothing_of_categories(tmp_path: Path) -> None:
    from drivetrain.errors import DataError
    from drivetrain.trace.memory import read_memory

    other = tmp_path / "other.json"
    other.write_text(
        '{"traceEvents": [{"ph": "X", "name": "aten::mm", "ts": 1, "dur": 1, "pid": 1, "tid": 1}]}'
    )
    with pytest.raises(DataError, match="no trace of a run of drivetrain"):
        read_memory(other)
