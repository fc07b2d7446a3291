"""A world by the formulas: its ranks together hold the model as often as it is replicated, at any size."""

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import pytest

from drivetrain.config import LaunchFacts, RunConfig, load_config, violations
from drivetrain.engine.dry_run import dry_run
from drivetrain.engine.dry_run_fake import Counted
from drivetrain.engine.dry_run_formulas import Amount
from drivetrain.engine.dry_run_ranks import dry_run_of_ranks
from drivetrain.engine.dry_run_world import PlannedWorld
from drivetrain.engine.model.huggingface_state import expected_shapes
from drivetrain.engine.parallel.traffic import Count

WORLD = 4096
TP, PP = "parallelism.tensor_model_parallel_size", "parallelism.pipeline_model_parallel_size"
ZERO, SCHEDULE = "parallelism.zero_stage", "parallelism.pipeline_schedule"
SHARDS = "parallelism.hybrid_shard_size"
UNTIED = "model.untie_embeddings_and_output_weights=true"
SMALL = (
    "model.num_layers=8",
    "model.hidden_size=80",
    "model.ffn_hidden_size=104",
    "model.num_attention_heads=8",
    "model.num_query_groups=4",
    "model.seq_length=8",
    "model.vocab_size=203",
    "data.data_path=corpus",
    "training.micro_batch_size=1",
    f"training.global_batch_size={WORLD}",
)
LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "dp4096": (),
    "tp8-pp4-dp128-zero3-hsdp16": (f"{TP}=8", f"{PP}=4", f"{ZERO}=3", f"{SHARDS}=16"),
    "tp8-pp4-dp128-zero1": (f"{TP}=8", f"{PP}=4", f"{ZERO}=1"),
    "pp8-dp512-zero3-untied": (f"{PP}=8", f"{ZERO}=3", UNTIED),
    "tp4-pp4-dp256-zero2-zbv": (f"{TP}=4", f"{PP}=4", f"{ZERO}=2", f"{SCHEDULE}=zbv"),
}


def configured(overrides: tuple[str, ...]) -> RunConfig:
    config = load_config("llama-2m", [*SMALL, *overrides]).config
    broken = violations(config, LaunchFacts(WORLD))
    assert broken == [], "; ".join(map(str, broken))
    return config


def copies_of(name: str, config: RunConfig) -> int:
    """Ranks that hold each element of a parameter, by counting on one's fingers."""
    parallelism = config.parallelism
    tensor, pipeline = parallelism.tensor_model_parallel_size, parallelism.pipeline_model_parallel_size
    copies = WORLD // (tensor * pipeline)
    if parallelism.zero_stage == 3:
        copies //= parallelism.hybrid_shard_size or copies
    cut = any(part in name for part in ("embedding", "output", "query", "key", "value", "gate", "up", "down"))
    copies *= 1 if cut else tensor
    if tensor == 8 and (".key." in name or ".value." in name):
        copies *= 2  # Four groups of keys and values for eight ranks.
    if name == "embedding.weight" and pipeline > 1 and parallelism.pipeline_schedule != "zbv":
        copies *= 1 if config.model.untie_embeddings_and_output_weights else 2
    return copies


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_ranks_of_a_large_world_hold_every_element_as_often_as_it_is_replicated(layout: str) -> None:
    config = configured(LAYOUTS[layout])
    world = PlannedWorld.of(config, WORLD)
    held = {name: np.zeros(shape, dtype=np.int64) for name, shape in expected_shapes(config.model).items()}
    replicas = world.layout.size("dp_replicate")
    for rank in range(WORLD):
        if world.layout.coordinates(rank)["dp_replicate"] == 0:
            for name, placement in world.held(rank).items():
                held[name][placement.slices()] += replicas
    for name, times in held.items():
        assert np.all(times == copies_of(name, config)), name
    elements = sum(int(times.sum()) for times in held.values())
    assert world.total.parameters.elements == elements
    by_rank = [world.resident(rank) for rank in range(WORLD)]
    for what in ("parameters", "gradients", "moments"):
        amounts: list[Amount] = [getattr(resident, what) for resident in by_rank]
        total = Amount(sum(one.elements for one in amounts), sum(one.bytes for one in amounts))
        assert getattr(world.total, what) == total, what
    assert world.largest_state_bytes == max(resident.bytes for resident in by_rank)


def test_a_model_that_nothing_replicates_but_data_parallelism_is_held_once_for_each_replica() -> None:
    config = configured((f"{PP}=4", f"{ZERO}=3", f"{SHARDS}=64", UNTIED))
    whole = sum(prod(shape) for shape in expected_shapes(config.model).values())
    total, replicas = PlannedWorld.of(config, WORLD).total, WORLD // 4 // 64
    assert total.parameters.elements == total.gradients.elements == replicas * whole
    assert total.moments.elements == 2 * replicas * whole
    assert total.moments.bytes == 4 * total.moments.elements, "moments have no padding"
    assert total.parameters.bytes > 4 * total.parameters.elements, (
        "shares of a row more than they need have some"
    )


def test_ranks_of_a_large_world_are_built_and_are_what_the_formulas_say() -> None:
    config = configured((*LAYOUTS["tp8-pp4-dp128-zero3-hsdp16"], "training.global_batch_size=512"))
    told: list[tuple[int, int]] = []
    shown = [0, 5, WORLD - 1]
    world = dry_run_of_ranks(config, WORLD, shown, progress=lambda done, total: told.append((done, total)))
    assert not world.failed
    assert [one.rank for one in world.ranks] == shown
    assert told == [(1, 3), (2, 3), (3, 3)]
    expected = PlannedWorld.of(config, WORLD)
    for one in world.ranks:
        # Counted in a pass, and held against the formulas on the way; here once more by hand.
        assert one.traffic_source == "counted"
        assert dict(one.traffic) == dict(expected.traffic(one.rank))
        assert one.resident == expected.resident(one.rank)
    assert world.ranks[-1].place == {
        "tp": 7,
        "cp": 0,
        "pp": 3,
        "dp": 127,
        "dp_shard": 15,
        "dp_replicate": 7,
    }
    assert world.total == expected.total


def test_kinds_are_told_apart_by_what_they_hold_and_send_and_alike_ones_are_one() -> None:
    world = PlannedWorld.of(configured(LAYOUTS["tp8-pp4-dp128-zero3-hsdp16"]), WORLD)
    # 203 rows over 8 ranks: three have one more. The first and the last stage have the embedding, and the last one the
    # norm and the loss besides; the two in the middle are alike, and so are all their tensor-parallel ranks.
    assert world.representatives == [0, 3, 8, 24, 27]
    assert [world.alike(rank) for rank in world.representatives] == [384, 640, 2048, 384, 640]
    assert sum(map(world.alike, world.representatives)) == WORLD
    by_zbv = PlannedWorld.of(configured(LAYOUTS["tp4-pp4-dp256-zero2-zbv"]), WORLD)
    # Both ends lie on the first rank; the one before the tip of the V sends to both sides, the tip to one.
    assert by_zbv.representatives == [0, 3, 4, 12]


def test_what_was_counted_and_is_not_what_the_formulas_give_is_not_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = configured(LAYOUTS["tp4-pp4-dp256-zero2-zbv"])
    planned = PlannedWorld.of(config, WORLD)
    resident = planned.resident(0)
    right = Counted(
        parameters=resident.parameters,
        gradients=resident.gradients,
        moments=resident.moments,
        traffic={key: count for key, count in planned.traffic(0).items() if count is not None},
        parts=tuple(
            (name, placement.full_shape, tuple((part.start, part.stop) for part in placement.slices()))
            for name, placement in planned.held(0).items()
        ),
    )

    def shown(counted: Counted) -> int:
        monkeypatch.setattr(
            "drivetrain.engine.dry_run_ranks.count_in_processes", lambda *_, **__: {0: counted}
        )
        return len(dry_run_of_ranks(config, WORLD, [0], progress=lambda *_: None).ranks)

    assert shown(right) == 1
    assert right.traffic
    key = next(iter(right.traffic))
    more = Amount(resident.moments.elements, resident.moments.bytes + 4)
    for wrong in (
        replace(right, moments=more),
        replace(right, gradients=more),
        replace(right, parts=right.parts[1:]),
        replace(right, traffic={**right.traffic, key: Count(1, 1)}),
        replace(right, traffic={}),
    ):
        with pytest.raises(AssertionError, match=r"^rank 0"):
            shown(wrong)


@pytest.mark.parametrize(
    ("overrides", "world_size"), [((), 1), ((), 4), ((f"{ZERO}=0",), 8)], ids=["one", "four", "eight"]
)
def test_a_rank_that_has_everything_holds_sixteen_bytes_of_each_parameter(
    overrides: tuple[str, ...], world_size: int
) -> None:
    config = load_config(
        "llama-2m", ["training.global_batch_size=32", "training.micro_batch_size=1", *overrides]
    )
    built = dry_run(config.config, world_size)
    assert built.state_bytes == 16 * built.parameters


def test_the_dry_run_of_a_shared_model_tells_the_bytes_of_the_rank_with_most(tmp_path: Path) -> None:
    config = configured(LAYOUTS["pp8-dp512-zero3-untied"])
    whole = 16 * sum(prod(shape) for shape in expected_shapes(config.model).values())
    # An eighth of the layers, shared by 512: less than a tenth of an eighth, and padding.
    assert 0 < dry_run(config, WORLD).state_bytes < whole / 80
