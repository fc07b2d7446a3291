"""Elastic, with real processes: a job is killed with SIGKILL at random moments, all of it, and goes on with other
numbers of ranks; its samples are those of one epoch after the other, none lost and none twice."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from drivetrain.archive.reader import Run
from drivetrain.config import data_seed
from drivetrain.engine.data.corpus import Corpus
from drivetrain.engine.data.opening import samples_of
from runs_on_the_spot import Tiny

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

WORLDS = (4, 6, 1, 3, 2)
GLOBAL, SEQ_LENGTH, STEPS = 12, 8, 60
NOTES = "DRIVETRAIN_TEST_NOTES"
ALONE = "alone"
"""Stands for the rank of a process that no launcher started. (The launcher of the first start builds a batch too.)"""
# A line for each micro-batch, in the order in which this process builds them; slow enough to be killed between two.
NOTE = f"""
import os
import time


def note(ids):
    name = "-".join([os.environ["{NOTES}"], os.environ.get("RANK", "{ALONE}"), str(os.getpid())])
    line = " ".join(map(str, ids.ravel().tolist())) + "\\n"
    file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, line.encode())
    os.close(file)
    time.sleep(0.01)
    return ids
"""
Row = tuple[int, ...]


def kill_all_of(job: "subprocess.Popen[bytes]", mark: str) -> None:
    """SIGKILL to every process that this job has started: those that carry its mark, and itself."""
    job.kill()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                if f"{NOTES}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)
            except OSError:
                continue
    if job.stdout is not None and not job.stdout.closed:
        job.communicate()


def wait_for(job: "subprocess.Popen[bytes]", has_come: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 200
    while not has_come():
        if job.poll() is not None:
            raise AssertionError(job.communicate()[1].decode())
        assert time.monotonic() < deadline, "the job does not get on"
        time.sleep(0.01)


def logged(run: Path, segment: int) -> int:
    metrics = run / "segments" / f"{segment:04d}" / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") - 1 if metrics.exists() else -1


def rows_noted(folder: Path, start: int, rank: int) -> list[Row]:
    """What that rank was given in that start, in order; its last line may be torn."""
    (path,) = folder.glob(f"{start}-{rank if WORLDS[start] > 1 else ALONE}-*")
    lines = path.read_text().split("\n")[:-1]
    return [tuple(map(int, line.split())) for line in lines]


def rows_of_step(folder: Path, start: int, offset: int) -> list[Row]:
    """The rows of a step that is ``offset`` steps after a start, in the order of their samples."""
    world_size = WORLDS[start]
    micro_batches = GLOBAL // world_size
    ranks = [rows_noted(folder, start, rank) for rank in range(world_size)]
    return [
        rows[offset * micro_batches + micro_batch] for micro_batch in range(micro_batches) for rows in ranks
    ]


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("prefetch", [0, 3])
def test_jobs_that_are_killed_and_go_on_with_other_ranks_see_each_sample_of_an_epoch_once(
    tmp_path: Path, write_corpus: Callable[..., str], prefetch: int
) -> None:
    # Each id occurs once, so that samples can be told apart.
    documents = np.split(np.arange(4400), np.cumsum([1 + (17 * number) % 40 for number in range(214)]))
    prefix = write_corpus([one.tolist() for one in documents if len(one)], vocab_size=4400)
    tiny, notes = Tiny(tmp_path, Path(prefix)), tmp_path / "notes"
    notes.mkdir()
    (tmp_path / "elastic_notes.py").write_text(NOTE)
    settings = [
        *(
            "model.num_layers=1",
            "model.hidden_size=8",
            "model.num_attention_heads=1",
            "model.vocab_size=4400",
        ),
        *(
            f"model.seq_length={SEQ_LENGTH}",
            "training.micro_batch_size=1",
            f"training.global_batch_size={GLOBAL}",
        ),
        *(f"training.train_iters={STEPS}", "training.eval_iters=0", "checkpoint.save_interval=3"),
        *("data.split=100,0", "data.batch_transform=elastic_notes:note", f"data.prefetch_batches={prefetch}"),
    ]
    draw = random.Random(prefetch)
    source: list[str] = [str(tiny.file), *settings]
    for start, world_size in enumerate(WORLDS):
        mark = str(notes / str(start))
        job = tiny.start("train", *source, "--nproc", str(world_size), environment={NOTES: mark})
        try:
            if start == len(WORLDS) - 1:
                _, errors = job.communicate(timeout=300)
                assert job.returncode == 0, errors.decode()
                break
            wait_for(job, lambda: tiny.runs.is_dir() and any(tiny.runs.glob("*/run.json")))
            run = tiny.only_run().path
            # Not before a checkpoint of its own, so that the job gets on; then any moment of the next steps or saves.
            enough = draw.randint(4, 9)
            wait_for(job, lambda run=run, start=start, enough=enough: logged(run, start) >= enough)
            time.sleep(draw.uniform(0, 0.4))
        finally:
            kill_all_of(job, mark)
        source = [str(run)]
    check(tiny.only_run(), Corpus.open(prefix, vocab_size=4400), notes)


def check(run: Run, corpus: Corpus, notes: Path) -> None:
    """The rows of the steps that count are those of the first samples, in order; an epoch of them has each once."""
    began = [0, *(event["step"] for event in run.events() if event["kind"] == "resume")]
    assert len(began) == len(WORLDS)
    assert all(step > 0 for step in began[1:]), "each went on from a checkpoint"
    assert began == sorted(began)
    config = run.config()
    data = config.data.model_copy(update={"batch_transform": None})
    samples = samples_of(corpus, data, "train", SEQ_LENGTH, data_seed(config))
    straight = [tuple(row) for row in samples.rows(np.arange(STEPS * GLOBAL))[0].tolist()]
    given: list[Row] = []
    for step in range(STEPS):
        # A later start repeats what an earlier one had done after its last checkpoint.
        start = max(number for number, first in enumerate(began) if first <= step)
        given += rows_of_step(notes, start, step - began[start])
    assert given == straight
    epoch = samples.num_samples
    assert GLOBAL < epoch < len(given)
    assert set(Counter(given[:epoch]).values()) == {1}
    assert set(given[:epoch]) == {tuple(row) for row in samples.read(np.arange(epoch))[0].tolist()}  # type: ignore[attr-defined]
