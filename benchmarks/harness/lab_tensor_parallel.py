"""Tensor and sequence parallelism over two hosts: collectives of a layer in chunks, under its products.

Runs on the ranks of a lab. A step is forward and backward of a decoder whose layers are spread over both ranks; all
sides have the same weights and tokens, and differ in the number of chunks alone.
"""

import sys
from pathlib import Path
from typing import Any

from harness.lab_ranks import Pace, Step, Turns, wire_bytes

__all__ = ["MODELS", "PACES", "calibrate_chunks", "sweep_chunks"]

MODELS = {
    "full": {
        "num_layers": 2,
        "hidden_size": 1024,
        "ffn_hidden_size": 2816,
        "num_attention_heads": 16,
        "seq_length": 512,
        "vocab_size": 512,
    },
    "quick": {
        "num_layers": 1,
        "hidden_size": 768,
        "ffn_hidden_size": 2048,
        "num_attention_heads": 12,
        "seq_length": 256,
        "vocab_size": 512,
    },
    # Shows that it runs, and nothing else.
    "tiny": {
        "num_layers": 2,
        "hidden_size": 32,
        "ffn_hidden_size": 64,
        "num_attention_heads": 4,
        "seq_length": 32,
        "vocab_size": 128,
    },
}
TUNED = "tuned"
ROWS = {"full": 4, "quick": 4, "tiny": 2}
PACES = {
    "full": Pace(steps=4, rounds=4, patience_s=60.0, attempts=3),
    "quick": Pace(steps=3, rounds=1, patience_s=0.5, attempts=1),
    "tiny": Pace(steps=2, rounds=1, patience_s=0.0, attempts=1),
}


def name_of(chunks: int) -> str:
    """Of a side."""
    return f"{chunks} chunks" if chunks > 1 else "plain"


def _side(group: Any, size: str, chunks: Any) -> Step:
    """A step; `chunks` is their number, or the engine's ``Chunks`` with one for each product."""
    import torch

    from drivetrain.config import ModelConfig
    from drivetrain.config.layout import Layout
    from drivetrain.engine.model.batch import whole_sequences
    from drivetrain.engine.model.decoder import Decoder
    from drivetrain.engine.model.initialization import initialize
    from drivetrain.engine.parallel.mesh import Mesh
    from drivetrain.engine.parallel.tensor_parallel import tensor_parallel
    from drivetrain.engine.parallel.tensor_parallel_overlap import Chunks
    from drivetrain.engine.parallel.traffic import Traffic

    model = ModelConfig(**MODELS[size])
    mesh = Mesh.form(Layout(tp=group.size), group.ranks.rank)
    decoder = Decoder(model, torch.float32)
    initialize(decoder, 1)
    tensor_parallel(
        decoder, mesh, True, Traffic(), Chunks.of_all(chunks) if isinstance(chunks, int) else chunks
    )
    # The same tokens on both ranks: they share one batch.
    ids = torch.randint(
        model.vocab_size, (ROWS[size], model.seq_length), generator=torch.Generator().manual_seed(0)
    )
    batch = whole_sequences(ids)

    def step() -> None:
        (decoder.loss_sum(batch) / batch.num_valid_tokens).backward()
        decoder.zero_grad(set_to_none=True)

    return step


def calibrate_chunks(group: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """A plain step over a quick wire, nearly all of it computation; and the bytes that it sends."""
    step = _side(group, settings["size"], 1)
    turns = Turns(group, PACES["quick"], {"plain": step})
    turns.run(rounds=1)
    group.barrier()
    before = wire_bytes()
    step()
    group.barrier()
    return {"compute_s": turns.median("plain"), "bytes": wire_bytes() - before}


def sweep_chunks(group: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """A step with each number of chunks, in turns; then the best against the plain one."""
    pace = PACES[settings["size"]]
    sides = {name_of(chunks): _side(group, settings["size"], chunks) for chunks in settings["chunks"]}
    turns = Turns(group, pace, sides)
    turns.run(rounds=max(1, pace.rounds // 2))
    swept = [(chunks, turns.median(name_of(chunks))) for chunks in settings["chunks"]]
    best = min(swept, key=lambda point: point[1])[0]
    found: dict[str, Any] = {"sweep": swept, "best": best}
    kept = {name: sides[name] for name in dict.fromkeys((name_of(1), name_of(best)))}
    if settings["tune_s"]:
        chunks = _tuned(group, settings)
        found["tuned"] = chunks.by_product()
        kept[TUNED] = _side(group, settings["size"], chunks)
    duel = Turns(group, pace, kept)
    duel.run()
    return {**found, "times": duel.times, "others": duel.others}


def _tuned(group: Any, settings: dict[str, Any]) -> Any:
    """What ``ops tune`` finds for these products on this link, as a run reads it from the tuned file."""
    from drivetrain.config import load_config
    from drivetrain.config.layout import layout_of
    from drivetrain.engine.devices import select_device
    from drivetrain.engine.ops_tuning.chunks import tune_chunks
    from drivetrain.engine.parallel.mesh import Mesh
    from drivetrain.engine.tuned_chunks import tuned_chunks_of_run

    size, path = settings["size"], Path(settings["tuned_file"])
    config = load_config(
        "llama-2m",
        [
            *(f"model.{name}={value}" for name, value in MODELS[size].items()),
            f"training.micro_batch_size={ROWS[size]}",
            f"training.global_batch_size={ROWS[size]}",
            "parallelism.tensor_model_parallel_size=2",
            "parallelism.sequence_parallel=true",
            "overlap.tp_chunks=tuned",
            f"fusion.tuned_file={path}",
            "precision.params_dtype=fp32",
            "run.device=cpu",
            "run.num_threads=1",
        ],
    ).config
    mesh = Mesh.form(layout_of(config, group.size), group.ranks.rank)
    device = select_device(config.run, group.ranks.local_rank)
    tune_chunks(
        config,
        group,
        mesh,
        device,
        path,
        budget_s=settings["tune_s"],
        fresh=True,
        progress=lambda line: print(line, file=sys.stderr, flush=True),
    )
    group.barrier()
    found = tuned_chunks_of_run(config, device, group, mesh)
    assert found is not None, "the configuration asks for the tuned file"
    return found.chunks
