"""The hash of a tensor's bits sees every bit and its place, and ranks that hold the same find what differs."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from drivetrain.engine.parallel.gradient_sync import Held
from drivetrain.engine.parallel.placement import Placement, Shard
from drivetrain.engine.weight_hash import Disagreement, ReplicaCheck, TensorHash

CHUNK = 1 << 16
AT_ONCE = 1 << 22
INTEGER = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float64: torch.int64}


def drawn(size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)


def hash_of(values: torch.Tensor) -> int:
    return int(TensorHash()(values))


def with_bit(values: torch.Tensor, place: int, bit: int) -> torch.Tensor:
    """A copy in which one bit of the element at ``place`` is another."""
    changed = values.clone()
    words = changed.view(-1).view(INTEGER[values.dtype])
    highest = bit == 8 * values.element_size() - 1
    words[place] ^= torch.iinfo(words.dtype).min if highest else 1 << bit
    return changed


@pytest.mark.parametrize("dtype", INTEGER)
def test_every_bit_of_an_element_counts(dtype: torch.dtype) -> None:
    values = drawn(70, dtype).view(7, 10)
    hashes = {hash_of(values)}
    bits = 8 * values.element_size()
    for place in (0, 33, 69):
        hashes |= {hash_of(with_bit(values, place, bit)) for bit in range(bits)}
    assert len(hashes) == 1 + 3 * bits


@pytest.mark.parametrize("place", [0, CHUNK - 1, CHUNK, 2 * CHUNK, AT_ONCE - 1, AT_ONCE, AT_ONCE + CHUNK + 4])
def test_every_place_counts_whatever_the_size(place: int) -> None:
    values = drawn(AT_ONCE + CHUNK + 5)
    assert hash_of(with_bit(values, place, 0)) != hash_of(values)


@pytest.mark.parametrize(("one", "other"), [(0, 1), (3, 3 + CHUNK), (0, AT_ONCE), (CHUNK, 2 * CHUNK)])
def test_values_that_change_places_change_the_hash(one: int, other: int) -> None:
    values = drawn(AT_ONCE + 10)
    swapped = values.clone()
    swapped[one], swapped[other] = values[other], values[one]
    assert hash_of(swapped) != hash_of(values)


def test_stretches_that_change_places_change_the_hash() -> None:
    values = drawn(3 * CHUNK)
    first, *rest = values.split(CHUNK)
    assert hash_of(torch.cat([*rest, first])) != hash_of(values)


def test_what_one_place_gains_and_another_loses_does_not_cancel() -> None:
    values = torch.arange(3 * CHUNK, dtype=torch.int32).view(torch.float32)
    for place in (1, 2, CHUNK, CHUNK + 1):
        words = values.clone().view(torch.int32)
        words[0] += 1
        words[place] -= 1
        assert hash_of(words.view(torch.float32)) != hash_of(values)


def test_bits_are_compared_and_not_numbers() -> None:
    assert hash_of(torch.tensor([0.0])) != hash_of(torch.tensor([-0.0]))
    nan = torch.tensor([float("nan"), 1.0])
    assert hash_of(nan) == hash_of(nan.clone())
    assert hash_of(nan) != hash_of(with_bit(nan, 0, 3))


def test_a_hash_does_not_depend_on_how_the_tensor_lies_or_on_what_was_hashed_before() -> None:
    values = drawn(6 * CHUNK).view(3, -1)
    turned = values.t().contiguous().t()
    assert not turned.is_contiguous()
    used = TensorHash()
    used(drawn(40 * CHUNK))
    used(drawn(3))
    assert int(used(turned)) == int(used(values)) == hash_of(values)


class Talk:
    """What ranks in threads tell each other."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=300)
        self.messages = [b""] * size

    def of(self, rank: int) -> "Rank":
        return Rank(self, rank)


class Rank:
    """The agreement of one of them."""

    def __init__(self, talk: Talk, rank: int) -> None:
        self.talk, self.rank, self.size = talk, rank, talk.size

    def gather(self, message: bytes) -> list[bytes]:
        self.talk.messages[self.rank] = message
        self.talk.barrier.wait()
        found = list(self.talk.messages)
        self.talk.barrier.wait()
        return found


Parameters = Mapping[str, Held]


def compared(
    steps: Sequence[Callable[[int], Parameters]], size: int
) -> list[tuple[ReplicaCheck, list[Disagreement]]]:
    """Each rank's check after it has compared what it holds at steps 0, 1, ...; with the last answer."""
    talk = Talk(size)

    def rank_main(rank: int) -> tuple[ReplicaCheck, list[Disagreement]]:
        check = ReplicaCheck(talk.of(rank))
        for step, parameters in enumerate(steps):
            answer = check.compare(step, parameters(rank))
        return check, answer

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank_main, range(size)))


def whole(values: torch.Tensor) -> Held:
    return Held(values, Placement(tuple(values.shape)))


def rows(values: torch.Tensor, first: int, count: int) -> Held:
    place = Placement(tuple(values.shape), (Shard("tp", 0, first, count),))
    return Held(values[place.slices()], place)


def test_equal_weights_agree_and_every_tensor_of_several_ranks_is_compared() -> None:
    held = {"a": whole(drawn(5)), "b": whole(drawn(7))}
    for check, differing in compared([lambda rank: held, lambda rank: held], 3):
        assert differing == []
        assert (check.checks, check.shared, check.agreed_at) == (2, 2, 1)


def test_one_bit_on_one_of_four_ranks_is_named_with_the_last_step_at_which_all_agreed() -> None:
    values, other = drawn(9), drawn(4)
    good = {"blocks.0.mlp.up.weight": whole(values), "final_norm.weight": whole(other)}
    bad = {**good, "blocks.0.mlp.up.weight": whole(with_bit(values, 8, 0))}
    steps = [lambda rank: good, lambda rank: good, lambda rank: bad if rank == 2 else good]
    expected = [Disagreement("blocks.0.mlp.up.weight", ((2,), (0, 1, 3)))]
    for check, differing in compared(steps, 4):
        assert differing == expected, "the same on every rank"
        assert check.agreed_at == 1
        assert check.in_words(2, differing) == (
            "weights that must be equal on several ranks are not after step 2: blocks.0.mlp.up.weight on rank 2 "
            "differs from that on ranks 0, 1 and 3; after step 1 all of them still agreed (2 tensors compared)"
        )


def test_the_first_comparison_says_that_it_is_the_first() -> None:
    values = drawn(9)
    ((check, differing), _) = compared([lambda rank: {"a": whole(with_bit(values, rank, 5))}], 2)
    assert check.agreed_at is None
    assert "a on rank 0 differs from that on rank 1; it was the first comparison" in check.in_words(
        0, differing
    )


def test_other_regions_of_one_parameter_are_not_compared_and_equal_ones_are() -> None:
    values = drawn(24).view(12, 2)

    def parts(rank: int) -> Parameters:
        # Ranks 0 and 1 share the first rows, ranks 2 and 3 the last ones; a part without rows is nobody's.
        held = rows(values, 6 * (rank // 2), 6)
        if rank == 3:
            held = Held(with_bit(held.tensor, 0, 1), held.placement)
        return {"key": held, "empty": rows(drawn(rank + 2), 1, 0)}

    for check, differing in compared([parts], 4):
        assert check.shared == 2
        assert differing == [Disagreement("key[6:12, :]", ((2,), (3,)))], "also on ranks that do not hold it"


def test_a_parameter_under_another_name_or_dtype_is_another_one() -> None:
    values = drawn(8)
    for one, other in (
        ({"a": whole(values)}, {"b": whole(2 * values)}),
        ({"a": whole(values)}, {"a": whole(values.double())}),
    ):
        for check, differing in compared([lambda rank, one=one, other=other: other if rank else one], 2):
            assert (check.shared, differing) == (0, [])


def test_many_differences_are_counted_and_the_first_are_named() -> None:
    held = {f"p{number}": drawn(3 + number) for number in range(5)}

    def moved(rank: int) -> Parameters:
        return {name: whole(with_bit(values, 1, 30) if rank else values) for name, values in held.items()}

    check, differing = compared([moved], 2)[1]
    words = check.in_words(0, differing)
    assert len(differing) == 5
    assert all(f"p{number} on rank 0" in words for number in range(3))
    assert "and 2 more tensors" in words
    assert "p3" not in words
