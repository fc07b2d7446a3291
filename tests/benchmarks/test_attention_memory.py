"""The benchmark of attention's memory: both sides compute the same, and counts are those of real tensors."""

import json

import pytest
import torch

import attention_memory
from attention_memory import counted_claims
from harness.attention_layer import DTYPES, MASKS, ONE_MASK, Counted, Refused, Shape, counted, step_of
from harness.claims import verdict

SMALL = Shape(tokens=900, heads=4, groups=2, width=16)


def results(backend, kind, dtype="float32"):
    step = step_of(backend, kind, dtype, SMALL)
    out = step.forward()
    return [out, *step.backward(out)]


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("backend", ["eager", "chunked", "dense"])
def test_both_sides_compute_the_same(backend, kind):
    for ours, theirs in zip(results(backend, kind), results(ONE_MASK, kind), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


def test_documents_are_no_causal_mask():
    assert not torch.allclose(results("eager", "documents")[0], results("eager", "causal")[0], atol=1e-3)


@pytest.mark.parametrize("backend", ["eager", ONE_MASK])
def test_the_count_without_memory_is_the_count_with_it(backend):
    from drivetrain.engine.memory import LiveBytes

    without = counted(backend, "documents", "bfloat16", SMALL)
    step = step_of(backend, "documents", "bfloat16", SMALL)
    with LiveBytes() as live:
        step.backward(step.forward())
    assert abs(live.peak_bytes - without.peak) <= 0.02 * without.peak


def test_at_8192_tokens_already_live_bytes_and_what_is_kept_are_at_most_half():
    for kind in MASKS:
        theirs, ours = (counted(one, kind, "bfloat16", Shape(tokens=8192)) for one in (ONE_MASK, "eager"))
        assert isinstance(ours, Counted)
        assert 2 * ours.peak <= theirs.peak
        assert 2 * ours.kept <= theirs.kept
        assert theirs.kept > 2 * 8192**2, "the mask in the dtype of the scores"


def test_a_backend_that_does_not_serve_makes_no_claim_and_is_named(capsys):
    claims = counted_claims(DTYPES[1:], ["products", "dense"], SMALL)
    assert {verdict(claim) for claim in claims} == {"information"}
    assert "products does not serve: float32 is not among" in capsys.readouterr().err
    refused = counted("flex", "causal", "float32", SMALL)
    assert isinstance(refused, Refused)
    assert "no backward pass" in refused.why


def test_a_process_of_its_own_reports_its_growth(capsys):
    found = attention_memory.measure("causal", "dense", Shape(tokens=2048, heads=1, groups=1))
    # Scores and weights of 2,048 x 2,048 in fp32.
    assert found["bytes"] > 2 * 4 * 2048**2
    attention_memory.main(["--measure", "causal", "flex", "256"])
    assert "no backward pass" in json.loads(capsys.readouterr().out)["refused"]
