"""A call travels to another process as JSON, and is made there as it was."""

import json
from dataclasses import replace

import pytest
import torch
from tuning_examples import norm_call

from drivetrain.engine.ops._tuned_key import TOKEN_ARGUMENTS, key_of, token_count
from drivetrain.engine.ops.attention.cases import KINDS
from drivetrain.engine.ops.attention.mask import Documents, Dropout, Mask
from drivetrain.engine.ops.discovery import operator_named
from drivetrain.engine.ops.signature import Argument, Signature, signature_of
from drivetrain.engine.ops_tuning.described import described, signature_from, undescribable
from drivetrain.engine.ops_tuning.inputs import drawn_arguments, graded_size, main_dtype, with_tokens


def signatures(operator: str) -> list[Signature]:
    """Of the operator's numerics grid, those with rows."""
    found = []
    for case in operator_named(operator).cases():
        generator = torch.Generator().manual_seed(0)
        signature = signature_of(operator, case.make(case.dtypes[0], generator))
        if token_count(signature) > 0 and undescribable(signature) is None:
            found.append(signature)
    return found


def attention(mask: Mask, tokens: int) -> Signature:
    q = Argument((tokens, 4, 8), torch.float32, True, True)
    return Signature("attention", "cpu", (("q", q), ("k", q), ("v", q)), (("mask", mask),))


@pytest.mark.parametrize("operator", TOKEN_ARGUMENTS)
def test_each_call_of_the_numerics_grids_is_read_back_as_it_was(operator: str) -> None:
    for signature in signatures(operator):
        document = json.loads(json.dumps(described(signature)))
        again = signature_from(document)
        assert again == signature
        assert described(again) == described(signature)
        assert key_of(again) == key_of(signature)


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_is_read_back_with_its_values(kind: str) -> None:
    mask = KINDS[kind]
    documents = mask.documents
    tokens = 100 if documents is None else documents.borders_q[-1]
    signature = attention(mask, tokens)
    if kind == "dropout":
        assert "draws from torch's generator" in (undescribable(signature) or "")
        return
    again = signature_from(json.loads(json.dumps(described(signature)))).option("mask")
    assert isinstance(again, Mask)
    assert again.kinds == mask.kinds
    assert again.prefix == (mask.prefix if not isinstance(mask.prefix, tuple) else list(mask.prefix))
    assert again.dropout == mask.dropout
    if documents is not None:
        assert again.documents is not None
        assert again.documents.borders_q == documents.borders_q
        assert again.documents.borders_k == documents.borders_k
    if mask.slopes is not None:
        assert again.slopes is not None
        assert torch.equal(again.slopes, mask.slopes)


@pytest.mark.parametrize("operator", TOKEN_ARGUMENTS)
def test_arguments_are_drawn_as_the_call_had_them(operator: str) -> None:
    for signature in signatures(operator):
        given = drawn_arguments(signature, torch.Generator().manual_seed(0))
        found = signature_of(operator, given)
        for (name, wanted), (_, drawn) in zip(signature.arguments, found.arguments, strict=True):
            assert (drawn.shape, drawn.dtype, drawn.requires_grad) == (
                wanted.shape,
                wanted.dtype,
                wanted.requires_grad,
            ), name
            # Where there is one row, a gap behind it is none.
            if len(wanted.shape) > 1 and wanted.shape[0] > 1 and min(wanted.shape[1:]) > 0:
                assert drawn.contiguous == wanted.contiguous, f"{name} of {signature}"
        outputs = operator_named(operator).reference(**given)
        for one in outputs if isinstance(outputs, tuple) else (outputs,):
            assert bool(one.isfinite().all())


@pytest.mark.parametrize("operator", TOKEN_ARGUMENTS)
def test_a_call_with_a_token_less_is_the_same_call(operator: str) -> None:
    for signature in signatures(operator):
        size = graded_size(signature)
        if size < 2:
            continue
        shorter = with_tokens(signature, size - 1)
        assert token_count(shorter) == size - 1
        operator_named(operator).reference(**drawn_arguments(shorter, torch.Generator().manual_seed(0)))
        if operator != "attention":  # there the last document may become another
            assert key_of(shorter).call == key_of(with_tokens(signature, size)).call


def test_documents_are_cut_where_the_tokens_end() -> None:
    signature = attention(Mask(documents=Documents.of_lengths([10, 10, 4])), 24)
    mask = with_tokens(signature, 15).option("mask")
    assert isinstance(mask, Mask)
    assert mask.documents is not None
    assert mask.documents.borders_q == [0, 10, 15]


def test_calls_that_are_too_large_for_float64_are_graded_on_fewer_tokens() -> None:
    assert graded_size(norm_call(1000, 16)) == 1000
    assert graded_size(norm_call(1000, 16), most=8000) == 500
    whole = attention(Mask(documents=Documents.of_lengths([64])), 64)
    packed = attention(Mask(documents=Documents.of_lengths([8] * 8)), 64)
    assert graded_size(whole, most=64 * 64) == 32
    assert graded_size(packed, most=64 * 64) == 64
    hidden, weight, labels = (
        Argument((64, 8), torch.float32, True, True),
        Argument((1000, 8), torch.float32, True, True),
        Argument((64,), torch.int64, True, False),
    )
    loss = Signature(
        "linear_cross_entropy", "cpu", (("hidden", hidden), ("weight", weight), ("labels", labels)), ()
    )
    assert graded_size(loss, most=32_000) == 32


def test_the_main_dtype_is_that_of_the_activations() -> None:
    signature = norm_call(dtype=torch.bfloat16)
    assert main_dtype(signature) == torch.bfloat16


@pytest.mark.parametrize(
    ("signature", "said"),
    [
        (replace(norm_call(), options=(("epsilon", ("a", "tuple")),)), "its option epsilon is a tuple"),
        (attention(Mask(dropout=Dropout(0.1)), 8), "no two backends drop the same"),
        (replace(norm_call(), arguments=(("x[0]", norm_call().arguments[0][1]),)), "lists of tensors"),
    ],
)
def test_what_cannot_be_made_again_is_said(signature: Signature, said: str) -> None:
    assert said in (undescribable(signature) or "")
