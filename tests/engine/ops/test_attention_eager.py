"""The SDPA backend: how many calls, which kernel, what is made of the size of the scores, and ALiBi's columns."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain.engine.ops.attention import CAUSAL, FULL, Documents, Dropout, Mask, bias_columns, dense, eager
from drivetrain.engine.ops.attention.cases import alibi_slopes


class _Operators(TorchDispatchMode):
    """Names of the operators that ran, and the largest tensor that any made."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[func.overloadpacket.__name__] += 1
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple) else (result,):
            if isinstance(one, Tensor):
                self.largest = max(self.largest, one.untyped_storage().nbytes())
        return result


FLASH = "_scaled_dot_product_flash_attention_for_cpu"


def _drawn(tokens: int, dtype: torch.dtype = torch.float32, heads: int = 4, groups: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(tokens, heads, 16), (tokens, groups, 16), (tokens, groups, 16)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize(
    ("lengths", "calls"), [((50,) * 6, 1), ((50, 50, 100, 50, 50), 3), ((300,), 1), ((100, 0, 200), 2)]
)
def test_a_run_of_equally_long_documents_is_one_call(lengths: tuple[int, ...], calls: int) -> None:
    with _Operators() as seen:
        eager.attention(*_drawn(300), Mask(documents=Documents.of_lengths(lengths)))
    assert seen.names[FLASH] == calls


@pytest.mark.parametrize(
    "mask",
    [CAUSAL, FULL, Mask(window=600), Mask(documents=Documents.of_lengths([300, 300])), Mask(prefix=1)],
    ids=str,
)
def test_nothing_as_large_as_the_scores_is_made_where_sdpa_says_the_mask_itself(mask: Mask) -> None:
    given = _drawn(600)
    with _Operators() as seen:
        eager.attention(*given, mask)
    assert seen.names[FLASH] >= 1
    assert seen.largest == given[0].numel() * 4


def test_a_mask_that_sdpa_cannot_say_is_made_for_a_document_not_for_all_tokens() -> None:
    given = _drawn(600)
    with _Operators() as seen:
        eager.attention(*given, Mask(window=20, documents=Documents.of_lengths([60] * 10)))
    assert seen.largest <= given[0].numel() * 4
    assert seen.names[FLASH] == 1


def test_a_window_makes_nothing_larger_than_window_times_document() -> None:
    given = _drawn(2048)
    with _Operators() as seen:
        eager.attention(*given, Mask(window=64))
    assert seen.names[FLASH] == 2048 // eager.LEAST_QUERIES
    assert seen.largest <= eager.LEAST_QUERIES * (eager.LEAST_QUERIES + 64) * 8, "distances of a block"
    assert seen.largest < 2048 * 2048 / 4


def test_dropout_takes_another_kernel_as_its_docstring_says() -> None:
    with _Operators() as seen:
        eager.attention(*_drawn(60), Mask(dropout=Dropout(0.1)))
    assert seen.names[FLASH] == 0


def test_dropout_keeps_the_mean_and_drops_the_stated_share() -> None:
    torch.manual_seed(0)
    q, k, _ = _drawn(64)
    ones = torch.ones_like(k)
    out = torch.stack(
        [eager.attention(q, k, ones, Mask(causal=False, dropout=Dropout(0.25))) for _ in range(200)]
    )
    assert abs(out.mean().item() - 1.0) < 0.01
    assert out.std().item() > 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("heads", [4, 7])
def test_alibi_in_low_dtypes_is_columns_and_as_exact_as_the_bias(dtype: torch.dtype, heads: int) -> None:
    given = _drawn(700, dtype, heads=heads, groups=heads)
    mask = Mask(slopes=alibi_slopes(heads), documents=Documents.of_lengths([350, 350]))
    exact = dense.attention(*(one.double() for one in given), mask)
    with _Operators() as seen:
        by_columns = eager.attention(*given, mask)
    assert seen.largest < 350 * 350 * heads * 4, "no bias of the size of the scores"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eager, "MOST_KEYS", 0)
        by_bias = eager.attention(*given, mask)
    error_of_columns, error_of_bias = (
        (one.double() - exact).square().mean().sqrt() for one in (by_columns, by_bias)
    )
    assert not torch.equal(by_columns, by_bias)
    assert error_of_columns <= 1.5 * error_of_bias


def test_in_fp32_alibi_is_a_bias_since_columns_would_lose_digits() -> None:
    given = _drawn(2000, heads=4, groups=4)
    mask = Mask(slopes=alibi_slopes(4))
    exact = dense.attention(*(one.double() for one in given), mask)
    out = eager.attention(*given, mask)
    q, k, v = (one.transpose(0, 1)[None] for one in given)
    columns = bias_columns.with_bias_columns(q, k, v, alibi_slopes(4), 0.25)
    columned = torch.nn.functional.scaled_dot_product_attention(*columns, is_causal=True, scale=0.25)
    columned = columned[0, ..., :16].transpose(0, 1)
    assert (out.double() - exact).abs().max() < 0.2 * (columned.double() - exact).abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_columns_of_keys_and_slopes_are_the_fp32_products(dtype: torch.dtype) -> None:
    slopes, keys = alibi_slopes(7), bias_columns.MOST_KEYS
    q, k = torch.zeros(1, 7, 1, 8, dtype=dtype), torch.zeros(1, 7, keys, 8, dtype=dtype)
    q, k, v = bias_columns.with_bias_columns(q, k, k, slopes, 0.25)
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    assert q.shape[-1] % 8 == 0
    products = (q.double() @ k.double().transpose(2, 3))[0, :, 0] * 0.25
    expected = slopes.double()[:, None] * torch.arange(keys)
    torch.testing.assert_close(products, expected, rtol=2**-21, atol=0.0)
