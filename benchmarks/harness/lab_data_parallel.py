"""Data parallelism over a wire that takes about as long as the computation: our buckets beside torch's.

Runs on the ranks of a lab. A step is forward, backward, reduction and a plain SGD update; all sides have the same model
and batch. ``compute`` is the step of one process, without anybody to reduce with, and ``wire`` one all-reduce of all
gradients with nothing beside it.
"""

import math
from collections.abc import Mapping
from statistics import median
from typing import Any

from harness.lab_ranks import Pace, Step, Turns, wire_bytes

__all__ = ["MODELS", "PACES", "calibrate", "compare", "levels", "shares", "wire_dtypes"]

MODELS: Mapping[str, Mapping[str, int]] = {
    # 13.8 M parameters, 55 MB of gradients.
    "full": {
        "num_layers": 6,
        "hidden_size": 384,
        "ffn_hidden_size": 1024,
        "num_attention_heads": 6,
        "seq_length": 512,
        "vocab_size": 4096,
    },
    # 5.9 M parameters, 24 MB.
    "quick": {
        "num_layers": 6,
        "hidden_size": 256,
        "ffn_hidden_size": 704,
        "num_attention_heads": 4,
        "seq_length": 256,
        "vocab_size": 4096,
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
ROWS = {"full": 2, "quick": 4, "tiny": 2}
PACES = {
    "full": Pace(steps=3, rounds=3, patience_s=60.0, attempts=3),
    "quick": Pace(steps=3, rounds=1, patience_s=0.5, attempts=1),
    "tiny": Pace(steps=2, rounds=1, patience_s=0.0, attempts=1),
}
OFF = "ours, all after backward"
COMPUTE, WIRE = "compute", "wire"


class Sides:
    """Builds the sides of one size. Imports torch: for the ranks alone."""

    def __init__(self, group: Any, size: str, rows: int | None = None) -> None:
        import torch

        from drivetrain.config import ModelConfig
        from drivetrain.config.layout import Layout
        from drivetrain.engine.model.batch import whole_sequences
        from drivetrain.engine.parallel.mesh import Mesh

        self.model = ModelConfig(**MODELS[size])
        rank, self.ranks = group.ranks.rank, group.size
        generator = torch.Generator().manual_seed(rank)
        ids = torch.randint(
            self.model.vocab_size, (rows or ROWS[size], self.model.seq_length), generator=generator
        )
        self.batch = whole_sequences(ids)
        self.valid = self.batch.num_valid_tokens
        self.mesh = Mesh.form(Layout(dp=self.ranks), rank)
        self.alone = Mesh.form(Layout(), 0)
        self.per_host = group.ranks.local_world_size
        self._in_levels: Any = None

    def decoder(self) -> Any:
        import torch

        from drivetrain.engine.model.decoder import Decoder
        from drivetrain.engine.model.initialization import initialize

        decoder = Decoder(self.model, torch.float32)
        initialize(decoder, 1)
        return decoder

    @property
    def gradient_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.decoder().parameters())

    def in_levels(self) -> Any:
        """The mesh whose collectives go inside hosts and between them. Made once: it has groups of its own."""
        import torch

        if self._in_levels is None:
            self._in_levels = self.mesh.in_levels(self.per_host, torch.device("cpu"))
        return self._in_levels

    def ours(
        self,
        bucket_mb: float,
        *,
        alone: bool = False,
        in_levels: bool = False,
        zero_stage: int = 0,
        **options: Any,
    ) -> Step:
        """Through the engine's own reduction; `options` are :func:`gradient_sync`'s."""
        import torch

        from drivetrain.engine.parallel.data_parallel import gradient_sync
        from drivetrain.engine.parallel.traffic import Traffic

        decoder = self.decoder()
        sync = gradient_sync(
            decoder,
            self.alone if alone else self.in_levels() if in_levels else self.mesh,
            Traffic(),
            zero_stage=zero_stage,
            bucket_size_mb=bucket_mb,
            blocks=list(decoder.blocks.values()),
            **options,
        )
        optimizer = torch.optim.SGD([value for _, value in sync.updated()], lr=1e-4)
        total = self.valid * self.ranks

        def step() -> None:
            with sync.micro_batch(last=True):
                (decoder.loss_sum(self.batch) / total).backward()
            sync.finish()
            sync.step(optimizer)

        return step

    def theirs(self, bucket_mb: float) -> Step:
        """Through torch's DistributedDataParallel, with everything that makes it faster on a CPU."""
        import torch
        from torch.nn.parallel import DistributedDataParallel

        from drivetrain.engine.model.batch import Batch

        decoder = self.decoder()

        class LossOf(torch.nn.Module):
            """What the peer wraps: the loss is its forward."""

            def __init__(self) -> None:
                super().__init__()
                self.decoder = decoder

            def forward(self, batch: Batch) -> torch.Tensor:
                return decoder.loss_sum(batch)

        wrapped = DistributedDataParallel(
            LossOf(), bucket_cap_mb=bucket_mb * 1e6 / 2**20, gradient_as_bucket_view=True, static_graph=True
        )
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-4)

        def step() -> None:
            (wrapped(self.batch) / self.valid).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return step

    def wire(self) -> Step:
        """The communication alone."""
        import torch
        import torch.distributed as dist

        flat = torch.zeros(self.gradient_bytes // 4)
        return lambda: dist.all_reduce(flat)


def calibrate(group: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """How long a step computes, on ranks that all compute; and the bytes of its gradients."""
    sides = Sides(group, settings["size"])
    # A slow moment here makes links slow for all that follows: several turns, and their median.
    turns = Turns(group, PACES[settings["size"]], {COMPUTE: sides.ours(0.0, alone=True)})
    turns.run(rounds=1 if settings["size"] == "tiny" else 3)
    return {"compute_s": turns.median(COMPUTE), "bytes": sides.gradient_bytes}


def compare(group: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """A sweep of the bucket's size on both sides, the ladder's search, then the best of each in turns."""
    pace = PACES[settings["size"]]
    sides = Sides(group, settings["size"])
    levels = {
        COMPUTE: sides.ours(0.0, alone=True),
        WIRE: sides.wire(),
        OFF: sides.ours(0.0),
    }
    sweep = {
        (who, size): build(size)
        for size in settings["buckets"]
        for who, build in (("ours", sides.ours), ("DDP", sides.theirs))
    }
    named = {f"{who} {size:g} MB": step for (who, size), step in sweep.items()}
    turns = Turns(group, pace, {**levels, **named})
    turns.run(rounds=1)
    points = {
        who: [(size, turns.median(f"{who} {size:g} MB")) for size in settings["buckets"]]
        for who in ("ours", "DDP")
    }
    best = {who: min(swept, key=lambda point: point[1])[0] for who, swept in points.items()}
    found: dict[str, Any] = {"sweep": points, "best": best}
    kept = {
        name: turns.sides[name] for name in (*levels, *(f"{who} {size:g} MB" for who, size in best.items()))
    }
    del sweep, named, turns
    if settings["trials"]:
        found["ladder"] = _ladder(group, pace, sides, kept, settings["trials"])
    duel = Turns(group, pace, kept)
    duel.run()
    found["times"] = duel.times
    found["others"] = duel.others
    found["bytes"] = sides.gradient_bytes
    return found


def _ladder(group: Any, pace: Pace, sides: Sides, kept: dict[str, Step], trials: int) -> dict[str, Any]:
    """The bucket that the ladder's own search comes to, starting from the default; its side joins ``kept``."""
    from drivetrain.catalogue import entry
    from drivetrain.config import RunConfig  # noqa: F401 - the catalogue's entries need it
    from drivetrain.tune.golden import golden_section

    (knob,) = entry("ddp_bucket").knobs
    start = 25.0
    tried: dict[str, float] = {}

    def measure(size: float) -> float:
        turns = Turns(group, pace, {"start": sides.ours(start), "tried": sides.ours(size)})
        # All ranks have the same times, and so make the same search.
        turns.run(rounds=1)
        tried[f"{size:g}"] = math.log(turns.median("start") / turns.median("tried"))
        return tried[f"{size:g}"]

    size, gain = golden_section(knob, start, measure, trials=trials)
    kept[f"ladder {size:g} MB"] = sides.ours(size)
    return {"size": size, "gain": gain, "tried": tried}


def shares(group: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Communication's share of a step, from none hidden to everything that is there; bytes that left the host."""
    pace = PACES[settings["size"]]
    sides = Sides(group, settings["size"])
    steps = {COMPUTE: sides.ours(0.0, alone=True), WIRE: sides.wire()}
    for name, options in settings["rows"].items():
        steps[name] = sides.ours(**options)
    turns = Turns(group, pace, steps)
    turns.run()
    sent = {name: _sent_by(group, step) for name, step in steps.items()}
    compute = turns.median(COMPUTE)
    return {
        "times": turns.times,
        "others": turns.others,
        "bytes": sides.gradient_bytes,
        "sent": sent,
        "share": {name: 1 - compute / median(turns.times[name]) for name in settings["rows"]},
    }


def levels(group: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Several ranks on each host: the same step with flat collectives and with those in levels."""
    pace = PACES[settings["size"]]
    sides = Sides(group, settings["size"], rows=settings["rows"])
    steps = {
        "flat": sides.ours(settings["bucket_mb"]),
        "levels": sides.ours(settings["bucket_mb"], in_levels=True),
        COMPUTE: sides.ours(0.0, alone=True),
    }
    turns = Turns(group, pace, steps)
    turns.run()
    return {
        "times": turns.times,
        "others": turns.others,
        "bytes": sides.gradient_bytes,
        "sent": {name: _sent_by(group, step) for name, step in steps.items()},
    }


def wire_dtypes(group: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Gradients in fp32 and in bf16 on the wire: bytes that left the host, and the step."""
    import torch

    pace = PACES[settings["size"]]
    sides = Sides(group, settings["size"])
    steps = {
        "fp32": sides.ours(settings["bucket_mb"]),
        "bf16": sides.ours(settings["bucket_mb"], wire_dtype=torch.bfloat16),
        COMPUTE: sides.ours(0.0, alone=True),
    }
    turns = Turns(group, pace, steps)
    turns.run()
    return {
        "times": turns.times,
        "others": turns.others,
        "bytes": sides.gradient_bytes,
        "sent": {name: [_sent_by(group, step) for _ in range(3)] for name, step in steps.items()},
    }


def _sent_by(group: Any, step: Step) -> int:
    """Bytes that this host sends to its link in one step of all ranks."""
    group.barrier()
    before = wire_bytes()
    step()
    group.barrier()
    return wire_bytes() - before
