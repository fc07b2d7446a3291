"""A mask that a backend cannot serve is refused, with those that can; an option is never ignored in silence."""

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from drivetrain.engine.ops.attention import CAUSAL, OPERATOR, Documents, Dropout, Mask
from drivetrain.engine.ops.attention.cases import KINDS
from drivetrain.engine.ops.attention.docs import RULES, crosses_of
from drivetrain.engine.ops.selection import Selection
from drivetrain.engine.ops.signature import Argument, Signature, signature_of
from drivetrain.errors import DrivetrainError


def _given(mask: Mask, dtype: torch.dtype = torch.float32, width: int = 16) -> dict[str, object]:
    queries = keys = 20
    if mask.documents is not None:
        queries, keys = int(mask.documents.cu_seqlens_q[-1]), int(mask.documents.cu_seqlens_k[-1])
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (queries, 4, width), "k": (keys, 2, width), "v": (keys, 2, width)}
    drawn = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    return {**drawn, "mask": mask}


def _on(device: str, mask: Mask, dtype: torch.dtype, width: int = 64, wants_grad: bool = True) -> Signature:
    """A signature as a call on that device would have it."""
    queries = keys = 20
    if mask.documents is not None:
        queries, keys = int(mask.documents.cu_seqlens_q[-1]), int(mask.documents.cu_seqlens_k[-1])
    shapes = {"q": (queries, 4, width), "k": (keys, 2, width), "v": (keys, 2, width)}
    arguments = tuple((name, Argument(shape, dtype, True, wants_grad)) for name, shape in shapes.items())
    return Signature("attention", device, arguments, (("mask", mask),))


def test_every_backend_has_a_rule_in_the_matrix() -> None:
    assert list(RULES) == [backend.name for backend in OPERATOR.backends]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", RULES)
def test_what_the_matrix_refuses_is_refused_for_that_reason(name: str, kind: str) -> None:
    backend = OPERATOR.backend(name)
    assert backend is not None
    why = RULES[name](KINDS[kind], crosses_of(KINDS[kind]))
    if why is not None:
        assert backend.supports(_on("cuda", KINDS[kind], torch.bfloat16)) == why


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["eager", "dense", "chunked"])
def test_what_the_matrix_serves_is_served_on_a_cpu_and_the_rest_is_refused_with_those_that_can(
    name: str, kind: str
) -> None:
    mask = KINDS[kind]
    selection = Selection({"attention": name})
    why = RULES[name](mask, crosses_of(mask))
    if why is None:
        out = selection.call(OPERATOR, **_given(mask))
        assert isinstance(out, Tensor)
        assert out.isfinite().all()
        assert selection.served["attention", name] == 1
        return
    with pytest.raises(DrivetrainError, match=re.escape(why)) as refused:
        selection.call(OPERATOR, **_given(mask))
    assert "those that can: dense, chunked" in str(refused.value)


def test_a_refused_mask_goes_on_with_eager_only_where_that_is_allowed_and_is_recorded() -> None:
    mask = Mask(dropout=Dropout(0.1))
    selection = Selection({"attention": "triton"}, allow_fallback=True)
    selection.call(OPERATOR, **_given(mask))
    assert selection.served == {("attention", "eager"): 1}
    (choice,) = selection.choices.values()
    assert choice.is_fallback
    assert choice.reason is not None
    assert "no dropout" in choice.reason


def test_a_mask_that_eager_refuses_is_no_fallback_either() -> None:
    selection = Selection({"attention": "triton"}, allow_fallback=True)
    with pytest.raises(DrivetrainError, match=r"eager cannot serve .* dense, chunked"):
        selection.call(OPERATOR, **_given(Mask(softcap=30.0)))


def test_the_choice_of_one_packing_holds_for_the_next() -> None:
    """Borders are values: a run does not decide anew, and does not remember, for each of its packings."""
    selection = Selection()
    for lengths in ((5, 15), (9, 11), (7, 13)):
        selection.call(OPERATOR, **_given(Mask(documents=Documents.of_lengths(lengths))))
    assert len(selection.choices) == 1
    assert selection.served["attention", "eager"] == 3


@pytest.mark.parametrize(
    ("name", "signature", "says"),
    [
        ("flash_attn", _on("cpu", CAUSAL, torch.bfloat16), "no cpu device"),
        ("flash_attn", _on("cuda", CAUSAL, torch.float32), "float32 is not among its dtypes"),
        ("flash_attn", _on("cuda", CAUSAL, torch.bfloat16, width=264), "264 wide"),
        ("flash_attn", _on("cuda", CAUSAL, torch.bfloat16), "not installed"),
        ("flex", _on("cpu", CAUSAL, torch.float32), "no backward pass on a CPU"),
        ("flex", _on("cuda", CAUSAL, torch.float64), "float64 is not among"),
        ("flex", _on("meta", CAUSAL, torch.float32), "not meta"),
        ("triton", _on("cuda", Mask(softcap=2.0), torch.float32), "soft-cap"),
    ],
)
def test_calls_that_a_backend_cannot_serve_are_refused_with_the_reason(
    name: str, signature: Signature, says: str
) -> None:
    backend = OPERATOR.backend(name)
    assert backend is not None
    why = backend.supports(signature)
    assert why is not None
    assert says in why


def test_flex_attention_serves_a_cpu_where_no_gradient_is_wanted() -> None:
    flex = OPERATOR.backend("flex")
    assert flex is not None
    assert flex.supports(_on("cpu", CAUSAL, torch.float32, wants_grad=False)) is None
    given = _given(CAUSAL)
    tensors = {name: one.requires_grad_() for name, one in given.items() if isinstance(one, Tensor)}
    assert flex.supports(signature_of("attention", {**given, **tensors})) is not None
    with torch.no_grad():
        assert flex.supports(signature_of("attention", {**given, **tensors})) is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"q": torch.zeros(20, 3, 16)}, "3 query heads are no multiple of 2"),
        ({"q": torch.zeros(20, 4, 8)}, "queries are 8 wide, keys 16"),
        ({"q": torch.zeros(20, 4, 16, dtype=torch.bfloat16)}, "give all the same"),
        ({"q": torch.zeros(1, 20, 4, 16)}, r"takes queries \(Tq, H, K\)"),
        ({"v": torch.zeros(19, 2, 16)}, r"takes queries \(Tq, H, K\)"),
        ({"mask": Mask(slopes=torch.ones(3))}, "3 slopes for 4 query heads"),
        ({"q": torch.zeros(19, 4, 16)}, "state alignment"),
    ],
)
@pytest.mark.parametrize("name", ["eager", "products", "dense", "chunked", "flex"])
def test_shapes_that_do_not_fit_are_refused_by_every_backend(
    name: str, change: dict[str, object], says: str
) -> None:
    backend = OPERATOR.backend(name)
    assert backend is not None
    with pytest.raises(DrivetrainError, match=says):
        backend.call(**{**_given(CAUSAL), **change})


@pytest.mark.parametrize("name", ["eager", "dense", "chunked", pytest.param("flex", marks=pytest.mark.long)])
def test_no_field_of_a_mask_is_ignored(name: str) -> None:
    """Megatron-LM#415: reset positions were accepted and had no effect. Here each field changes what is computed."""
    base = Mask(documents=Documents.of_lengths([12, 8]))
    changes: dict[str, object] = {
        "causal": False,
        "window": 3,
        "prefix": 4,
        "documents": None,
        "slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625]),
        "softcap": 0.5,
        "dropout": Dropout(0.5, seed=3),
    }
    backend = OPERATOR.backend(name)
    assert backend is not None
    plain = backend.call(**_given(base))
    for field, value in changes.items():
        mask = replace(base, **{field: value})  # type: ignore[arg-type]
        if RULES[name](mask, crosses_of(mask)) is None:
            assert not torch.equal(backend.call(**{**_given(base), "mask": mask}), plain), field
