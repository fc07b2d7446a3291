"""Whether Triton can serve, asked in compiled code too."""

import warnings

import pytest
import torch

from drivetrain.engine.ops import glu
from drivetrain.engine.ops.signature import signature_of


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_compiled_code_may_ask_without_a_break_of_its_graph_and_without_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    backend = glu.OPERATOR.backend("triton")
    assert backend is not None
    signature = signature_of("glu", {"gate": torch.ones(2, 4), "up": torch.ones(2, 4)})

    def ask(x: torch.Tensor) -> torch.Tensor:
        return x if backend.supports(signature) is None else x + 1

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # What the compiler itself does while it imports.
        warnings.filterwarnings("ignore", message="`torch.jit.script_method` is deprecated")
        found = torch.compile(ask, backend="eager", fullgraph=True)(torch.zeros(3))
    assert torch.equal(found, torch.ones(3)), "it cannot serve on a CPU without its interpreter"
