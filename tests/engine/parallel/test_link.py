"""The modelled link: sums are real, times are those of the formula, and order decides what hides."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from drivetrain.config.layout import Layout
from drivetrain.engine.parallel.data_parallel import gradient_sync
from drivetrain.engine.parallel.flat_collectives import all_gather_flat, reduce_scatter_flat
from drivetrain.engine.parallel.link import LinkModel, ModelledGroup, Schedule
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.process_group import Ranks, join
from drivetrain.engine.parallel.traffic import Traffic
from rank_processes import on_kept_ranks

# With two ranks an all-reduce of 1,000 bytes passes 1,000 bytes: one second.
LINK = LinkModel(bytes_per_s=1000.0)


def modelled(link: LinkModel = LINK) -> tuple[ModelledGroup, Schedule]:
    schedule = Schedule()
    assert dist.group.WORLD is not None
    return ModelledGroup(dist.group.WORLD, link, schedule, "dp"), schedule


def begin(group: ModelledGroup, seconds: float) -> dist.Work:
    """An all-reduce that takes ``seconds`` on the link of two ranks."""
    work = dist.all_reduce(torch.zeros(round(250 * seconds)), group=group, async_op=True)
    assert work is not None
    return work


def every_collective() -> dict[str, list[float]]:
    with join(Ranks.from_environment(), "cpu", 1.0) as ranks:
        group, schedule = modelled(LinkModel(1000.0, latency_s=0.5))
        rank = ranks.ranks.rank
        found: dict[str, list[float]] = {}

        def note(name: str, result: Tensor) -> None:
            found[name] = [*result.tolist(), schedule.now_s]

        summed = torch.full((250,), float(rank + 1))
        dist.all_reduce(summed, group=group)
        note("all_reduce", summed[:2])
        whole = torch.zeros(250)
        all_gather_flat(whole, torch.full((125,), float(rank)), group=group)
        note("all_gather", whole[[0, 125]])
        part = torch.zeros(125)
        reduce_scatter_flat(part, torch.arange(250.0), group=group)
        note("reduce_scatter", part[:2])
        changed = torch.zeros(250)
        dist.all_to_all_single(changed, torch.full((250,), float(rank)), group=group)
        note("all_to_all", changed[[0, 125]])
        found["wire"] = [schedule.wire_s]
        return found


def test_collectives_are_real_and_take_what_the_formula_says() -> None:
    first, second = on_kept_ranks(every_collective, 2)
    assert first["all_reduce"] == second["all_reduce"] == [3.0, 3.0, 1.5]
    assert first["all_gather"] == second["all_gather"] == [0.0, 1.0, 1.5 + 1.0]
    assert first["reduce_scatter"] == [0.0, 2.0, 2.5 + 1.0]
    assert second["reduce_scatter"] == [250.0, 252.0, 2.5 + 1.0]
    assert first["all_to_all"] == second["all_to_all"] == [0.0, 1.0, 3.5 + 1.0]
    assert first["wire"] == [4.5]


@pytest.mark.parametrize(
    ("kind", "ranks", "seconds"),
    [
        ("all_reduce", 2, 1.0),
        ("all_reduce", 4, 1.5),
        ("all_gather", 4, 0.75),
        ("reduce_scatter", 4, 0.75),
        ("all_to_all", 4, 0.75),
        ("broadcast", 4, 1.0),
    ],
)
def test_bytes_on_the_wire_are_those_of_the_ring(kind: str, ranks: int, seconds: float) -> None:
    assert LINK.seconds(kind, 1000, ranks) == seconds  # type: ignore[arg-type]


def late_rank() -> tuple[float, list[str]]:
    with join(Ranks.from_environment(), "cpu", 1.0) as ranks:
        group, schedule = modelled()
        schedule.compute("own work", 3.0 if ranks.ranks.rank else 0.0)
        begin(group, 1.0).wait()
        return schedule.exposed_s, schedule.order


def test_a_collective_begins_when_the_last_rank_hands_it_over() -> None:
    (early, order), (late, _) = on_kept_ranks(late_rank, 2)
    assert (early, late) == (4.0, 1.0)
    assert order == ["compute own work", "issue dp 0", "wait dp 0"]


def queue() -> list[float]:
    with join(Ranks.from_environment(), "cpu", 1.0):
        group, schedule = modelled()
        works = [begin(group, 1.0), begin(group, 2.0)]
        done = [work.is_completed() for work in works]
        # In another order than that of the link.
        works[1].wait()
        times = [schedule.now_s]
        works[0].wait()
        assert all(work.is_completed() for work in works)
        return [*times, schedule.now_s, float(any(done))]


def test_collectives_of_a_group_leave_the_link_in_their_order() -> None:
    assert on_kept_ranks(queue, 2) == [[3.0, 3.0, 0.0]] * 2


def chunks(count: int, pipelined: bool) -> tuple[float, float, list[str]]:
    """Four seconds of computation in ``count`` chunks, each followed by its share of two seconds of communication."""
    with join(Ranks.from_environment(), "cpu", 1.0):
        group, schedule = modelled()
        works = []
        for number in range(count):
            schedule.compute(f"chunk {number}", 4.0 / count)
            works.append(begin(group, 2.0 / count))
            if not pipelined:
                works[-1].wait()
        for work in works:
            work.wait()
        return schedule.now_s, schedule.exposed_s, schedule.order


@pytest.mark.parametrize("count", [1, 2, 4])
def test_what_is_handed_over_before_the_next_chunk_is_computed_hides_but_for_the_last(count: int) -> None:
    (end, exposed, order), _ = on_kept_ranks(chunks, 2, count, True)
    assert (end, exposed) == (4.0 + 2.0 / count, 2.0 / count)
    for number in range(count - 1):
        assert order.index(f"issue dp {number}") < order.index(f"compute chunk {number + 1}")
    assert order.index("wait dp 0") > order.index(f"compute chunk {count - 1}")


def test_what_is_waited_for_at_once_hides_nothing() -> None:
    (end, exposed, order), _ = on_kept_ranks(chunks, 2, 4, False)
    assert (end, exposed) == (6.0, 2.0)
    assert order.index("wait dp 0") < order.index("compute chunk 1")


LAYERS = 4


def backward(bucket_size_mb: float, zero_stage: int) -> tuple[list[str], float, float]:
    """The second step of four layers of 1,000 bytes, each a second of backward, over the engine's own buckets."""
    torch.manual_seed(0)
    with join(Ranks.from_environment(), "cpu", 1.0) as ranks:
        schedule = Schedule()
        mesh = Mesh.form(Layout(dp=2), ranks.ranks.rank)
        groups = {name: ModelledGroup(group, LINK, schedule, name) for name, group in mesh._groups.items()}
        mesh = dataclasses.replace(mesh, _groups=groups)
        module = nn.Sequential(
            *(
                nn.Linear(10, 25, bias=False) if i % 2 == 0 else nn.Linear(25, 10, bias=False)
                for i in range(LAYERS)
            )
        )
        sync = gradient_sync(module, mesh, Traffic(), zero_stage=zero_stage, bucket_size_mb=bucket_size_mb)
        for number, layer in enumerate(module):
            layer.register_full_backward_pre_hook(
                lambda *_, number=number: schedule.compute(f"backward {number}", 1.0)
            )
        optimizer = torch.optim.SGD([value for _, value in sync.updated()], lr=0.1)
        for _ in range(2):
            entries, start, exposed = len(schedule.entries), schedule.now_s, schedule.exposed_s
            with sync.micro_batch(last=True):
                module(torch.ones(3, 10, requires_grad=True)).sum().backward()
            sync.finish()
            order, taken = schedule.order[entries:], schedule.now_s - start
            exposed = schedule.exposed_s - exposed
            sync.step(optimizer)
        return [entry for entry in order if not entry.startswith("wait")], taken, exposed


def numbered(order: list[str]) -> list[str]:
    """Without the numbers of collectives, which go on from step to step."""
    return [entry.rsplit(" ", 1)[0] if entry.startswith("issue") else entry for entry in order]


def test_buckets_of_a_layer_each_leave_before_the_next_layer_is_computed() -> None:
    (order, taken, exposed), _ = on_kept_ranks(backward, 2, 0.001, 0)
    group = order[1].split()[1]
    assert numbered(order) == [
        word
        for number in reversed(range(LAYERS))
        for word in (f"compute backward {number}", f"issue {group}")
    ]
    # Each second of communication hides under the next second of backward, but for the last.
    assert (taken, exposed) == (LAYERS + 1.0, 1.0)


def test_a_single_bucket_leaves_when_backward_has_ended_and_hides_nothing() -> None:
    (order, taken, exposed), _ = on_kept_ranks(backward, 2, 0.0, 0)
    assert numbered(order)[:LAYERS] == [f"compute backward {number}" for number in reversed(range(LAYERS))]
    assert (taken, exposed) == (2.0 * LAYERS, 1.0 * LAYERS)
