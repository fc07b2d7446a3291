"""Who serves where nothing was tuned: what an operator prefers, where it was asked for; else torch's own."""

import torch

from drivetrain.engine.ops import glu
from drivetrain.engine.ops.selection import AUTO, Choice, Selection
from drivetrain.engine.ops.signature import Signature, signature_of

GATE = torch.randn(3, 8)


def call() -> Signature:
    return signature_of("glu", {"gate": GATE, "up": GATE, "activation": "silu"})


def served(selection: Selection) -> str:
    return selection.choose(glu.OPERATOR, call()).backend.name


def test_auto_takes_what_the_operator_prefers_on_the_device() -> None:
    preferred = [name for name in glu.OPERATOR.untuned["cpu"] if _serves(name)]
    assert served(Selection({"glu": AUTO})) == [*preferred, "eager"][0]


def _serves(name: str) -> bool:
    backend = glu.OPERATOR.backend(name)
    return backend is not None and backend.supports(call()) is None


def test_an_operator_that_nobody_named_is_torchs_own_and_compiles_nothing() -> None:
    assert served(Selection()) == "eager"


def test_a_call_that_the_tuned_file_does_not_know_is_told_once_and_not_of_evaluation() -> None:
    told: list[str] = []

    def tell(signature: Signature, _choice: Choice) -> None:
        told.append(str(signature))

    wanted = GATE.clone().requires_grad_()
    named = Selection({"glu": "eager"}, tuned=lambda _: None, on_untuned=tell)
    named.call(glu.OPERATOR, gate=wanted, up=GATE)
    assert told == [], "asked for by name"
    selection = Selection(tuned=lambda _: None, on_untuned=tell)
    selection.call(glu.OPERATOR, gate=GATE, up=GATE)
    assert told == [], "no gradient is wanted"
    for _ in range(2):
        selection.call(glu.OPERATOR, gate=wanted, up=GATE)
    assert len(told) == 1
    assert "float32[3, 8]" in told[0]
    Selection(on_untuned=tell).call(glu.OPERATOR, gate=wanted, up=GATE)
    assert len(told) == 1, "nothing was tuned at all"


def test_what_was_tuned_comes_first_and_what_was_tuned_and_cannot_serve_is_said() -> None:
    assert served(Selection({"glu": AUTO}, tuned=lambda _: "eager")) == "eager"
    assert served(Selection(tuned=lambda _: "eager")) == "eager"
    choice = Selection({"glu": AUTO}, tuned=lambda _: "triton").choose(glu.OPERATOR, call())
    assert choice.backend.name != "triton"
    assert str(choice.reason).startswith("tuned for triton, which cannot serve")
    assert not choice.is_fallback, "nobody asked for triton by name"
