"""The leak probe through every backend of attention: each is clean, and is caught where it is told wrong borders."""

import numpy as np
import pytest
import torch
from model_examples import decoder_of, model_of, packed_batch

from drivetrain.engine.model import decoder
from drivetrain.engine.ops.attention import OPERATOR
from drivetrain.engine.ops.selection import Selection
from drivetrain.engine.probe import Leak, ProbeBatch, probe_leak
from drivetrain.errors import DrivetrainError

ON_EVERY_CPU = {"eager", "dense", "chunked"}
"""Others are skipped where they do not serve; these may not be."""
CASES = [
    *((one.name, torch.bfloat16) for one in OPERATOR.backends),
    *((name, torch.float32) for name in sorted(ON_EVERY_CPU)),
]
LAYOUT = [[5, 12, 7], [24], [1, 1, 22]]


def probed(backend: str, dtype: torch.dtype) -> Leak:
    documents = np.array([np.repeat(np.arange(len(row)), row) for row in LAYOUT])
    made = decoder_of(model_of("llama_gqa_untied"), dtype).train()
    selection = Selection({"attention": backend})
    made.use_operators(selection)
    try:
        found = probe_leak(made, ProbeBatch(packed_batch(LAYOUT), documents, False), documents_isolated=True)
    except DrivetrainError as error:
        if backend in ON_EVERY_CPU:
            raise
        pytest.skip(f"{backend} does not serve here: {error}")
    assert ("attention", backend) in selection.served
    return found


@pytest.mark.parametrize(("backend", "dtype"), CASES)
def test_no_document_is_seen_by_another_through_any_backend(backend: str, dtype: torch.dtype) -> None:
    found = probed(backend, dtype)
    assert (found.verdict, found.document_leak, found.future_leak) == ("clean", 0, 0), found.why
    assert found.control > found.tolerance


@pytest.mark.parametrize(
    ("backend", "dtype"), [*((one, torch.float32) for one in sorted(ON_EVERY_CPU)), CASES[1]]
)
def test_wrong_borders_are_found_through_any_backend(
    backend: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = decoder.DocumentLayout
    monkeypatch.setattr(
        decoder, "DocumentLayout", lambda _: whole(torch.tensor([0, 24, 48, 72], dtype=torch.int32))
    )
    assert probed(backend, dtype).verdict == "leak"
