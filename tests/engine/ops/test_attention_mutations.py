"""The numerics grid finds an attention that is wrong: each of these is a mistake that somebody made."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from drivetrain.engine.ops.attention import OPERATOR, Dropout, Mask, chunked, pattern
from drivetrain.engine.ops.attention.pattern import Pattern
from drivetrain.engine.ops.numerics import grade


def _problems(call: Callable[..., Any], name: str, dtype: torch.dtype = torch.float32) -> tuple[str, ...]:
    """What the grid says of ``call`` on the case of that name."""
    dense = OPERATOR.backend("dense")
    assert dense is not None
    (case,) = [case for case in OPERATOR.cases() if case.name == name]
    assert grade(OPERATOR, dense, case, dtype).passed
    return grade(OPERATOR, replace(dense, call=call), case, dtype).problems


def _with_mask(change: Callable[[Mask], Mask]) -> Callable[..., Any]:
    return lambda q, k, v, mask, scale: OPERATOR.reference(q=q, k=k, v=v, mask=change(mask), scale=scale)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("causal", lambda mask: Mask(causal=False)),
        ("window", lambda mask: replace(mask, window=mask.window + 1)),
        ("window", lambda mask: replace(mask, window=None)),
        ("prefix", lambda mask: replace(mask, prefix=mask.prefix - 1)),
        ("documents", lambda mask: replace(mask, documents=None)),
        ("alibi", lambda mask: replace(mask, slopes=-mask.slopes)),
        ("alibi", lambda mask: replace(mask, slopes=mask.slopes.flip(0))),
        ("soft-cap", lambda mask: replace(mask, softcap=None)),
        ("dropout, seeded", lambda mask: replace(mask, dropout=Dropout(0.17, seed=12))),
        ("cross lengths, top left", lambda mask: replace(mask, alignment="bottom_right")),
        ("cross lengths, bottom right", lambda mask: replace(mask, alignment="top_left")),
    ],
)
def test_another_mask_is_found_out(name: str, change: Callable[[Mask], Mask]) -> None:
    assert _problems(_with_mask(change), name)
    assert _problems(_with_mask(change), name, torch.bfloat16)


def test_another_scale_is_found_out() -> None:
    assert _problems(
        lambda q, k, v, mask, scale: OPERATOR.reference(q=q, k=k, v=v, mask=mask, scale=0.26), "causal"
    )


def test_heads_that_read_another_group_are_found_out() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None) -> Any:
        return OPERATOR.reference(q=q, k=k.flip(1), v=v.flip(1), mask=mask, scale=scale)

    assert _problems(call, "causal")


def test_keys_read_for_queries_are_found_out() -> None:
    """ColossalAI#6428."""

    def call(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None) -> Any:
        half = q.shape[2] // 2
        mixed = torch.cat([q[..., :half], k.repeat_interleave(2, dim=1)[..., half:]], dim=-1)
        return OPERATOR.reference(q=mixed, k=k, v=v, mask=mask, scale=scale)

    assert _problems(call, "causal")


def _chunked_problems(name: str) -> tuple[str, ...]:
    backend = OPERATOR.backend("chunked")
    assert backend is not None
    return _problems(backend.call, name)


def test_a_block_that_is_skipped_though_it_is_seen_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Pattern.keys
    monkeypatch.setattr(Pattern, "keys", lambda self, rows, keys: whole(self, rows, keys)[:-1] or range(0))
    assert _chunked_problems("causal")


def test_a_block_that_is_taken_for_wholly_seen_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not _chunked_problems("several blocks")
    monkeypatch.setattr(Pattern, "_all_seen", lambda self, rows, columns: columns.stop <= rows.stop)
    assert pattern.Pattern is Pattern
    assert _chunked_problems("several blocks")


def test_a_backward_pass_without_the_common_term_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    right = chunked.backward

    def wrong(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *rest: Any) -> Any:
        return right(gradient, q, k, v, torch.zeros_like(out), *rest)

    monkeypatch.setattr(chunked, "backward", wrong)
    problems = _chunked_problems("causal")
    assert any("gradient of q" in problem for problem in problems)
    assert any("gradient of k" in problem for problem in problems)
    assert not any("gradient of v" in problem for problem in problems)


def test_a_soft_cap_without_its_derivative_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    right = chunked._scores
    monkeypatch.setattr(chunked, "_scores", lambda *given: (right(*given)[0], None))
    assert _chunked_problems("soft-cap")


def test_dropout_that_backward_draws_anew_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    right = chunked.backward

    def wrong(*given: Any) -> Any:
        *tensors, spans, rule = given
        return right(*tensors, spans, rule._replace(seed=rule.seed + 1))

    monkeypatch.setattr(chunked, "backward", wrong)
    assert _chunked_problems("dropout, seeded")


def test_outputs_that_are_left_as_memory_was_found_are_found_out() -> None:
    """flash-attention#2324."""

    def call(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None) -> Any:
        out = OPERATOR.reference(q=q, k=k, v=v, mask=mask, scale=scale)
        assert isinstance(out, Tensor)
        left = torch.full_like(out, float("nan"))
        return torch.cat([out[:75], left[75:]])

    assert _problems(call, "a tail of no document")
