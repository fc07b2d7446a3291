"""The two sides of the benchmark of a Llama layer: the same work on both. No time is asserted."""

import pytest
import torch

import operators
from harness import layer_workloads
from harness.layer_workloads import TARGETS, LayerSizes, Peer, llama_layer

SMALL = LayerSizes(tokens=48, heads=4, width=16, between=96)


@pytest.mark.parametrize("peer", list(TARGETS))
def test_the_block_and_a_plain_layer_compute_the_same_with_the_same_weights(peer: Peer) -> None:
    # Compiled code takes seconds, and its numerics are tested elsewhere.
    sides = llama_layer(peer, SMALL, fused="eager")
    operators.require_same_results(sides)
    ours, theirs = sides.ours(), sides.theirs()
    # The output, and the gradients of the input, two norms and seven matrices.
    assert len(ours) == len(theirs) == 1 + 1 + 2 + 7
    assert [(one.shape, one.dtype) for one in ours] == [(one.shape, one.dtype) for one in theirs]
    assert {one.dtype for one in ours} == {torch.bfloat16}
    assert all(bool(one.isfinite().all()) and bool(one.any()) for one in (*ours, *theirs))


@pytest.mark.parametrize("change", ["later tokens are seen", "no residual", "another rotation"])
def test_a_plain_layer_that_is_another_is_found_out(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = layer_workloads._PlainLayer
    if change == "later tokens are seen":
        monkeypatch.setattr(
            plain, "_attend", lambda self, q, k, v: (q @ k.transpose(1, 2) / 4).softmax(-1) @ v
        )
    elif change == "no residual":
        whole = plain.__call__
        monkeypatch.setattr(plain, "__call__", lambda self, x: whole(self, x) - x)
    else:
        monkeypatch.setattr(plain, "_turned", lambda self, x: x)
    with pytest.raises(operators.DifferentResultsError):
        operators.require_same_results(llama_layer("naive", SMALL, fused="eager"))


def test_our_side_computes_by_operators_with_the_transposed_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    from drivetrain.engine.ops.selection import Selection

    made: list[Selection] = []
    post = Selection.__init__

    def kept(self: Selection, **given: object) -> None:
        post(self, **given)  # type: ignore[arg-type]
        made.append(self)

    monkeypatch.setattr(Selection, "__init__", kept)
    sides = llama_layer("sdpa", SMALL, fused="eager")
    sides.ours()
    (selection,) = made
    assert selection.served == {
        ("rms_norm", "eager"): 1,
        ("add_rms_norm", "eager"): 1,
        ("rotary", "eager"): 2,
        ("glu", "eager"): 1,
        ("attention", "eager"): 1,
        ("linear", "transposed_gradient"): 7,
    }
    sides.theirs()
    assert sum(selection.served.values()) == 13, "the peer's side calls none of ours"


def test_the_claims_on_a_layer_are_those_that_were_promised() -> None:
    assert TARGETS == {"sdpa": 1.25, "naive": 1.75}
    assert LayerSizes() == LayerSizes(tokens=2048, heads=16, width=128, between=5632)
    assert {"llama_layer sdpa", "llama_layer naive"} <= set(operators.WORKLOADS)
    assert llama_layer("naive", SMALL, fused="eager").target == 0.0, "a small one is no claim"
