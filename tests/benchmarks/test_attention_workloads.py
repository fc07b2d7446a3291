"""The two sides of attention's benchmark: the same work on both, and half the memory. No time is asserted."""

import statistics

import pytest
import torch

import operators
from harness import attention_workloads
from harness.attention_workloads import (
    attention_workloads as workloads,
)
from harness.attention_workloads import document_lengths, live_bytes, live_bytes_claim, packed_documents
from harness.claims import verdict


def test_lengths_fill_the_tokens_and_are_the_same_for_a_seed() -> None:
    for seed in attention_workloads.SEEDS:
        for tokens in attention_workloads.LENGTHS:
            lengths = document_lengths(tokens, seed)
            assert sum(lengths) == tokens
            assert min(lengths) >= 1
            assert lengths == document_lengths(tokens, seed)
    assert document_lengths(4096, 0) != document_lengths(4096, 1)


def test_lengths_have_the_mean_that_is_said() -> None:
    lengths = document_lengths(4_000_000, 7)
    assert abs(statistics.mean(lengths) / 512 - 1) < 0.03
    logs = [torch.tensor(float(length)).log().item() for length in lengths]
    assert abs(statistics.stdev(logs) - 0.5) < 0.02


def test_both_sides_compute_the_same_for_each_packing() -> None:
    sides = packed_documents(1500, heads=2, width=16)
    ours, theirs = sides.ours(), sides.theirs()
    assert len(ours) == len(theirs) == 4 * len(attention_workloads.SEEDS)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=0.05, atol=0.03)
    assert not torch.equal(ours[0], ours[4])
    assert torch.equal(ours[0], packed_documents(1500, heads=2, width=16).ours()[0])
    assert sides.target == 0.0


def test_a_side_that_lets_documents_see_each_other_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from drivetrain.engine.ops.attention import Documents

    operators.require_same_results(packed_documents(700, heads=1, width=16))
    monkeypatch.setattr(Documents, "of_lengths", classmethod(lambda cls, lengths: cls([0, sum(lengths)])))
    with pytest.raises(operators.DifferentResultsError):
        operators.require_same_results(packed_documents(700, heads=1, width=16))


def test_the_claim_is_made_for_4096_tokens_and_2048_are_reported() -> None:
    assert attention_workloads.LENGTHS == {4096: 3.5, 2048: 0.0}
    assert list(workloads()) == ["packed documents 4096", "packed documents 2048"]


def test_live_bytes_at_32768_tokens_are_at_most_half() -> None:
    ours, theirs = live_bytes(32768)
    assert ours <= theirs / 2
    # Inputs, output and gradients of both: nothing that grows with the square.
    assert ours < 20 * 32768 * 8 * 64 * 2
    assert theirs > 32768**2


def test_the_claim_on_memory_counts_each_packing() -> None:
    claim = live_bytes_claim(8192)
    assert claim.target == 2.0
    assert verdict(claim) == "won"
    assert claim.low >= 2.0
    assert claim.note.count(" against ") == len(attention_workloads.SEEDS)


def test_the_benchmark_of_operators_runs_these() -> None:
    assert set(workloads()) <= set(operators.WORKLOADS)


@pytest.mark.parametrize("side", [0, 1])
def test_the_count_without_memory_is_the_count_with_it(side: int) -> None:
    from drivetrain.engine.memory import LiveBytes

    without = live_bytes(900, heads=2, width=16)[side]
    call = attention_workloads._sides(900, 0, 2, 16, torch.device("cpu"), mask_inside=True)[side]
    with LiveBytes() as live:
        call()
    assert abs(live.peak_bytes - without) <= 0.02 * without
