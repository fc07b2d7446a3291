"""Under which name a call is found: what may differ, and what may not."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tuning_examples import norm_call

from drivetrain.engine.ops._tuned_key import TOKEN_ARGUMENTS, Key, key_of, token_count
from drivetrain.engine.ops.attention.mask import Documents, Mask
from drivetrain.engine.ops.discovery import operators
from drivetrain.engine.ops.operator import Operator
from drivetrain.engine.ops.signature import Argument, Signature, signature_of

WITHOUT_TOKENS = {"adamw", "gradient_clip"}
"""Operators over parameters."""


def attention(mask: Mask, heads: int = 4, groups: int = 2, tokens: int = 20) -> Signature:
    q = Argument((tokens, heads, 8), torch.bfloat16, True, True)
    k = Argument((tokens, groups, 8), torch.bfloat16, True, True)
    return Signature("attention", "cpu", (("q", q), ("k", k), ("v", k)), (("mask", mask),))


@pytest.mark.parametrize("operator", operators(), ids=lambda one: one.name)
def test_of_each_operator_it_is_known_which_sizes_count_tokens(operator: Operator) -> None:
    assert (operator.name in TOKEN_ARGUMENTS) != (operator.name in WITHOUT_TOKENS)
    case = next(iter(operator.cases()))
    signature = signature_of(operator.name, case.make(torch.float32, torch.Generator().manual_seed(0)))
    names = {name for name, _ in signature.arguments}
    first = next(iter(TOKEN_ARGUMENTS.get(operator.name, {})), None)
    assert first is None or first in names
    assert (token_count(signature) > 0) == (operator.name in TOKEN_ARGUMENTS)


def test_two_calls_that_differ_in_tokens_alone_have_one_name() -> None:
    one, other = key_of(norm_call(24)), key_of(norm_call(4096))
    assert one.call == other.call
    assert (one.tokens, other.tokens) == (24, 4096)


@pytest.mark.parametrize(
    "changed",
    [
        norm_call(width=17),
        norm_call(dtype=torch.bfloat16),
        norm_call(contiguous=False),
        norm_call(requires_grad=False),
        replace(norm_call(), device="cuda"),
        replace(norm_call(), options=(("epsilon", 1e-6),)),
        replace(norm_call(), operator="layer_norm"),
    ],
    ids=str,
)
def test_whatever_changes_what_is_fastest_changes_the_name(changed: Signature) -> None:
    assert key_of(changed).call != key_of(norm_call()).call


def test_deterministic_mode_is_part_of_the_name() -> None:
    assert key_of(norm_call(), deterministic=True).call != key_of(norm_call(), deterministic=False).call
    torch.use_deterministic_algorithms(True)
    assert key_of(norm_call()) == key_of(norm_call(), deterministic=True)


def test_masks_are_told_apart_by_kind_and_whole_sequences_from_packed_ones() -> None:
    def packed(lengths: list[int], **changes: Any) -> str:
        return key_of(attention(Mask(documents=Documents.of_lengths(lengths), **changes))).call

    # What a configuration of short sequences found says nothing of one of long ones.
    assert packed([10, 10]) == packed([10, 10, 10])
    assert packed([10, 10]) != packed([5, 5, 5, 5])
    assert packed([3, 17]) == packed([12, 1, 7])
    different = {
        packed([10, 10]),
        packed([3, 17]),
        packed([3, 17], window=4),
        packed([3, 17], softcap=2.0),
        key_of(attention(Mask())).call,
        key_of(attention(Mask(causal=False))).call,
        key_of(attention(Mask(), groups=4)).call,
    }
    assert len(different) == 7


def test_a_selection_that_remembers_choices_keeps_both_kinds_of_packing_apart() -> None:
    whole, packed = (attention(Mask(documents=Documents.of_lengths(one))) for one in ([10, 10], [3, 17]))
    assert whole != packed
    assert attention(Mask(documents=Documents.of_lengths([4, 16]))) == packed


@pytest.mark.parametrize(
    ("tokens", "bucket"),
    [
        (0, (0, 0)),
        (1, (1, 1)),
        (2, (2, 2)),
        (3, (3, 4)),
        (4, (3, 4)),
        (5, (5, 8)),
        (4095, (2049, 4096)),
        (4096, (2049, 4096)),
        (4097, (4097, 8192)),
    ],
)
def test_buckets_end_at_powers_of_two(tokens: int, bucket: tuple[int, int]) -> None:
    assert Key("any", tokens).bucket == bucket


def test_rows_of_heads_count_as_tokens_of_a_norm_and_not_of_a_rotation() -> None:
    x = Argument((20, 4, 8), torch.float32, True, True)
    angles = Argument((20, 4), torch.float32, True, False)
    weight = Argument((8,), torch.float32, True, True)
    norm = Signature("rms_norm", "cpu", (("x", x), ("weight", weight)), ())
    turned = Signature("rotary", "cpu", (("x", x), ("cosine", angles), ("sine", angles)), ())
    assert key_of(norm).tokens == 80
    assert key_of(turned).tokens == 20
    assert "cosine float32[tokens, 4]" in key_of(turned).call
