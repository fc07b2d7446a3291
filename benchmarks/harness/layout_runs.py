"""Runs of one small model in many layouts, each a ``drivetrain train`` of its own; finished ones are kept."""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from drivetrain.archive.listing import list_runs
from drivetrain.archive.reader import Run, open_run
from drivetrain.errors import DrivetrainError
from harness.packed_text import VOCABULARY, packed_corpus

__all__ = ["LAYOUTS", "LayoutRuns", "Ranks", "losses_of", "options_of"]

BENCHMARKS = Path(__file__).resolve().parent.parent
TP, PP, ZERO = (
    "parallelism.tensor_model_parallel_size=2",
    "parallelism.pipeline_model_parallel_size=2",
    "parallelism.zero_stage=",
)


@dataclass(frozen=True)
class Ranks:
    """How a run is spread.

    Attributes:
        count: processes.
        overrides: of ``parallelism``.
    """

    count: int
    overrides: tuple[str, ...] = ()


LAYOUTS: Mapping[str, Ranks] = {
    "one process": Ranks(1),
    "tp2": Ranks(2, (TP, "parallelism.sequence_parallel=true")),
    "pp2 1f1b": Ranks(2, (PP, "parallelism.pipeline_schedule=1f1b")),
    "dp2 zero3": Ranks(2, (f"{ZERO}3",)),
    "dp4 zero2": Ranks(4, (f"{ZERO}2",)),
    "dp4 zero3": Ranks(4, (f"{ZERO}3",)),
    "dp4 hsdp": Ranks(4, (f"{ZERO}3", "parallelism.hybrid_shard_size=2")),
    "tp2 pp2": Ranks(4, (TP, PP)),
    "tp2 dp2 zero1": Ranks(4, (TP, f"{ZERO}1")),
}

CONFIG = """\
# 0.33 M parameters, and packed documents; every number is the same again on the same machine.
preset = "llama-2m"

[model]
num_layers = 4
hidden_size = 64
ffn_hidden_size = 192
num_attention_heads = 4
num_query_groups = 2
seq_length = 128
vocab_size = {vocabulary}

[data]
data_path = "{corpus}"
eod_mask_loss = true

[training]
micro_batch_size = 2
global_batch_size = 8
eval_iters = 0

[lr_schedule]
lr_warmup_tokens = 20480
lr_decay_tokens = 2048000

[precision]
params_dtype = "fp32"

[run]
runs_dir = "{runs}"
device = "cpu"
num_threads = 1
deterministic = true
"""


class LayoutRuns:
    """The runs of a folder by name; missing ones are trained."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.runs_dir = self.folder / "runs"
        self.runs_dir.mkdir(parents=True, exist_ok=True)
        self.config = self.folder / "small-llama.toml"
        corpus = packed_corpus(self.folder / "corpus")
        self.config.write_text(
            CONFIG.format(vocabulary=VOCABULARY, corpus=corpus, runs=self.runs_dir), encoding="utf-8"
        )
        self._runs: dict[str, Run] = {}
        for run in list_runs(self.runs_dir, on_fault=lambda _: None):
            if run.status() == "finished":
                self._runs[run.name] = run
            elif run.status() != "running":
                # Torn by an interrupted session; it is trained again.
                shutil.rmtree(run.path)

    def arguments(
        self, name: str, ranks: Ranks, overrides: Sequence[str] = (), options: Sequence[str] = ()
    ) -> list[str]:
        """What a user types after ``drivetrain``, but for the number of processes."""
        return [
            "train",
            str(self.config),
            *ranks.overrides,
            *overrides,
            f"run.name={name}",
            *options,
        ]

    def get(
        self,
        name: str,
        ranks: Ranks,
        overrides: Sequence[str] = (),
        *,
        options: Sequence[str] = (),
        harm: str | None = None,
    ) -> Run:
        """The finished run ``name``.

        Args:
            name: of the run; the same name is the same run.
            options: of ``drivetrain train``.
            harm: one of :mod:`harness.planted_rank`, whose way of starting ranks is torchrun's.

        Raises:
            DrivetrainError: it did not finish.
        """
        if name not in self._runs:
            arguments = self.arguments(name, ranks, overrides, options)
            command = [sys.executable, "-m", "drivetrain", *arguments, "--nproc", str(ranks.count)]
            if harm is not None:
                torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks.count}"]
                command = [sys.executable, "-m", *torchrun, "-m", "harness.planted_rank", harm, *arguments]
            began = time.monotonic()
            log = self.folder / "logs" / f"{name}.txt"
            log.parent.mkdir(exist_ok=True)
            with log.open("w", encoding="utf-8") as file:
                code = subprocess.run(
                    command, stdout=file, stderr=file, env=environment(), check=False
                ).returncode
            self.take(name, f"exit code {code}; {log} has its messages")
            print(f"  {name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        return self._runs[name]

    def take(self, name: str, otherwise: str) -> Run:
        """The run ``name``, which has ended by now; DrivetrainError with ``otherwise`` where it did not finish."""
        found = [run for run in list_runs(self.runs_dir) if run.name == name]
        if len(found) != 1 or found[0].status() != "finished":
            raise DrivetrainError(f"the run {name} did not finish: {otherwise}")
        self._runs[name] = open_run(found[0].path)
        return self._runs[name]

    def note(self) -> str:
        """What a reader must know of the runs."""
        revisions = {
            str((run.manifest["provenance"]["git"] or {}).get("commit"))[:7] for run in self._runs.values()
        }
        return (
            f"Llama of 0.33 M parameters, fp32, run.deterministic, {8 * 128:,} tokens a step in packed documents, gloo "
            f"on one machine; revisions {', '.join(sorted(revisions))}"
        )


def environment() -> dict[str, str]:
    """Of the commands: one thread a rank, and the planted harms can be imported."""
    path = os.pathsep.join(filter(None, [str(BENCHMARKS), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def losses_of(run: Run) -> dict[int, float]:
    """Training loss by step."""
    return {int(line["step"]): float(line["train/loss"]) for line in run.metrics()}


def options_of(
    arguments: Sequence[str] | None, *, name: str, description: str | None, quick: str
) -> argparse.Namespace:
    """``--quick``, ``--json`` and ``--folder`` of a script over such runs; SIGTERM ends it from here on.

    Args:
        name: of the script's folder in ``runs``; ``--quick`` has one in it.
        quick: what ``--quick`` leaves of it, in words.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument(
        "--folder",
        type=Path,
        default=BENCHMARKS.parent / "runs" / name,
        help=f"where its runs are kept (default: runs/{name})",
    )
    options = parser.parse_args(arguments)
    if options.quick:
        options.folder /= "quick"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    return options
