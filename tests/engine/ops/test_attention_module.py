"""The module: usable alone, in any layout of batch, and its example runs."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from drivetrain.engine.ops.attention import CAUSAL, FULL, Documents, Mask
from drivetrain.engine.ops.attention import docs as attention_docs
from drivetrain.engine.ops.modules_attention import Attention
from drivetrain.engine.ops.selection import Selection
from drivetrain.errors import DrivetrainError

ROOT = Path(__file__).resolve().parents[3]


def _module(**options: object) -> Attention:
    torch.manual_seed(0)
    return Attention(32, 4, num_query_groups=2, **options)  # type: ignore[arg-type]


def test_the_page_is_fresh() -> None:
    written = (ROOT / attention_docs.PATH).read_text(encoding="utf-8")
    assert written == attention_docs.render(), "run: python -m drivetrain.engine.ops.attention.docs"


def test_the_example_of_the_page_runs() -> None:
    code = re.search(r"```python\n(.*?)```", attention_docs.render(), re.S)
    assert code is not None
    names: dict[str, object] = {}
    exec(compile(code[1], "docs/ops-attention.md", "exec"), names)
    out = names["out"]
    assert isinstance(out, Tensor)
    assert out.shape == (100, 64)
    assert out.isfinite().all()


def test_it_is_torchs_multi_head_attention() -> None:
    module = Attention(32, 4, bias=True)
    theirs = torch.nn.MultiheadAttention(32, 4, batch_first=True)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(
            torch.cat([one.weight for one in (module.query, module.key, module.value)])
        )
        theirs.in_proj_bias.copy_(torch.cat([one.bias for one in (module.query, module.key, module.value)]))
        theirs.out_proj.weight.copy_(module.output.weight)
        theirs.out_proj.bias.copy_(module.output.bias)
    x = torch.randn(2, 9, 32)
    torch.testing.assert_close(module(x, FULL), theirs(x, x, x)[0], rtol=1e-5, atol=1e-6)
    later = torch.ones(9, 9, dtype=torch.bool).triu(1)
    torch.testing.assert_close(module(x), theirs(x, x, x, attn_mask=later)[0], rtol=1e-5, atol=1e-6)


def test_rows_of_a_batch_are_documents_of_their_own() -> None:
    module, x = _module(), torch.randn(3, 8, 32)
    whole = module(x)
    for row in range(3):
        torch.testing.assert_close(whole[row], module(x[row]), rtol=1e-5, atol=1e-6)


def test_documents_within_rows_are_those_that_are_given() -> None:
    module, x = _module(), torch.randn(2, 8, 32)
    out = module(x, Mask(documents=Documents([0, 3, 8, 14, 16])))
    torch.testing.assert_close(out[0, 3:], module(x[0, 3:]), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out[1, :6], module(x[1, :6]), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(out[0, 3:], module(x)[0, 3:], atol=1e-4)


def test_a_document_that_crosses_rows_is_refused() -> None:
    with pytest.raises(DrivetrainError, match="crosses from row 0 of the batch into row 1; end it at 8"):
        _module()(torch.randn(2, 8, 32), Mask(documents=Documents([0, 3, 11, 16])))


def test_documents_that_end_early_leave_the_last_rows_to_none() -> None:
    out = _module()(torch.randn(2, 8, 32), Mask(documents=Documents([0, 8, 10])))
    assert torch.equal(out[1, 2:], torch.zeros(6, 32))


def test_rotary_gets_queries_and_keys_with_positions_that_start_anew_in_each_document() -> None:
    seen: list[tuple[tuple[int, ...], list[int]]] = []

    def rotary(x: Tensor, positions: Tensor) -> Tensor:
        seen.append((tuple(x.shape), positions.tolist()))
        return x * (1 + positions[:, None, None])

    module, x = _module(rotary=rotary), torch.randn(2, 4, 32)
    module(x, Mask(documents=Documents([0, 3, 4, 6])))
    assert seen == [((8, 4, 8), [0, 1, 2, 0, 0, 1, 0, 0]), ((8, 2, 8), [0, 1, 2, 0, 0, 1, 0, 0])]
    turned = module(x)
    assert seen[2][1] == [0, 1, 2, 3] * 2
    assert not torch.allclose(turned, _module()(x), atol=1e-4)
    module(x, positions=torch.arange(8).view(2, 4) + 5)
    assert seen[4][1] == list(range(5, 13))


def test_the_selection_decides_who_computes_and_counts() -> None:
    selection = Selection({"attention": "chunked"})
    module, x = _module(selection=selection), torch.randn(2, 8, 32)
    torch.testing.assert_close(module(x, CAUSAL), _module()(x), rtol=1e-5, atol=1e-6)
    assert selection.served == {("attention", "chunked"): 1}


def test_every_parameter_gets_a_gradient() -> None:
    module = _module(bias=True)
    module(torch.randn(2, 8, 32)).square().sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        # A constant added to all keys is one that the softmax does not see.
        assert name == "key.bias" or (parameter.grad != 0).any(), name


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"hidden_size": 30, "num_attention_heads": 4}, "give head_size"),
        ({"hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 3}, "no multiple of 3 groups"),
        ({"hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 0}, "no multiple of 0 groups"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options: dict[str, int], says: str) -> None:
    with pytest.raises(DrivetrainError, match=says):
        Attention(**options)  # type: ignore[arg-type]


def test_a_width_of_heads_may_be_given() -> None:
    assert Attention(30, 4, head_size=8)(torch.randn(5, 30)).shape == (5, 30)
