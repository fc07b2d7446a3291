"""A tiny corpus of real text and a tiny model, for tests that train. Registered as a plugin by conftest."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from drivetrain.archive.origin import PLAIN, RunOrigin
from drivetrain.archive.reader import Run, open_run
from drivetrain.config import LaunchFacts, load_config, violations
from forkserver import run_drivetrain
from rank_processes import on_ranks

VOCABULARY = 384
TINY_TOML = """
[model]
num_layers = 2
hidden_size = 32
num_attention_heads = 2
seq_length = 32
vocab_size = {vocab_size}

[data]
data_path = "{corpus}"

[training]
micro_batch_size = 4
global_batch_size = 8
train_iters = 8
eval_iters = 2

[optimizer]
lr = 3e-3

[precision]
params_dtype = "fp32"

[run]
runs_dir = "{runs}"
device = "cpu"
num_threads = 1
"""


@pytest.fixture(scope="session")
def tiny_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of a corpus of a few files of the standard library's source."""
    from drivetrain.engine.data.prepare import prepare

    folder = tmp_path_factory.mktemp("corpus")
    sources = [Path(json.__file__).parent / name for name in ("decoder.py", "encoder.py", "scanner.py")]
    sources += [Path(os.__file__), Path(subprocess.__file__).parent / "textwrap.py"]
    prepare(sources, folder / "tiny", vocab_size=VOCABULARY)
    return folder / "tiny"


class Tiny:
    """A configuration file of a tiny run, and ways to run it."""

    def __init__(self, folder: Path, corpus: Path) -> None:
        self.folder = folder
        self.runs = folder / "runs"
        self.file = folder / "tiny.toml"
        self.file.write_text(TINY_TOML.format(corpus=corpus, runs=self.runs, vocab_size=VOCABULARY))

    def start(self, *arguments: str, **options: Any) -> "subprocess.Popen[bytes]":
        """Start ``drivetrain`` in a process of its own."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **options.pop("environment", {})}
        return subprocess.Popen(
            [sys.executable, "-m", "drivetrain", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=self.folder,
            env=environment,
            **options,
        )

    def run(
        self, *arguments: str, timeout: float = 600, environment: Mapping[str, str] | None = None
    ) -> "subprocess.CompletedProcess[str]":
        """Run ``drivetrain`` to its end, in a process of its own whose imports are done."""
        whole = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
        return run_drivetrain(arguments, self.folder, whole, timeout=timeout)

    def train(self, *overrides: str, options: Sequence[str] = ()) -> dict[str, Any]:
        """Train to the end; the ``--json`` document."""
        done = self.run("train", str(self.file), *overrides, "--json", *options)
        assert done.returncode == 0, done.stderr
        document: dict[str, Any] = json.loads(done.stdout)
        return document

    def train_on_ranks(
        self, world_size: int, *overrides: str, origin: RunOrigin = PLAIN, per_host: int | None = None
    ) -> Run:
        """Train to the end on ranks that no launcher starts: its agent imports torch, and each of its ranks again.

        Args:
            per_host: of so many ranks each is told that they are all on its machine; None: of all.
        """
        from drivetrain.engine.creation import create_run
        from drivetrain.engine.data.corpus import ensure_corpus

        loaded = load_config(str(self.file), overrides)
        broken = violations(loaded.config, LaunchFacts(world_size))
        assert broken == [], broken
        corpus = ensure_corpus(loaded.config.data, loaded.config.model)
        path = create_run(loaded, corpus, world_size=world_size, argv=["drivetrain"], origin=origin)
        assert set(on_ranks(_work, world_size, str(path), per_host or world_size)) == {"finished"}
        return open_run(path)

    def only_run(self) -> Run:
        """The one run that was made."""
        (path,) = self.runs.iterdir()
        return open_run(path)


def _work(path: str, per_host: int) -> str:
    """On one rank: how its run ended."""
    from drivetrain.engine.parallel.process_group import Ranks
    from drivetrain.engine.worker import work

    ranks = Ranks.from_environment({**os.environ, "LOCAL_WORLD_SIZE": str(per_host)})
    return work(Path(path), ranks).outcome.status


@pytest.fixture
def tiny(tmp_path: Path, tiny_corpus: Path) -> Tiny:
    """A tiny run on a tiny corpus."""
    return Tiny(tmp_path, tiny_corpus)


def losses_of(run: Run) -> dict[int, float]:
    """Training loss by step."""
    return {line["step"]: line["train/loss"] for line in run.metrics()}
