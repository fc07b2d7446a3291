"""Each model of time, held against an account worked out by hand; none exceeds its bound, and none guesses."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.catalogue.time_models import MeanStep, TimeFacts, TimeModel, Traffic, mean_step, predicted
from drivetrain.catalogue.time_models.activations import (
    COMPILED,
    FUSED_OPERATORS,
    compiled_elements,
    fused_elements,
)
from drivetrain.catalogue.time_models.communication import (
    ASYNC_GRADIENTS,
    BUCKETS,
    CHUNKS,
    FUSED_CALLS,
    NARROW_GRADIENTS,
    PARAMETER_GATHER,
    PREFETCH,
)
from drivetrain.catalogue.time_models.model import pipelined_ns
from drivetrain.catalogue.time_models.passes import FEWER_PASSES
from drivetrain.catalogue.time_models.products import SIXTEEN_BITS
from drivetrain.catalogue.time_models.repeating import REPEATED_FORWARD
from drivetrain.catalogue.time_models.update import BACKGROUND_SAVE, FUSED_UPDATE
from drivetrain.catalogue.time_models.waiting import BAKED_TRANSFORM, BUILDERS
from drivetrain.config import LaunchFacts, RunConfig, load_config
from drivetrain.measure.account import CLASSES, Account, RankAccount, StepAccount, Window
from drivetrain.measure.flops import model_flops
from drivetrain.measure.optimisation import Count, NoPrediction, Observation, Prediction
from drivetrain.measure.parameters import parameter_count

MS = 1_000_000


def account_of(window_ms: float, classes: Mapping[str, float]) -> Account:
    """One rank, one step; times in ms."""
    ns = {name: round(value * MS) for name, value in classes.items() if value > 0}
    nothing: dict[str, Any] = dict.fromkeys(
        (
            "busy_ns",
            "idle_ns",
            "compute_ns",
            "communication_ns",
            "overlapped_communication_ns",
            "exposed_communication_ns",
            "copy_ns",
            "exposed_copy_ns",
        )
    )
    window = Window(
        window_ns=round(window_ms * MS),
        classes=ns,
        unexplained_ns=round(window_ms * MS) - sum(ns.values()),
        **nothing,
    )
    step = StepAccount(step=1, window=window, start_ns=0, end_ns=window.window_ns, first=False)
    return Account(health=(), ranks=(RankAccount(rank=0, view="host", whole=window, steps=(step,)),))


def config(*overrides: str) -> RunConfig:
    return load_config("llama-2m", ["precision.params_dtype=fp32", *overrides]).config


def facts(window_ms: float, classes: Mapping[str, float], *overrides: str, **more: Any) -> TimeFacts:
    return TimeFacts(account_of(window_ms, classes), config(*overrides), **more)


def expected(model: TimeModel, given: TimeFacts, *after: str) -> Prediction:
    found = model.predict(given, config(*after))
    assert isinstance(found, Prediction), found
    return found


def why_none(model: TimeModel, given: TimeFacts, *after: str) -> str:
    found = model.predict(given, config(*after))
    assert isinstance(found, NoPrediction), found
    return found.why


# -- what all have in common --------------------------------------------------------------------------------------


def test_a_saving_is_a_ratio_of_step_times_and_no_larger_than_what_is_treated() -> None:
    step = MeanStep(100.0, {"compute.norm": 20.0, "data.loader": 30.0})
    half = predicted(step, ("compute.norm",), 10.0, "", low_ns=5.0, high_ns=50.0)
    assert isinstance(half, Prediction)
    assert (half.ratio, half.low, half.high) == (100 / 90, 100 / 95, 100 / 80)
    cost = predicted(step, (), -25.0, "")
    assert isinstance(cost, Prediction)
    assert cost.ratio == 100 / 125
    whole = predicted(MeanStep(30.0, {"data.loader": 30.0}), ("data",), 3.0, "")
    assert isinstance(whole, NoPrediction)


def test_the_mean_step_is_of_steps_and_then_of_ranks() -> None:
    one, two = account_of(10, {"compute.norm": 4}), account_of(20, {"data.loader": 6})
    found = mean_step(replace(one, ranks=(*one.ranks, *two.ranks)))
    assert found == MeanStep(15 * MS, {"compute.norm": 2 * MS, "data.loader": 3 * MS})
    assert mean_step(Account(health=(), ranks=())) is None
    assert mean_step(replace(one, ranks=(replace(one.ranks[0], steps=()),))) is None


@given(st.floats(0, 1e9), st.floats(0, 1e9), st.integers(1, 64))
def test_more_pieces_hide_more_and_never_more_than_the_shorter(a: float, b: float, pieces: int) -> None:
    assert pipelined_ns(a, b, 1) == pytest.approx(a + b)
    assert pipelined_ns(a, b, pieces + 1) <= pipelined_ns(a, b, pieces)
    assert pipelined_ns(a, b, pieces) >= max(a, b)


# -- waiting for batches ------------------------------------------------------------------------------------------


def test_a_builder_beside_the_step_hides_what_it_builds_in_time() -> None:
    waits = facts(100, {"compute.matmul": 70, "data.loader": 20}, spare_cores=2, threads=2)
    assert expected(BUILDERS, waits, "data.num_workers=1").ratio == pytest.approx(100 / 80)
    assert expected(BUILDERS, waits, "data.prefetch_batches=4").ratio == pytest.approx(100 / 80)
    # 80 of 100 ms are building: one builder takes longer than the rest of the step, two do not.
    slow = facts(100, {"compute.matmul": 15, "data.loader": 80}, spare_cores=2, threads=2)
    assert expected(BUILDERS, slow, "data.num_workers=1").ratio == pytest.approx(100 / 80)
    assert expected(BUILDERS, slow, "data.num_workers=2").ratio == pytest.approx(100 / 40)


def test_without_a_spare_core_the_computation_gives_its_own_up() -> None:
    waits = facts(100, {"compute.matmul": 70, "data.loader": 20}, spare_cores=0, threads=2)
    found = expected(BUILDERS, waits, "data.num_workers=1")
    # 20 ms of building, shared by two cores, come on top of 80.
    assert found.ratio == pytest.approx(100 / 90)
    assert found.low == found.ratio
    assert found.high == pytest.approx(100 / 80)
    unknown = facts(100, {"compute.matmul": 70, "data.loader": 20})
    assert "upper bound" in expected(BUILDERS, unknown, "data.num_workers=1").rule


def test_more_builders_share_what_fewer_take_all_of_a_step_for() -> None:
    waits = facts(
        100, {"compute.matmul": 30, "data.loader": 60}, "data.num_workers=2", spare_cores=8, threads=2
    )
    # Two builders are waited for: building takes 200 ms, four of them 50.
    assert expected(BUILDERS, waits, "data.num_workers=4").ratio == pytest.approx(100 / 50)
    assert expected(BUILDERS, waits, "data.num_workers=8").ratio == pytest.approx(100 / 40)
    assert "as many builders" in why_none(BUILDERS, waits, "data.num_workers=2", "data.prefetch_factor=8")
    assert "fewer" in why_none(BUILDERS, waits, "data.num_workers=1")
    assert "no time" in why_none(BUILDERS, facts(100, {"compute.matmul": 30}), "data.num_workers=1")


def test_a_baked_transform_saves_its_own_time_as_far_as_it_is_waited_for() -> None:
    shape = ("data.transform=numpy.sort", "training.micro_batch_size=4")
    known = {"numpy.sort": 0.004, "read": 0.001}
    waits = facts(100, {"compute.matmul": 70, "data.loader": 20}, *shape, data_operations=known)
    # Four micro-batches of 4 ms.
    assert expected(BAKED_TRANSFORM, waits).ratio == pytest.approx(100 / 84)
    slow = replace(waits, data_operations={"numpy.sort": 0.4})
    assert expected(BAKED_TRANSFORM, slow).ratio == pytest.approx(100 / 80)
    assert "does not say" in why_none(BAKED_TRANSFORM, replace(waits, data_operations={}))


# -- products in 16 bits ------------------------------------------------------------------------------------------


def rates(fp32: float, bf16: float, bandwidth: float = 1e12) -> dict[str, Any]:
    return {"matmul_flops": {"fp32": fp32, "bf16": bf16}, "memory_bandwidth": bandwidth}


def test_products_in_16_bits_lie_between_the_ceilings_and_their_own_efficiency() -> None:
    model = config().model
    flops = model_flops(model, tokens=16 * 256, sum_squared_lengths=0).total
    least_ms = 40.0
    wide = flops / (least_ms / 1e3)
    given = facts(
        200,
        {"compute.matmul": 100, "compute.attention": 20, "compute.norm": 8, "compute.elementwise": 12},
        **rates(wide, 4 * wide, bandwidth=1e9),
    )
    found = expected(SIXTEEN_BITS, given, "precision.params_dtype=bf16")
    weights = parameter_count(model).block_matrices + parameter_count(model).output_product
    casts = 12 * weights / 1e9 * 1e3
    best = 0.75 * (100 + 20) + (8 + 12) / 2 - casts
    worst = 0.75 * least_ms - casts
    assert found.high == pytest.approx(200 / (200 - best))
    assert found.low == pytest.approx(200 / (200 - worst))
    assert found.ratio == pytest.approx(200 / (200 - (best + worst) / 2))


def test_products_in_16_bits_are_not_predicted_without_ceilings_of_this_machine() -> None:
    classes = {"compute.matmul": 100.0}
    to = "precision.params_dtype=bf16"
    rate = 1e9
    assert "bench gemm --dtype fp32 --dtype bf16" in why_none(SIXTEEN_BITS, facts(200, classes), to)
    lacks = facts(200, classes, matmul_flops={"fp32": rate}, threads=2)
    assert "bench gemm --dtype bf16 --threads 2" in why_none(SIXTEEN_BITS, lacks, to)
    narrow = facts(200, classes, matmul_flops={"fp32": rate, "bf16": rate})
    assert "bench memory" in why_none(SIXTEEN_BITS, narrow, to)
    assert "less than" in why_none(SIXTEEN_BITS, facts(200, classes, **rates(rate, rate)), to)
    tf32 = Observation(1, matmul_dtypes={"tf32": Count(1, 1)})
    assert "tf32" in why_none(SIXTEEN_BITS, facts(200, classes, **rates(1e15, 1e15), observed=tf32), to)


# -- memory-bound work on activations -----------------------------------------------------------------------------


def traffic(ns: float, count: float | None, kind: str = "compute.elementwise") -> Traffic:
    return Traffic(kind, "aten::mul", 10, ns, count)


def test_elements_of_a_block_are_counted_by_hand() -> None:
    model = config().model
    hidden, ffn, queries, keys = 128, 448, 128, 128
    assert compiled_elements(model) == 20 * hidden + 4 * (queries + keys) + 8 * ffn
    assert fused_elements(model) == 31 * hidden + 4 * (queries + keys) + 8 * ffn
    gpt = load_config("gpt2-124m", []).config.model
    assert compiled_elements(gpt) == 19 * 768 + 5 * 3072, (
        "learned positions are not rotated, GELU has no gate"
    )


@pytest.mark.parametrize(
    ("model", "elements"), [(COMPILED, compiled_elements), (FUSED_OPERATORS, fused_elements)]
)
def test_what_is_left_to_move_takes_its_share_of_the_time(model: TimeModel, elements: Any) -> None:
    shape = config().model
    tokens = 16 * 256
    left = 4 * tokens * (6 * elements(shape) + 5 * 128)
    to = "fusion.compile=true" if model is COMPILED else "fusion.level=all"
    classes = {"compute.matmul": 50.0, "compute.elementwise": 40.0, "compute.norm": 5.0}
    given = facts(100, classes, traffic=(traffic(30 * MS, 4 * left), traffic(3 * MS, None, "compute.norm")))
    # 30 of 33 ms move four times what is left; the rest is taken to move as much for its time.
    found = expected(model, given, to)
    before = 4 * left * 33 / 30
    assert found.ratio == pytest.approx(100 / (100 - 33 * (1 - left / before)))
    assert found.high is None
    fast = expected(model, replace(given, memory_bandwidth=left / 1e-3), to)
    assert fast.low == pytest.approx(found.ratio)
    assert fast.high == pytest.approx(100 / (100 - 32))


def test_bytes_that_are_not_known_predict_nothing() -> None:
    classes = {"compute.matmul": 50.0, "compute.elementwise": 40.0}
    to = "fusion.compile=true"
    assert "were not recorded" in why_none(COMPILED, facts(100, classes), to)
    mostly = facts(100, classes, traffic=(traffic(30 * MS, None), traffic(3 * MS, 1e12)))
    assert "only 9%" in why_none(COMPILED, mostly, to)
    small = facts(100, classes, traffic=(traffic(30 * MS, 10.0),))
    assert "nothing to gain" in why_none(COMPILED, small, to)
    drops = facts(100, classes, "model.hidden_dropout=0.1", traffic=(traffic(30 * MS, 1e12),))
    assert "dropout" in why_none(COMPILED, drops, "model.hidden_dropout=0.1", to)


# -- the update and checkpoints -----------------------------------------------------------------------------------


def test_a_fused_update_makes_fewer_passes() -> None:
    given = facts(100, {"compute.optimizer": 23})
    found = expected(FUSED_UPDATE, given)
    assert found.ratio == pytest.approx(100 / (100 - 13))
    assert found.high == pytest.approx(100 / (100 - 23 * 13 / 20))
    unclipped = expected(FUSED_UPDATE, facts(100, {"compute.optimizer": 20}, "training.clip_grad=0"))
    assert unclipped.ratio == unclipped.high == pytest.approx(100 / (100 - 13))
    assert "fp32" in why_none(
        FUSED_UPDATE, facts(100, {"compute.optimizer": 20}, "precision.optimizer_state_dtype=bf16")
    )


def test_a_checkpoint_in_the_background_costs_a_copy() -> None:
    seen = Observation(4, ranges={"drivetrain/checkpoint": Count(2, 400)})
    given = facts(100, {"maintenance.checkpoint": 30}, observed=seen, memory_bandwidth=1e10)
    copies = 0.5 * 24 * parameter_count(config().model).total / 1e10 * 1e3
    assert expected(BACKGROUND_SAVE, given).ratio == pytest.approx(100 / (100 - 30 + copies))
    assert "bench memory" in why_none(BACKGROUND_SAVE, replace(given, memory_bandwidth=None))
    assert "no checkpoint" in why_none(BACKGROUND_SAVE, facts(100, {}, memory_bandwidth=1e10))


# -- repeated forward passes --------------------------------------------------------------------------------------


def test_what_is_repeated_costs_a_third_of_its_class() -> None:
    classes = {
        "compute.matmul": 60.0,
        "compute.attention": 15.0,
        "compute.activation": 6.0,
        "compute.norm": 3.0,
    }
    given = facts(100, classes)
    some = ("memory.recompute_granularity=selective", "memory.recompute_modules=core_attn,mlp_act")
    assert expected(REPEATED_FORWARD, given, *some).ratio == pytest.approx(100 / 107)
    parameters = parameter_count(config().model)
    blocks = parameters.block_matrices / (parameters.block_matrices + parameters.output_product)
    full = expected(REPEATED_FORWARD, given, "memory.recompute_granularity=full")
    assert full.ratio == pytest.approx(100 / (100 + (60 * blocks + 24) / 3))
    mlp = ("memory.recompute_granularity=selective", "memory.recompute_modules=mlp")
    assert "mlp" in why_none(REPEATED_FORWARD, given, *mlp)


# -- passes -------------------------------------------------------------------------------------------------------


def test_what_is_paid_once_a_pass_is_saved_with_each_pass() -> None:
    given = facts(
        100, {"host.launch": 20, "host.python": 4, "compute.matmul": 60}, "training.micro_batch_size=4"
    )
    assert expected(FEWER_PASSES, given, "training.micro_batch_size=16").ratio == pytest.approx(
        100 / (100 - 18)
    )
    assert expected(FEWER_PASSES, given, "training.micro_batch_size=2").ratio == pytest.approx(100 / 124)
    assert "as many" in why_none(FEWER_PASSES, given, "training.micro_batch_size=4")
    larger = ("training.micro_batch_size=16", "training.global_batch_size=32")
    assert "other tokens" in why_none(FEWER_PASSES, given, *larger)


# -- communication ------------------------------------------------------------------------------------------------

TWO = LaunchFacts(world_size=2)


def flights(
    group: str, kind: str, wire: float, exposed: float, *, backward: float = 0.0, fixed: float | None = None
) -> dict[str, Any]:
    """Of steps of 50 ms without the profiler; times in ms."""
    one = {
        "calls": 4.0,
        "bytes": 8e6,
        "wire_s": wire / 1e3,
        "exposed_s": exposed / 1e3,
        "fixed_s_per_call": None if fixed is None else fixed / 1e3,
        "bytes_per_s": None if fixed is None else 1e9,
    }
    return {"step_s": 0.05, "backward_s": backward / 1e3, "groups": {group: {"kinds": {kind: one}}}}


DP = ("training.micro_batch_size=8",)


def test_buckets_hide_gradients_under_backward() -> None:
    gradients_mb = 4 * parameter_count(config().model).total / 1e6
    start, four = "overlap.bucket_size_mb=0", f"overlap.bucket_size_mb={gradients_mb / 4 * 1.001}"
    given = facts(
        100,
        {"communication.dp.transfer": 30},
        *DP,
        start,
        launch=TWO,
        communication=flights("dp", "all_reduce", wire=15, exposed=15, backward=10),
        spare_cores=2,
    )
    # Of 100 ms profiled where 50 are without: 30 ms under way, 20 ms of backward, in four pieces 30 + 20 / 4.
    found = expected(BUCKETS, given, *DP, four)
    assert found.ratio == pytest.approx(100 / (100 - 15))
    assert found.low is None
    crowded = expected(BUCKETS, replace(given, spare_cores=0), *DP, four)
    assert (crowded.low, crowded.high) == (1.0, found.ratio)
    cut = replace(
        given,
        config=config(*DP, four),
        communication=flights("dp", "all_reduce", wire=15, exposed=10, backward=10, fixed=0.5),
    )
    eight = f"overlap.bucket_size_mb={gradients_mb / 8 * 1.001}"
    # 30 + 20/4 before and 30 + 20/8 after, with four more calls of 1 ms.
    assert expected(BUCKETS, cut, *DP, eight).ratio == pytest.approx(100 / (100 - 2.5 + 4))
    assert "whatever its size" in why_none(
        BUCKETS, replace(cut, communication=flights("dp", "all_reduce", 15, 10, backward=10)), *DP, eight
    )
    assert "collectives" in why_none(BUCKETS, replace(given, communication=None), *DP, four)


def test_narrow_gradients_halve_the_exposed_transfer_and_cost_packing() -> None:
    total = parameter_count(config().model).total
    given = facts(
        100,
        {"communication.dp.transfer": 30, "communication.dp.wait": 9},
        *DP,
        launch=TWO,
        memory_bandwidth=1e10,
    )
    packing = 12 * total / 1e10 * 1e3
    to = "precision.grad_reduce_dtype=bf16"
    assert expected(NARROW_GRADIENTS, given, *DP, to).ratio == pytest.approx(100 / (100 - 15 + packing))
    wire = replace(given, communication=flights("dp", "all_reduce", wire=20, exposed=15))
    found = expected(NARROW_GRADIENTS, wire, *DP, to)
    assert found.high == pytest.approx(100 / (100 - 20 + packing)), "half of 40 ms under way"
    assert "bench memory" in why_none(NARROW_GRADIENTS, replace(given, memory_bandwidth=None), *DP, to)
    assert "exposed" in why_none(NARROW_GRADIENTS, facts(100, {}, *DP, memory_bandwidth=1e10), *DP, to)


def test_parameters_travel_under_the_first_forward_pass_layer_by_layer() -> None:
    seen = Observation(
        2,
        ranges={"drivetrain/forward": Count(4, 48 * MS), "drivetrain/gather/blocking": Count(2, 12 * MS)},
    )
    given = facts(100, {"communication.dp.transfer": 30}, *DP, launch=TWO, observed=seen, spare_cores=1)
    # 6 ms of gathering and 12 ms of the first pass in six pieces: 12 + 1 instead of 18.
    assert expected(PARAMETER_GATHER, given, *DP).ratio == pytest.approx(100 / 95)
    nothing = replace(seen, ranges={"drivetrain/forward": Count(4, 48 * MS)})
    assert "no wait" in why_none(PARAMETER_GATHER, replace(given, observed=nothing), *DP)


def test_gathers_of_forward_are_at_most_half_of_all() -> None:
    seen = Observation(1, ranges={"drivetrain/forward": Count(2, 24 * MS)})
    given = facts(
        100,
        {"communication.dp.transfer": 30},
        *DP,
        launch=TWO,
        observed=seen,
        communication=flights("dp_shard", "all_gather", wire=12, exposed=9),
        spare_cores=1,
    )
    # 24 ms under way, so 12 of forward: 12 and 24 ms in six pieces are 24 + 2 instead of 36.
    assert expected(PREFETCH, given, *DP, "overlap.prefetch_blocks=1").ratio == pytest.approx(100 / 90)
    assert "collectives" in why_none(PREFETCH, replace(given, communication=None), *DP)


TP = ("parallelism.tensor_model_parallel_size=2",)


def test_chunks_of_tensor_parallelism_leave_one_piece_of_the_shorter() -> None:
    parameters = parameter_count(config().model)
    blocks = parameters.block_matrices / (parameters.block_matrices + parameters.output_product)
    given = facts(
        100, {"communication.tp.transfer": 20, "compute.matmul": 60}, *TP, launch=TWO, spare_cores=1
    )
    products = 60 * blocks
    hidden = 20 + products - (max(20, products) + min(20, products) / 4)
    found = expected(CHUNKS, given, *TP, "overlap.tp_chunks=4")
    assert found.ratio == pytest.approx(100 / (100 - hidden))
    two = 20 + products - (max(20, products) + min(20, products) / 2)
    fused = expected(FUSED_CALLS, given, *TP, "parallelism.sequence_parallel=true")
    assert fused.ratio == pytest.approx(100 / (100 - two))
    gradients = expected(ASYNC_GRADIENTS, given, *TP)
    assert gradients.ratio == pytest.approx(100 / (100 - min(10, products / 3)))
    assert "exposed" in why_none(CHUNKS, facts(100, {"compute.matmul": 60}, *TP), *TP, "overlap.tp_chunks=4")
    cut = replace(given, config=config(*TP, "overlap.tp_chunks=2"))
    assert "further" in why_none(CHUNKS, cut, *TP, "overlap.tp_chunks=4")


# -- all of them --------------------------------------------------------------------------------------------------

CASES: Mapping[str, tuple[TimeModel, tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    # model, classes it may save from, overrides before, overrides after
    "builders": (BUILDERS, ("data.loader",), (), ("data.num_workers=2",)),
    "baked": (
        BAKED_TRANSFORM,
        ("data.loader",),
        ("data.transform=numpy.sort",),
        ("data.transform=numpy.sort",),
    ),
    "bf16": (
        SIXTEEN_BITS,
        (
            "compute.matmul",
            "compute.attention",
            "compute.norm",
            "compute.activation",
            "compute.elementwise",
        ),
        (),
        ("precision.params_dtype=bf16",),
    ),
    "compiled": (
        COMPILED,
        ("compute.norm", "compute.activation", "compute.elementwise", "compute.copy_cast"),
        (),
        ("fusion.compile=true",),
    ),
    "fused": (
        FUSED_OPERATORS,
        ("compute.norm", "compute.activation", "compute.elementwise", "compute.copy_cast"),
        (),
        ("fusion.level=all",),
    ),
    "update": (FUSED_UPDATE, ("compute.optimizer",), ("optimizer.fused=false",), ()),
    "save": (BACKGROUND_SAVE, ("maintenance.checkpoint",), (), ("checkpoint.async_save=true",)),
    "recompute": (REPEATED_FORWARD, (), (), ("memory.recompute_granularity=full",)),
    "passes": (
        FEWER_PASSES,
        ("host",),
        ("training.micro_batch_size=2",),
        ("training.micro_batch_size=4",),
    ),
    "buckets": (
        BUCKETS,
        ("communication",),
        (*DP, "overlap.bucket_size_mb=0"),
        (*DP, "overlap.bucket_size_mb=2"),
    ),
    "narrow": (NARROW_GRADIENTS, ("communication",), DP, (*DP, "precision.grad_reduce_dtype=bf16")),
    "gather": (PARAMETER_GATHER, ("communication",), DP, DP),
    "prefetch": (PREFETCH, ("communication",), DP, DP),
    "chunks": (CHUNKS, ("communication",), TP, (*TP, "overlap.tp_chunks=4")),
    "fused calls": (FUSED_CALLS, ("communication",), TP, TP),
    "async": (ASYNC_GRADIENTS, ("communication",), TP, TP),
}
LAUNCH = {
    name: TWO if before in (DP, TP) or DP[0] in before else LaunchFacts()
    for name, (_, _, before, _) in CASES.items()
}
CONFIGS = {name: (config(*before), config(*after)) for name, (_, _, before, after) in CASES.items()}
SEEN = Observation(
    2,
    ranges={
        "drivetrain/forward": Count(4, 30 * MS),
        "drivetrain/gather/blocking": Count(2, 8 * MS),
        "drivetrain/checkpoint": Count(2, 8 * MS),
    },
)


@st.composite
def full_facts(draw: st.DrawFn, name: str) -> TimeFacts:
    """Everything a model could ask for, of any size."""
    times = st.floats(0.01, 100.0)
    some = draw(st.lists(st.sampled_from(CLASSES), min_size=1, max_size=8, unique=True))
    classes = {one: draw(times) for one in some}
    window = sum(classes.values()) + draw(times)
    group, kind = draw(st.sampled_from([("dp", "all_reduce"), ("dp_shard", "all_gather")]))
    wire = draw(times)
    return TimeFacts(
        account=account_of(window, classes),
        config=CONFIGS[name][0],
        launch=LAUNCH[name],
        matmul_flops={"fp32": draw(st.floats(1e10, 1e14)), "bf16": draw(st.floats(1e10, 1e15))},
        memory_bandwidth=draw(st.one_of(st.none(), st.floats(1e9, 1e12))),
        observed=SEEN,
        traffic=(traffic(classes.get("compute.elementwise", 0.0) * MS, draw(st.floats(1e5, 1e10))),),
        communication=flights(
            group, kind, wire, draw(st.floats(0.0, wire)), backward=draw(times), fixed=0.01
        ),
        data_operations={"numpy.sort": draw(st.floats(1e-5, 1.0))},
        spare_cores=draw(st.one_of(st.none(), st.integers(0, 8))),
        threads=draw(st.integers(1, 8)),
    )


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_no_prediction_exceeds_the_time_of_what_it_treats(name: str, data: st.DataObject) -> None:
    model, treats, _, _ = CASES[name]
    given_facts = data.draw(full_facts(name))
    found = model.predict(given_facts, CONFIGS[name][1])
    if isinstance(found, NoPrediction):
        assert found.why
        return
    step = mean_step(given_facts.account)
    assert step is not None
    bound = step.window_ns / (step.window_ns - step.ns_of(treats))
    assert found.ratio <= bound * (1 + 1e-12)
    assert found.high is None or found.high <= bound * (1 + 1e-12)
    assert found.rule


@pytest.mark.parametrize("name", CASES)
def test_an_account_without_steps_predicts_nothing(name: str) -> None:
    empty = TimeFacts(Account(health=(), ranks=()), CONFIGS[name][0], LAUNCH[name])
    found = CASES[name][0].predict(empty, CONFIGS[name][1])
    assert isinstance(found, NoPrediction), found


@pytest.mark.parametrize("name", CASES)
def test_where_its_classes_take_no_time_nothing_is_predicted_but_a_cost(name: str) -> None:
    found = CASES[name][0].predict(
        TimeFacts(account_of(100, {"idle": 40}), CONFIGS[name][0], LAUNCH[name]), CONFIGS[name][1]
    )
    assert isinstance(found, NoPrediction) or found.ratio <= 1, found


@settings(max_examples=40, deadline=None)
@given(waited=st.floats(0.1, 90.0), workers=st.integers(1, 8))
def test_more_builders_are_never_expected_to_be_slower_where_cores_are_spare(
    waited: float, workers: int
) -> None:
    given_facts = facts(100, {"data.loader": waited}, spare_cores=16, threads=2)
    fewer = expected(BUILDERS, given_facts, f"data.num_workers={workers}")
    more = expected(BUILDERS, given_facts, f"data.num_workers={workers + 1}")
    assert more.ratio >= fewer.ratio >= 1


@settings(max_examples=40, deadline=None)
@given(first=st.floats(1e11, 1e13), faster=st.floats(1.0, 8.0))
def test_a_faster_16_bit_product_is_expected_to_gain_more(first: float, faster: float) -> None:
    classes = {"compute.matmul": 9e3, "compute.attention": 10.0}
    to = "precision.params_dtype=bf16"
    slow = expected(SIXTEEN_BITS, facts(1e4, classes, **rates(1e11, first)), to)
    fast = expected(SIXTEEN_BITS, facts(1e4, classes, **rates(1e11, first * faster)), to)
    assert fast.ratio >= slow.ratio
