"""Which backend serves an elementwise operator, and that none is replaced in silence."""

from dataclasses import replace

import pytest
import torch

from drivetrain.engine.ops import _compiled, bias_dropout_add, glu, layer_norm, rms_norm, rotary
from drivetrain.engine.ops._triton_norm_calls import LARGEST_SIZE, triton_norm_refuses
from drivetrain.engine.ops.discovery import operator_named, operators
from drivetrain.engine.ops.selection import Selection
from drivetrain.engine.ops.signature import signature_of
from drivetrain.errors import DrivetrainError


def test_all_elementwise_operators_are_discovered() -> None:
    names = {operator.name for operator in operators()}
    wanted = {"rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm", "bias_dropout_add", "rotary", "glu"}
    assert wanted <= names
    assert operator_named("glu") is glu.OPERATOR


@pytest.mark.parametrize("name", ["layer_norm", "add_layer_norm", "bias_dropout_add"])
def test_what_loses_when_fused_on_a_cpu_is_not_fused_by_default(name: str) -> None:
    operator = operator_named(name)
    for case in operator.cases():
        given = case.make(torch.bfloat16, torch.Generator().manual_seed(0))
        choice = Selection().choose(operator, signature_of(name, given))
        assert choice.backend.name == "eager"
        assert choice.reason is None


def test_triton_without_a_device_is_refused_with_the_reason_and_who_could_serve(monkeypatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    selection = Selection(requested={"rms_norm": "triton"})
    with pytest.raises(
        DrivetrainError, match=r"(?s)triton cannot serve.*(no CUDA device|not installed).*can: eager"
    ):
        selection.call(rms_norm.OPERATOR, x=torch.zeros(2, 8), weight=torch.ones(8))
    assert not selection.served


def test_a_fallback_that_is_allowed_is_recorded(monkeypatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    selection = Selection(requested={"glu": "triton"}, allow_fallback=True)
    selection.call(glu.OPERATOR, gate=torch.zeros(2, 8))
    (choice,) = selection.choices.values()
    assert choice.is_fallback
    assert choice.reason is not None
    assert "triton cannot serve" in choice.reason
    assert selection.served == {("glu", "eager"): 1}


def test_a_dtype_that_compiled_backends_do_not_know_is_refused() -> None:
    signature = signature_of("glu", {"gate": torch.zeros(2, 8).to(torch.float8_e4m3fn)})
    assert _compiled.inductor_refuses(signature) == (
        "float8_e4m3fn is not among its dtypes: float32, bfloat16, float16, float64"
    )


def test_rows_that_no_program_can_hold_are_refused(monkeypatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    pytest.importorskip("triton")
    x = torch.zeros(1, LARGEST_SIZE + 1, device="meta")
    signature = signature_of("rms_norm", {"x": x, "weight": x[0]})
    why = triton_norm_refuses(replace(signature, device="cuda"))
    assert why is not None
    assert "32,769 features" in why


def test_angles_that_want_gradients_are_refused_by_triton(monkeypatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    pytest.importorskip("triton")
    angles = torch.zeros(3, 4, requires_grad=True)
    triton = rotary.OPERATOR.backend("triton")
    assert triton is not None
    why = triton.supports(
        signature_of("rotary", {"x": torch.zeros(3, 2, 8), "cosine": angles, "sine": angles})
    )
    assert why == "cosine wants a gradient, which the kernel does not compute"


def test_inductor_without_a_compiler_is_refused(monkeypatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    _compiled._missing.cache_clear()
    try:
        signature = signature_of("layer_norm", {"x": torch.zeros(2, 8), "weight": torch.ones(8)})
        inductor = layer_norm.OPERATOR.backend("inductor")
        assert inductor is not None
        assert inductor.supports(signature) == "there is no C++ compiler no-such-compiler"
    finally:
        _compiled._missing.cache_clear()


def test_compiled_formulas_are_compiled_once_for_a_layout_and_never_by_dynamic_shapes(monkeypatch) -> None:
    compilations: list[tuple[object, dict[str, object]]] = []

    def compile(function, **options):
        compilations.append((function.__code__, options))
        return function

    monkeypatch.setattr(torch, "compile", compile)

    def double(x: torch.Tensor, times: int) -> torch.Tensor:
        return x * times

    doubled = _compiled.compiled(double)
    for rows in (2, 3, 2):
        doubled(torch.zeros(rows, 4), 2)
    doubled(torch.zeros(2, 4), 3)
    doubled(torch.zeros(4, 2).t(), 2)
    with torch.no_grad():
        doubled(torch.zeros(2, 4), 2)
    codes = [id(code) for code, _ in compilations]
    assert len(codes) == len(set(codes)) == 5
    assert all(options == {"dynamic": False, "fullgraph": True} for _, options in compilations)


def test_shapes_that_never_repeat_are_a_mistake_that_is_said(monkeypatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(_compiled, "MOST_LAYOUTS", 3)

    def same(x: torch.Tensor) -> torch.Tensor:
        return x

    called = _compiled.compiled(same)
    for rows in range(3):
        called(torch.zeros(rows))
    called(torch.zeros(2))
    with pytest.raises(DrivetrainError, match="compiled same for 3 different shapes"):
        called(torch.zeros(9))


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 64, 1037, 4096])
def test_a_sum_in_two_stages_has_every_row(rows: int) -> None:
    values = torch.randn(rows, 5, dtype=torch.float64)
    torch.testing.assert_close(_compiled.sum_of_rows(values), values.sum(0))


def test_a_seed_of_another_kind_is_refused() -> None:
    x = torch.zeros(2, 8)
    with pytest.raises(DrivetrainError, match="one int64"):
        bias_dropout_add.bias_dropout_add(x, x, torch.zeros(2, dtype=torch.int64))
