"""A profiled window shows each optimisation that is on, and shows none that is off."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drivetrain.archive.optimisations import records_of
from drivetrain.archive.reader import open_run
from drivetrain.catalogue import catalogue
from drivetrain.cli.evidence import with_evidence
from drivetrain.config import operator_fields
from drivetrain.measure.corpora import transform_key
from drivetrain.measure.optimisation import OptimisationRecord
from runs_on_the_spot import Tiny

SORT = "numpy.sort"
WINDOW = ["profiler.profile=true", "profiler.profile_step_start=5", "profiler.profile_step_end=7"]
OFF = [
    "fusion.compile=false",
    "optimizer.fused=false",
    "precision.params_dtype=fp32",
    "data.num_workers=0",
    "overlap.bucket_size_mb=0",
    "overlap.overlap_param_gather=false",
    "overlap.prefetch_blocks=0",
    "overlap.hierarchical_collectives=false",
    "precision.grad_reduce_dtype=fp32",
    "checkpoint.async_save=false",
    "checkpoint.save_interval=2",
    "memory.keep_freed_memory=false",
    "memory.optimizer_offload_fraction=0",
    "precision.optimizer_state_dtype=fp32",
    "memory.cpu_offloading_num_layers=0",
    "memory.offload_embedding=false",
    "data.packing=pad",
    "memory.recompute_granularity=none",
]
ON = [
    "optimizer.fused=true",
    "precision.params_dtype=bf16",
    "data.num_workers=1",
    "checkpoint.async_save=true",
    "memory.keep_freed_memory=true",
    "data.packing=best_fit",
    "memory.recompute_granularity=full",
]
# By the backend eager, which compiles nothing; a level alone would take what operators prefer.
OPERATORS = ["fusion.level=core", *(f"fusion.{name}=eager" for name in operator_fields())]
OF_A_GPT = ("layer_norm", "add_layer_norm")
# Gradients of the tiny model are 0.18 MB.
RUNS: dict[str, tuple[int, list[str]]] = {
    "off": (1, [*OFF, *WINDOW]),
    "on": (1, [*OFF, *ON, *WINDOW]),
    "two, off": (2, [*OFF, *WINDOW]),
    "two, on": (2, [*OFF, *WINDOW, "overlap.bucket_size_mb=0.05"]),
    "two, updates shared, off": (2, [*OFF, *WINDOW, "parallelism.zero_stage=1"]),
    "two, updates shared, on": (
        2,
        [
            *OFF,
            *WINDOW,
            "parallelism.zero_stage=1",
            "overlap.overlap_param_gather=true",
            "precision.grad_reduce_dtype=bf16",
        ],
    ),
    "two, all shared, off": (2, [*OFF, *WINDOW, "parallelism.zero_stage=3"]),
    "two, all shared, on": (2, [*OFF, *WINDOW, "parallelism.zero_stage=3", "overlap.prefetch_blocks=1"]),
    "two, layers shared, off": (2, [*OFF, *WINDOW, "parallelism.tensor_model_parallel_size=2"]),
    "two, layers shared, on": (
        2,
        [
            *OFF,
            *WINDOW,
            "parallelism.tensor_model_parallel_size=2",
            "overlap.async_tensor_model_parallel_allreduce=true",
        ],
    ),
    "two, in chunks": (
        2,
        [*OFF, *WINDOW, "parallelism.tensor_model_parallel_size=2", "overlap.tp_chunks=2"],
    ),
    "two machines, off": (4, [*OFF, *WINDOW, "training.micro_batch_size=2"]),
    "two machines, on": (
        4,
        [*OFF, *WINDOW, "training.micro_batch_size=2", "overlap.hierarchical_collectives=true"],
    ),
    # An epoch of less than 15 steps: what the window reads was kept before.
    "kept on disk": (
        1,
        [
            *OFF,
            *WINDOW,
            "data.split=1,99",
            "model.seq_length=256",
            "training.train_iters=20",
            "profiler.profile_step_start=15",
            "profiler.profile_step_end=17",
            "data.sample_cache_bytes=1_000_000",
            "data.sample_cache_path={folder}",
        ],
    ),
    "one by one": (1, [*OFF, *WINDOW, "training.micro_batch_size=1"]),
    "prefetched": (1, [*OFF, *WINDOW, "data.prefetch_batches=2"]),
    "fp16": (1, [*OFF, *WINDOW, "precision.params_dtype=fp16", "precision.optimizer_state_dtype=bf16"]),
    "baked": (
        1,
        [*OFF, *WINDOW, f"data.transform={SORT}", f"data.data_path={{corpus}}.baked-{transform_key(SORT)}"],
    ),
    "offloaded": (
        1,
        [*OFF, *WINDOW, "memory.optimizer_offload_fraction=1", "memory.cpu_offloading_num_layers=1"],
    ),
    "embedding on the host": (
        1,
        [*OFF, *WINDOW, "memory.offload_embedding=true", "model.untie_embeddings_and_output_weights=true"],
    ),
    "compiled": (1, [*OFF, *WINDOW, "fusion.compile=true"]),
    "operators": (1, [*OFF, *WINDOW, *OPERATORS]),
    "operators, gpt": (
        1,
        [*OFF, *WINDOW, *OPERATORS, "model.normalization=LayerNorm"],
    ),
    # Which leaves no norm to be added to.
    "operators, dropping": (1, [*OFF, *WINDOW, *OPERATORS, "model.hidden_dropout=0.1"]),
}
ON_IN = {
    "async_save": "on",
    "hierarchical_collectives": "two machines, on",
    "bake_transforms": "baked",
    "packing": "on",
    "activation_offload": "offloaded",
    "optimizer_offload": "offloaded",
    "embedding_offload": "embedding on the host",
    "optimizer_state_dtype": "fp16",
    "recompute": "on",
    "prefetch": "prefetched",
    "sample_cache": "kept on disk",
    "bf16": "on",
    "fp16": "fp16",
    "compile": "compiled",
    "data_workers": "on",
    "ddp_bucket": "two, on",
    "grad_reduce_dtype": "two, updates shared, on",
    # The tiny configuration has four.
    "micro_batch": "off",
    "overlap_param_gather": "two, updates shared, on",
    "prefetch_blocks": "two, all shared, on",
    "tp_async_gradient": "two, layers shared, on",
    "tp_chunks": "two, in chunks",
    "fused_adamw": "on",
    "keep_freed_memory": "on",
    "fusion_level": "operators",
    **dict.fromkeys(operator_fields(), "operators"),
    **dict.fromkeys(OF_A_GPT, "operators, gpt"),
    "bias_dropout_add": "operators, dropping",
}
ON_A_GPU = {"tp_symmetric_memory"}
"""What no run on a CPU can have in effect: its own tests show it with stand-ins."""
OFF_IN = {
    name: which.replace(", on", ", off") if which.startswith("two") else "off"
    for name, which in ON_IN.items()
} | {
    "micro_batch": "one by one",
    "tp_chunks": "two, layers shared, off",
    "tp_symmetric_memory": "two, layers shared, off",
}

Train = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def summary_of(tmp_path_factory: pytest.TempPathFactory, tiny_corpus: Path) -> Train:
    """The summary of one of ``RUNS``, trained once: that of the command for one process, and of ranks for several."""
    done: dict[str, dict[str, Any]] = {}

    def train(which: str) -> dict[str, Any]:
        if which not in done:
            world_size, overrides = RUNS[which]
            folder = tmp_path_factory.mktemp("evidence")
            tiny = Tiny(folder, tiny_corpus)
            overrides = [one.format(folder=folder, corpus=tiny_corpus) for one in overrides]
            if world_size == 1:
                done[which] = tiny.train(*overrides)
            else:
                run = tiny.train_on_ranks(world_size, *overrides, per_host=2)
                summary = run.summary()
                assert summary is not None
                done[which] = dict(with_evidence(run.path, summary))
        return done[which]

    return train


def record_of(summary: dict[str, Any], name: str) -> OptimisationRecord:
    (document,) = [one for one in summary["optimisations"] if one["name"] == name]
    record = OptimisationRecord.from_document(document)
    (stored,) = [one for one in records_of(open_run(summary["run"])) if one.name == name]
    assert stored == record, "the run directory says what the document says"
    return record


def test_every_entry_is_tried() -> None:
    assert sorted({*ON_IN, *ON_A_GPU}) == [one.name for one in catalogue()]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if name == "compile" else []) for name in ON_IN]
)
def test_an_optimisation_that_is_on_is_shown(summary_of: Train, name: str) -> None:
    summary = summary_of(ON_IN[name])
    record = record_of(summary, name)
    assert (record.requested, record.active) == (True, True)
    assert record.evidence is not None
    assert record.evidence.kind == "shown", record.evidence.why
    assert not record.without_effect
    assert [
        finding for finding in summary["findings"] if record.field in finding and "no effect" in finding
    ] == []


@pytest.mark.parametrize("name", OFF_IN)
def test_an_optimisation_that_is_off_is_absent(summary_of: Train, name: str) -> None:
    summary = summary_of(OFF_IN[name])
    record = record_of(summary, name)
    assert (record.requested, record.active) == (False, False)
    assert record.evidence is not None
    assert record.evidence.kind == "absent", record.evidence.why
    assert summary["findings"] == []


def test_events_hold_the_start_and_the_window_of_each(summary_of: Train) -> None:
    events = [
        event for event in open_run(summary_of("off")["run"]).events() if event["kind"] == "optimisation"
    ]
    names = [one.name for one in catalogue()]
    assert [(event["when"], event["name"]) for event in events] == [
        *(("start", name) for name in names),
        *(("window", name) for name in names),
    ]
    assert all((event["evidence"] is None) == (event["when"] == "start") for event in events)


def test_profile_says_what_its_window_shows(tiny: Tiny) -> None:
    done = tiny.run("profile", str(tiny.file), "--steps", "1", "--json")
    assert done.returncode == 0, done.stderr
    training = json.loads(done.stdout)["training"]
    record = record_of(training, "fused_adamw")
    assert record.evidence is not None
    assert record.evidence.kind == "shown"
    assert "evidence of fused_adamw: shown, the update ran fused: 2 x aten::_fused_adamw_" in done.stderr


@pytest.mark.long
def test_under_the_users_own_torchrun_the_first_rank_reads_the_window(tiny: Tiny) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *("-m", "drivetrain", "train", str(tiny.file), "overlap.bucket_size_mb=0.05", *WINDOW, "--json"),
        ],
        cwd=tiny.folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    evidence = record_of(summary, "ddp_bucket").evidence
    assert evidence is not None
    assert evidence.kind == "shown"
    windows = [event for event in tiny.only_run().events() if event.get("when") == "window"]
    assert len(windows) == len(catalogue()), "one rank wrote them"
