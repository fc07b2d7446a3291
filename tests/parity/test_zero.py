"""ZeRO stages 0 to 3 and hybrid sharding against one process: gradients, updates, bytes that travel, bytes that stay.

Every case has packed documents and very unequal numbers of valid tokens. Widths are odd, so that no parameter divides
by the number of ranks and some ranks hold short or empty parts.
"""

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from parity_cases import (
    MAX_NORM,
    OPTIMIZER,
    gpt,
    llama,
    reference_decoder,
    rows_of_global_batch,
    worst_difference,
)

from drivetrain.config.layout import Layout
from drivetrain.engine.memory.live import LiveBytes
from drivetrain.engine.model.batch import Batch
from drivetrain.engine.model.decoder import Decoder
from drivetrain.engine.optimizer import build_optimizer, clip_gradients
from drivetrain.engine.parallel.buckets import ShareLayout, buckets_of, rows_of_part
from drivetrain.engine.parallel.data_parallel import gradient_sync
from drivetrain.engine.parallel.gradient_sync import GradientSync
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.process_group import Ranks, join
from drivetrain.engine.parallel.resident import resident_bytes, share_elements
from drivetrain.engine.parallel.traffic import Traffic
from rank_processes import on_kept_ranks, on_ranks

STEPS = 3
BUCKET_MB = 0.004
MODELS = {
    # 47 words, 18 and 14 wide: nothing divides by 4, and a norm of 18 has short parts.
    "llama": llama(
        hidden_size=18, ffn_hidden_size=23, num_attention_heads=3, num_query_groups=1, vocab_size=47
    ),
    "gpt": gpt(hidden_size=14, num_attention_heads=2, vocab_size=47),
}

Case = dict[str, Any]


def case(ranks: int, stage: int, **fields: Any) -> Case:
    """A case; the defaults are the plain ones."""
    defaults = {"model": "llama", "shard": None, "micro_batches": 1, "each": False, "bucket_mb": BUCKET_MB}
    return {"ranks": ranks, "stage": stage, **defaults, **fields}


CASES = [
    *(
        case(ranks, stage, micro_batches=count, each=each)
        for ranks in (2, 4)
        for stage in (0, 1, 2, 3)
        for count, each in ((1, False), (3, False), (3, True))
    ),
    *(case(4, stage, shard=2, micro_batches=3, each=each) for stage in (1, 2, 3) for each in (False, True)),
    *(case(4, stage, model="gpt", micro_batches=3) for stage in (0, 1, 2, 3)),
    *(case(2, stage, bucket_mb=0.0, micro_batches=3, each=stage == 2) for stage in (0, 1, 2)),
]


def name_of(one: Case) -> str:
    """As pytest shows it."""
    sharded = "all" if one["shard"] is None else one["shard"]
    policy = "each" if one["each"] else "last"
    return (
        f"{one['model']}-dp{one['ranks']}-zero{one['stage']}-shard_{sharded}-m{one['micro_batches']}-{policy}"
        f"-bucket{one['bucket_mb']:g}"
    )


def one_row(model: Any, number: int, step: int) -> Batch:
    """Row ``number`` of as many as are wanted: eight of one global batch, then those of another."""
    return rows_of_global_batch(model, [number % 8], step + 10 * (number // 8))


def all_rows(one: Case, step: int) -> list[Batch]:
    """The global batch of a case, row by row."""
    return [one_row(MODELS[one["model"]], n, step) for n in range(one["ranks"] * one["micro_batches"])]


def total_of(batches: list[Batch]) -> int:
    """Tokens with loss."""
    return sum(batch.num_valid_tokens for batch in batches)


def formed(one: Case) -> tuple[Decoder, Mesh, GradientSync]:
    """Model and synchronisation on this rank."""
    mesh = Mesh.form(Layout(dp=one["ranks"], dp_shard=one["shard"]), torch.distributed.get_rank())
    decoder = reference_decoder(MODELS[one["model"]])
    sync = gradient_sync(
        decoder,
        mesh,
        Traffic(),
        zero_stage=one["stage"],
        bucket_size_mb=one["bucket_mb"],
        reduce_each_micro_batch=one["each"],
        blocks=list(decoder.blocks.values()),
    )
    return decoder, mesh, sync


def accumulate(one: Case, decoder: Decoder, mesh: Mesh, sync: GradientSync, step: int) -> None:
    """This rank's forward and backward passes of a step, reduced."""
    batches = all_rows(one, step)
    total = total_of(batches)
    count = one["micro_batches"]
    for index in range(count):
        batch = batches[index * one["ranks"] + mesh.index("dp")]
        with sync.micro_batch(last=index == count - 1):
            (decoder.loss_sum(batch) / total * one.get("scale", 1.0)).backward()
    sync.finish()


@contextmanager
def on_this_rank(one: Case) -> Iterator[tuple[Decoder, Mesh, GradientSync]]:
    """Inside the process group."""
    with join(Ranks.from_environment(), "cpu", 1.0):
        yield formed(one)


def norm_of(sync: GradientSync, mesh: Mesh) -> torch.Tensor:
    """The global norm, each element counted once."""
    own = torch.zeros((), dtype=torch.float64)
    shared = False
    for held in sync.gradients().values():
        shared = shared or "dp_shard" in held.placement.sharded_over
        own += held.tensor.square().sum()
    if shared and (group := mesh.group("dp_shard")) is not None:
        torch.distributed.all_reduce(own, group=group)
    return own.sqrt()


def train(one: Case) -> dict[str, Any]:
    """Gradients of the first step, parameters and moments after the last, what travelled in each step."""
    with on_this_rank(one) as (decoder, mesh, sync):
        optimizer = build_optimizer(sync.updated(), OPTIMIZER)
        travelled = []
        gradients: dict[str, np.ndarray] = {}
        for step in range(STEPS):
            accumulate(one, decoder, mesh, sync, step)
            if step == 0:
                gradients = {name: held.tensor.numpy().copy() for name, held in sync.gradients().items()}
            norm = norm_of(sync, mesh)
            for held in sync.gradients().values():
                held.tensor.mul_(min(1.0, MAX_NORM / (float(norm) + 1e-6)))
            sync.step(optimizer)
            travelled.append({key: (count.calls, count.bytes) for key, count in sync.traffic.take().items()})
        with torch.no_grad():
            # Leaves FSDP2's root gathered; what is read below must not depend on it.
            decoder.loss_sum(one_row(MODELS[one["model"]], 0, 0))
        parameters, moments = sync.parameters(), sync.moments(optimizer)
        return {
            "gradients": gradients,
            "norm": float(norm),
            "gradient_placements": dict(sync.placements()),
            "parameters": {name: held.tensor.numpy().copy() for name, held in parameters.items()},
            "parameter_placements": {name: held.placement for name, held in parameters.items()},
            "moments": {name: held.tensor.numpy().copy() for name, held in moments.items()},
            "moment_placements": {name: held.placement for name, held in moments.items()},
            "travelled": travelled,
            "waited": sync.exposed_wait(),
            "buckets": len(getattr(sync, "buckets", [])),
        }


def train_alone(one: Case) -> dict[str, Mapping[str, np.ndarray]]:
    """The same in one plain process."""
    decoder = reference_decoder(MODELS[one["model"]])
    optimizer = build_optimizer(decoder, OPTIMIZER)
    gradients: dict[str, np.ndarray] = {}
    for step in range(STEPS):
        batches = all_rows(one, step)
        for batch in batches:
            (decoder.loss_sum(batch) / total_of(batches)).backward()
        if step == 0:
            gradients = {name: value.grad.numpy().copy() for name, value in decoder.named_parameters()}
        norm, factor = clip_gradients(decoder.parameters(), MAX_NORM)
        assert float(factor) < 1, "clipping must have something to do"
        optimizer.step()
        optimizer.zero_grad()
    named = dict(decoder.named_parameters())
    return {
        "gradients": gradients,
        "norm": float(norm),
        "parameters": {name: value.detach().numpy() for name, value in named.items()},
        "moments": {
            f"{name}/{key}": optimizer.state[value][key].numpy()
            for name, value in named.items()
            for key in ("exp_avg", "exp_avg_sq")
        },
    }


def expected_traffic(one: Case, buckets: int) -> dict[tuple[str, str], tuple[int, int]]:
    """Collectives and payload bytes of a step on each rank, in closed form; how gradients are cut into buckets is seen
    in the first backward pass."""
    decoder = reference_decoder(MODELS[one["model"]])
    shapes = [tuple(parameter.shape) for parameter in decoder.parameters()]
    ranks, stage, count = one["ranks"], one["stage"], one["micro_batches"]
    shard = one["shard"] or ranks
    reductions = count if one["each"] else 1
    whole = 8 * sum(parameter.numel() for parameter in decoder.parameters())
    share = 8 * share_elements(shapes, shard)
    units = len(decoder.blocks) + 1
    expected: dict[tuple[str, str], tuple[int, int]] = {}
    if stage <= 1:
        expected["dp", "all_reduce"] = (buckets * reductions, whole * reductions)
    if stage in (1, 2):
        expected["dp_shard", "all_gather"] = (buckets, share)
    groups = buckets if stage == 2 else units
    if stage >= 2:
        expected["dp_shard", "reduce_scatter"] = (groups * reductions, share * shard * reductions)
        if shard < ranks:
            expected["dp_replicate", "all_reduce"] = (groups * reductions, share * reductions)
    if stage == 3:
        # Blocks are gathered for forward and for backward, the rest (the root) stays gathered in between.
        blocks = 8 * sum(
            share_elements([tuple(p.shape) for p in block.parameters()], shard)
            for block in decoder.blocks.values()
        )
        expected["dp_shard", "all_gather"] = (count * (2 * units - 1), count * (blocks + share))
    return expected


def without_noise(values: Mapping[str, np.ndarray], what: str) -> dict[str, np.ndarray]:
    """A key's bias has no gradient without rope, softmax does not see it: what AdamW makes of it is round-off."""
    return {
        name: value
        for name, value in values.items()
        if what == "gradients" or ".attention.key.bias" not in name
    }


@pytest.mark.parametrize(
    "one",
    # Of four ranks those that share shards in pairs are the telling ones; the others take minutes.
    [
        one if one["ranks"] == 2 or one["shard"] is not None else pytest.param(one, marks=pytest.mark.long)
        for one in CASES
    ],
    ids=name_of,
)
def test_equal_to_one_process_with_the_bytes_of_the_formulas(one: Case) -> None:
    expected = train_alone(one)
    found = on_kept_ranks(train, one["ranks"], one)
    for what in ("gradients", "parameters", "moments"):
        kept = without_noise(expected[what], what)
        per_rank = [
            (without_noise(rank[what], what), rank[f"{what.removesuffix('s')}_placements"]) for rank in found
        ]
        assert worst_difference(per_rank, kept) < 1e-9, what
    for rank in found:
        assert rank["norm"] == pytest.approx(expected["norm"], rel=1e-12)
        assert rank["travelled"] == [expected_traffic(one, rank["buckets"])] * STEPS
        if one["stage"] < 3:
            assert rank["buckets"] == 1 if one["bucket_mb"] == 0 else rank["buckets"] > 3
        if one["stage"] < 3:
            ready, done = rank["waited"]
            assert ready <= done


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_gradient_scaled_by_the_number_of_ranks_is_noticed(stage: int) -> None:
    one = case(2, stage, micro_batches=3)
    expected = train_alone(one)
    found = on_kept_ranks(train, 2, {**one, "scale": 2.0})
    per_rank = [(rank["gradients"], rank["gradient_placements"]) for rank in found]
    assert worst_difference(per_rank, expected["gradients"]) > 0.5
    # AdamW hides it from the parameters but for clipping and epsilon: that is why gradients are compared.


def held_bytes(one: Case) -> dict[str, int]:
    """Live bytes of each kind between ``finish`` and ``step``, storages counted once, and after ``step``."""
    with on_this_rank(one) as (decoder, mesh, sync):
        optimizer = build_optimizer(sync.updated(), OPTIMIZER)
        accumulate(one, decoder, mesh, sync, 0)
        sync.step(optimizer)
        accumulate(one, decoder, mesh, sync, 1)
        return {
            "parameters": storage_bytes(decoder),
            "gradients": gradient_bytes(decoder, sync),
            "moments": sum(
                held.tensor.untyped_storage().nbytes() for held in sync.moments(optimizer).values()
            ),
            "part": mesh.index("dp_shard"),
        }


def storage_bytes(decoder: Decoder) -> int:
    """Every parameter-like tensor that is alive in the process, by storage."""
    names = [value for value in gc.get_objects() if isinstance(value, torch.nn.Parameter)]
    return sum(unique_storages([local(value.data) for value in names]).values())


def gradient_bytes(decoder: Decoder, sync: GradientSync) -> int:
    """Gradients of the model's parameters and of what is updated; a storage once, with all its bytes."""
    tensors = [value.grad for value in decoder.parameters() if value.grad is not None]
    return sum(
        unique_storages(
            [*(local(value) for value in tensors), *(held.tensor for held in sync.gradients().values())]
        ).values()
    )


def local(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor's own part."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def unique_storages(tensors: list[torch.Tensor]) -> dict[int, int]:
    """Bytes by storage."""
    return {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}


@pytest.mark.parametrize("shard", [None, 2], ids=["shard_all", "shard_2"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_is_resident_on_a_rank_follows_the_formulas(stage: int, shard: int | None) -> None:
    one = case(4, stage, shard=shard, micro_batches=1)
    shapes = [tuple(value.shape) for value in reference_decoder(MODELS["llama"]).parameters()]
    for found in on_ranks(held_bytes, 4, one):
        expected = resident_bytes(
            shapes, stage=stage, part=found["part"], parts=shard or 4, bytes_per_element=8
        )
        assert found["parameters"] == expected.parameters
        assert found["gradients"] == expected.gradients
        assert found["moments"] == expected.moments


def peak_of_backward(one: Case) -> int:
    """Peak of live bytes beyond the parameters over a step's forward and backward passes."""
    with on_this_rank(one) as (decoder, mesh, sync):
        with LiveBytes() as live:
            live.track("parameters", dict(decoder.named_parameters()))
            start = live.live_bytes
            accumulate(one, decoder, mesh, sync, 0)
        return live.peak_bytes - start


def test_reducing_with_each_micro_batch_keeps_no_whole_gradients_at_stage_two() -> None:
    found = {
        each: on_ranks(peak_of_backward, 2, case(2, 2, micro_batches=3, each=each))[0]
        for each in (False, True)
    }
    whole = 8 * sum(value.numel() for value in reference_decoder(MODELS["llama"]).parameters())
    assert found[False] - found[True] > whole / 4


def unused_parameters() -> list[float]:
    """A parameter that has no gradient in the second step gets zeros, not what its bucket held before."""
    with join(Ranks.from_environment(), "cpu", 1.0) as group:
        found = []
        for stage in (0, 1, 2):
            module = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 3)})
            mesh = Mesh.form(Layout(dp=group.size), group.ranks.rank)
            sync = gradient_sync(module, mesh, Traffic(), zero_stage=stage, bucket_size_mb=25.0)
            optimizer = torch.optim.SGD([value for _, value in sync.updated()], lr=0.0)
            for names in ("ab", "a"):
                with sync.micro_batch(last=True):
                    sum(module[name](torch.ones(2, 3)).sum() for name in names).backward()
                sync.finish()
                last = {name: float(held.tensor.abs().sum()) for name, held in sync.gradients().items()}
                sync.step(optimizer)
            found.append(last["b.weight"])
            assert last["a.weight"] > 0
        return found


def test_a_parameter_without_gradient_gets_zeros() -> None:
    for found in on_kept_ranks(unused_parameters, 2):
        assert found == [0.0, 0.0, 0.0]


def schedule_of_its_own(stage: int) -> dict[str, Any]:
    """All backward passes inside one quiet block, as a pipeline schedule runs them."""
    one = case(2, stage, micro_batches=3)
    with on_this_rank(one) as (decoder, mesh, sync):
        batches = all_rows(one, 0)
        with sync.micro_batch(last=False):
            for index in range(3):
                batch = batches[index * 2 + mesh.index("dp")]
                (decoder.loss_sum(batch) / total_of(batches)).backward()
        assert not sync.traffic.counts, "something travelled before it was asked for"
        sync.finish()
        return {
            "gradients": {name: held.tensor.numpy().copy() for name, held in sync.gradients().items()},
            "placements": dict(sync.placements()),
        }


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_schedule_may_run_all_backward_passes_before_anything_travels(stage: int) -> None:
    expected = train_alone(case(2, stage, micro_batches=3))
    found = on_kept_ranks(schedule_of_its_own, 2, stage)
    per_rank = [(rank["gradients"], rank["placements"]) for rank in found]
    assert worst_difference(per_rank, expected["gradients"]) < 1e-9


def test_one_rank_communicates_nothing_at_any_stage() -> None:
    for stage in (0, 1, 2, 3):
        decoder = reference_decoder(MODELS["llama"])
        sync = gradient_sync(decoder, Mesh.form(Layout(), 0), Traffic(), zero_stage=stage)
        with sync.micro_batch(last=True):
            decoder.loss_sum(one_row(MODELS["llama"], 0, 0)).backward()
        sync.finish()
        sync.step(build_optimizer(sync.updated(), OPTIMIZER))
        assert not sync.traffic.counts
        assert sync.exposed_wait() is None
        assert all(value.grad is None for value in decoder.parameters())


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 8, 9, 47])
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 8])
def test_parts_cover_all_rows_once_and_torch_cuts_alike(rows: int, parts: int) -> None:
    chunks = torch.arange(rows).chunk(parts)
    for part in range(parts):
        first, count = rows_of_part(rows, part, parts)
        mine = torch.arange(rows)[first : first + count]
        assert torch.equal(mine, chunks[part] if part < len(chunks) else mine.new_empty(0))


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_a_bucket_goes_into_shares_and_back(parts: int) -> None:
    tensors = [torch.randn(shape) for shape in ((7, 3), (5,), (1, 4), (6, 2))]
    layout = ShareLayout([tensor.shape for tensor in tensors], parts)
    buffer = torch.full((parts, layout.share), torch.nan)
    layout.copy_in(tensors, buffer)
    assert not buffer.isnan().any(), "padding would carry whatever was in memory"
    back = [torch.empty_like(tensor) for tensor in tensors]
    layout.copy_out(buffer, back)
    for tensor, copy in zip(tensors, back, strict=True):
        assert torch.equal(tensor, copy)
    for part in range(parts):
        ranges = [rows_of_part(tensor.shape[0], part, parts) for tensor in tensors]
        own = [tensor[first : first + count] for tensor, (first, count) in zip(tensors, ranges, strict=True)]
        for view, expected in zip(layout.views(buffer[part], [o.shape for o in own]), own, strict=True):
            assert torch.equal(view, expected)


def test_buckets_come_in_the_order_of_backward_and_close_when_full() -> None:
    sizes = [4_000, 3_000, 2_000, 1_000]
    assert buckets_of(sizes, 0) == [[3, 2, 1, 0]]
    assert buckets_of(sizes, 0.003) == [[3, 2], [1], [0]]
    assert buckets_of(sizes, 0.0035) == [[3, 2, 1], [0]]
    assert buckets_of([], 1) == []
