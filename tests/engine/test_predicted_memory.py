"""Live bytes by category: what is predicted without running anything is what allocations of a run show."""

import gc
import json
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import pytest
import torch

from drivetrain.archive.profile_windows import newest_window
from drivetrain.archive.reader import Run
from drivetrain.config import load_config
from drivetrain.engine.data.corpus import ensure_corpus
from drivetrain.engine.data.prepare import prepare
from drivetrain.engine.memory.measured import fragmentation_of, resident_memory
from drivetrain.engine.memory.predict import predict_memory
from drivetrain.engine.memory.predict_count import LayerNames, StorageLog
from drivetrain.engine.memory.predict_ranks import documents_of_step, predict_ranks
from drivetrain.measure.memory import CATEGORIES, MemoryByCategory, deviations
from drivetrain.trace.memory import read_memory
from runs_on_the_spot import VOCABULARY, Tiny

LIMITS = {
    "parameters": 0.03,
    "optimizer": 0.03,
    "gradients": 0.03,
    "activations": 0.03,
    "temporaries": 0.10,
    "total": 0.03,
}
WINDOW = (
    "training.train_iters=5",
    "training.eval_iters=0",
    "fusion.compile=false",
    "profiler.profile=true",
    "profiler.profile_step_start=4",
    "profiler.profile_step_end=6",
    "profiler.profile_ranks=all",
    "profiler.profile_memory=true",
)
WIDE = ("model.hidden_size=64", "model.num_attention_heads=4", "model.seq_length=64")
BF16 = "precision.params_dtype=bf16"
GPT = (
    "model.normalization=LayerNorm",
    "model.position_embedding_type=learned_absolute",
    "model.activation_func=gelu",
    "model.add_bias_linear=true",
)
DROPOUT = ("model.hidden_dropout=0.1", "model.attention_dropout=0.1")
UNTIED = "model.untie_embeddings_and_output_weights=true"
TP2 = "parallelism.tensor_model_parallel_size=2"
ZERO = "parallelism.zero_stage"

ONE = {
    "llama": (),
    "llama-bf16": (*WIDE, BF16),
    "gpt-dropout": (*WIDE, *GPT, *DROPOUT),
    "gpt-dropout-bf16": (*WIDE, *GPT, *DROPOUT, BF16),
    "gpt": (*GPT, "model.num_layers=3"),
    "grouped-untied": (*WIDE, "model.num_query_groups=2", "model.qk_layernorm=true", UNTIED),
    "one-micro-batch": (*WIDE, "training.micro_batch_size=8"),
    "four-micro-batches": (*WIDE, "training.micro_batch_size=2"),
    "unfused-update": (*WIDE, "optimizer.fused=false"),
    "long-rows": ("model.seq_length=256", "training.micro_batch_size=2", "training.global_batch_size=4"),
    "recomputed": (*WIDE, "memory.recompute_granularity=full"),
}
TWO = {
    "tp2": (*WIDE, TP2),
    "tp2-sequence": (*WIDE, TP2, "parallelism.sequence_parallel=true"),
    "zero0": (*WIDE, f"{ZERO}=0"),
    "zero1": (*WIDE, f"{ZERO}=1", "overlap.bucket_size_mb=0.05"),
    "zero2": (*WIDE, f"{ZERO}=2", "overlap.bucket_size_mb=0.05"),
}


def outside(predicted: MemoryByCategory, measured: MemoryByCategory) -> dict[str, str]:
    """Categories whose deviation is beyond its limit, and that deviation.

    The total is compared where one rank is alone: how many buffers of a collective are alive at once is up to the wire,
    and those that gloo's exchange fills are not predicted.
    """
    found = {}
    for one in deviations(predicted, measured):
        limit = LIMITS.get(one.category)
        if one.category == "total" and predicted.world_size > 1:
            continue
        if limit is not None and (one.relative is None or abs(one.relative) > limit):
            found[one.category] = f"{one.predicted:,} predicted, {one.measured:,} measured"
    return found


def measured_in(run: Run) -> list[MemoryByCategory]:
    window = newest_window(run)
    assert window is not None
    return [read_memory(run.path / window["path"] / name) for name in sorted(window["file_bytes"])]


def predicted_of(run: Run, ranks: Sequence[int]) -> list[MemoryByCategory]:
    config, world_size = run.config(), int(run.manifest["layout"]["world_size"])
    corpus = ensure_corpus(config.data, config.model)
    documents = documents_of_step(config, world_size, ranks, corpus, 5)
    answers = predict_ranks(config, world_size, ranks, documents, progress=lambda _: None)
    found = []
    for rank in ranks:
        answer = answers[rank]
        assert isinstance(answer, MemoryByCategory), answer
        found.append(answer)
    return found


def compare(run: Run) -> list[tuple[MemoryByCategory, MemoryByCategory]]:
    """Predicted and measured of each rank, which agree."""
    measured = measured_in(run)
    pairs = list(zip(predicted_of(run, [one.rank for one in measured]), measured, strict=True))
    for predicted, found in pairs:
        assert outside(predicted, found) == {}
    return pairs


def test_what_is_predicted_is_measured_and_a_class_that_is_dropped_shows(tiny: Tiny) -> None:
    run = tiny.train_on_ranks(1, *WINDOW, *ONE["llama"])
    ((predicted, measured),) = compare(run)
    assert (
        predicted.by_layer.keys() == measured.by_layer.keys() == {"embedding", "layer 0", "layer 1", "output"}
    )
    for layer, held in measured.by_layer.items():
        assert predicted.by_layer[layer] == pytest.approx(held, rel=0.03)
    assert measured.peak_resident_bytes is not None
    assert measured.peak_resident_bytes > measured.peak_bytes
    config = run.config()
    documents = documents_of_step(config, 1, [0], ensure_corpus(config.data, config.model), 5)[0]
    for dropped in ("parameters", "optimizer", "gradients", "activations"):
        wrong = predict_memory(config, documents=documents, left_out=frozenset({dropped}))
        assert dropped in outside(wrong, measured), f"nobody notices that {dropped} are missing"


def test_gradients_that_meet_take_what_they_take_where_nothing_watches() -> None:
    """As those of an embedding that is the output matrix too: torch adds the second to the first."""
    weight = torch.ones(100_000, requires_grad=True)
    factors = torch.ones(2, 100_000)

    def step() -> None:
        ((weight * factors[0]).sum() + (weight * factors[1]).sum()).backward()

    log = StorageLog(LayerNames())
    with log:
        step()
    mine = [change.delta for change in log.changes if not change.storage.existed]
    weight.grad = None
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profile:
        step()
    events = profile.profiler.kineto_results.events()
    allocator = [
        one.nbytes()
        for one in sorted(events, key=lambda one: int(one.start_ns()))
        if one.name() == "[memory]"
    ]
    watched, unwatched = max(accumulate(mine)), max(accumulate(allocator))
    assert watched == pytest.approx(unwatched, abs=1000)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in ONE if name != "llama"])
def test_prediction_and_measurement_agree(tiny: Tiny, name: str) -> None:
    compare(tiny.train_on_ranks(1, *WINDOW, *ONE[name]))


@pytest.mark.long
@pytest.mark.parametrize("name", list(TWO))
def test_prediction_and_measurement_agree_on_each_of_two_ranks(tiny: Tiny, name: str) -> None:
    assert len(compare(tiny.train_on_ranks(2, *WINDOW, *TWO[name]))) == 2


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_prediction_and_measurement_agree_where_rows_hold_several_documents(
    tiny: Tiny, tmp_path: Path, dtype: str
) -> None:
    text = Path(json.decoder.__file__).read_text()
    sources = []
    for number, start in enumerate(range(0, len(text) - 700, 97)):
        source = tmp_path / f"document{number}.txt"
        source.write_text(text[start : start + 40 + 13 * (number % 31)])
        sources.append(source)
    prepare(sources, tmp_path / "short", vocab_size=VOCABULARY)
    run = tiny.train_on_ranks(
        1, *WINDOW, *WIDE, f"data.data_path={tmp_path / 'short'}", f"precision.params_dtype={dtype}"
    )
    config = run.config()
    documents = documents_of_step(config, 1, [0], ensure_corpus(config.data, config.model), 5)[0]
    rows = config.training.micro_batch_size
    assert max(len(borders) - 1 for borders in documents) > rows, "each row is one document"
    compare(run)


def test_nothing_is_left_behind_by_a_prediction() -> None:
    gc.collect()
    small = ("model.num_layers=1", "training.micro_batch_size=4", "training.global_batch_size=4")
    config = load_config("llama-2m", ["data.data_path=corpus", "fusion.compile=true", *small]).config
    first, second = predict_memory(config), predict_memory(config)
    assert first == second
    assert any("compiled code" in line for line in first.not_counted)
    assert any("one document" in line for line in first.not_counted)
    assert first.own_peaks["parameters"] == first.at_peak["parameters"]
    assert max(first.timeline.totals) == first.peak_bytes
    assert set(first.timeline.live) == set(CATEGORIES)


def test_a_snapshot_of_the_caching_allocator_tells_what_is_reserved_in_no_block() -> None:
    snapshot = {
        "segments": [{"total_size": 2048, "active_size": 512}, {"total_size": 1024, "active_size": 1024}]
    }
    assert fragmentation_of(snapshot) == {"reserved_bytes": 3072, "fragmentation_bytes": 1536}


def test_the_resident_set_is_that_of_this_process() -> None:
    seen = resident_memory()
    assert 0 < seen["resident_bytes"] <= seen["peak_resident_bytes"]
