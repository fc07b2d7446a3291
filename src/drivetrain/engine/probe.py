"""``train --probe``: what the convergence gate needs of a run's first step, written to ``probe/``.

Gradients of step 1 show a wrong scale that AdamW hides from the loss; the leak probe shows a loss that is low because
the model sees what it must not see. A probed run equals an unprobed one to the bit: nothing that trains is touched.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import save
from torch import Tensor

from drivetrain.archive.atomic import write_bytes, write_fault, write_json
from drivetrain.archive.encoding import SCHEMA
from drivetrain.config import RunConfig, data_seed
from drivetrain.engine.data.corpus import Corpus
from drivetrain.engine.data.opening import samples_of
from drivetrain.engine.model.batch import Batch
from drivetrain.engine.model.decoder import Decoder
from drivetrain.engine.model.loss import OutputHead
from drivetrain.engine.random_state import capture_random_state, restore_random_state

__all__ = [
    "GRADIENTS_FILE",
    "LEAK_FILE",
    "Leak",
    "ProbeBatch",
    "losses_of_places",
    "measure_leak",
    "probe_batch",
    "probe_leak",
    "write_gradients",
    "write_leak",
]

LEAK_FILE = "probe/leak.json"
GRADIENTS_FILE = "probe/gradients.safetensors"

LEAST_TOLERANCE = 1e-6
"""Nats a loss may move. Rows of a matrix product do not see each other, so that without a leak it moves by nothing;
1e-6 is one unit in the last place of a loss of 8 in fp32."""
NOISE_FACTOR = 4.0
"""Where two passes over the same batch differ (kernels with atomic additions), so much of it is allowed."""
_LOGITS_AT_ONCE = 1 << 22
_BATCHES_SEARCHED = 16


@dataclass(frozen=True)
class ProbeBatch:
    """A micro-batch, and where its documents begin by the corpus's own index: the batch's borders are under test.

    Attributes:
        batch: (B, S).
        documents: (B, S) int64, number of the document within its row.
        constructed: two halves of other sequences stand in for documents, because no sequence had two.
    """

    batch: Batch
    documents: NDArray[np.int64]
    constructed: bool


@dataclass(frozen=True)
class Leak:
    """What changed losses say.

    Attributes:
        document_leak: largest change, in nats, of a loss when tokens of other documents change; None where
            documents are not meant to be isolated.
        future_leak: the same when later tokens change.
        tolerance: the largest change that counts as none.
        noise: largest difference of two passes over the very same batch.
        control: largest change of a loss when the first token of its own document changes: the probe can see.
        documents_isolated: ``data.reset_attention_mask``.
        verdict: ``not applicable`` where the probe is blind.
        why: in words.
    """

    document_leak: float | None
    future_leak: float
    tolerance: float
    noise: float
    control: float
    documents_isolated: bool
    verdict: Literal["clean", "leak", "not applicable"]
    why: str

    def to_document(self) -> dict[str, Any]:
        """``leak.json``."""
        return {"schema": SCHEMA, **asdict(self)}


def probe_batch(config: RunConfig, corpus: Corpus) -> ProbeBatch:
    """A micro-batch of the run's first training sequences, those that hold several documents first."""
    size, length = config.training.micro_batch_size, config.model.seq_length
    sequences = samples_of(corpus, config.data, "train", length, data_seed(config))
    samples = np.arange(size * _BATCHES_SEARCHED, dtype=np.int64)
    tokens, starts = sequences.rows(samples)
    several = starts[:, 1:length].any(axis=1)
    constructed = not several.any()
    if constructed and length >= 2:
        half = length // 2
        tokens[:size, half:] = tokens[size : 2 * size, : length + 1 - half]
        starts[:size, half] = True
        chosen = samples[:size]
        batch = sequences.pack(tokens[:size], starts[:size])
    else:
        chosen = np.argsort(~several, kind="stable")[:size]
        batch = sequences.batch(samples[chosen])
    documents = np.cumsum(starts[chosen, :length], axis=1)
    # A sequence may begin in the middle of a document, or at its start: either way its first document is number 0.
    return ProbeBatch(batch, documents - documents[:, :1], constructed)


def probe_leak(
    decoder: Decoder,
    probe: ProbeBatch,
    *,
    documents_isolated: bool,
    losses: Callable[[Batch], Tensor] | None = None,
) -> Leak:
    """Change tokens, and look at losses that must not change.

    Forward passes only, with gradients enabled as in training, so that compiled blocks are those that train. Dropout
    draws the same numbers in each pass. The generators are as they were when it returns.

    Args:
        decoder: as it is trained; its weights, gradients and mode are not touched.
        probe: on any device.
        documents_isolated: whether a document may not see another (``data.reset_attention_mask``).
        losses: gives the loss of every place of a batch, (B, S) fp64 on the CPU; by default the decoder's, which is
            whole. Where ranks share the model all of them call this, and ``losses`` is collective.
    """
    state = capture_random_state()
    device = next(decoder.parameters()).device
    documents = torch.from_numpy(probe.documents)
    length = documents.shape[1]
    place = torch.arange(length).expand_as(documents)
    first_of_document = torch.ones_like(documents, dtype=torch.bool)
    first_of_document[:, 1:] = documents[:, 1:] != documents[:, :-1]
    # Over the whole batch: the border between two rows is one between documents as well.
    number = first_of_document.flatten().cumsum(0).view_as(documents)
    end = length - max(1, length // 4)

    def losses_with(changed: Tensor | None) -> Tensor:
        ids = probe.batch.token_ids
        if changed is not None:
            vocabulary = decoder.model.vocab_size
            ids = torch.where(changed, (ids + max(1, vocabulary // 2)) % vocabulary, ids)
        restore_random_state(state)
        batch = replace(probe.batch, token_ids=ids).to(device)
        return _losses(decoder, batch) if losses is None else losses(batch)

    try:
        plain = losses_with(None)
        noise = _largest(losses_with(None) - plain)
        tolerance = max(LEAST_TOLERANCE, NOISE_FACTOR * noise)
        # Every second document changes, then the others: each border is tried from both of its sides.
        across = max(_largest((losses_with(number % 2 == odd) - plain)[number % 2 != odd]) for odd in (0, 1))
        future = _largest((losses_with(place >= end) - plain)[place < end])
        control = _largest((losses_with(first_of_document) - plain)[~first_of_document])
    finally:
        restore_random_state(state)
    several = bool((number > 1).any())
    document_leak = across if documents_isolated and several else None
    found = Leak(document_leak, future, tolerance, noise, control, documents_isolated, "clean", "")
    return replace(found, **_judge(found, constructed=probe.constructed))


def _judge(found: Leak, *, constructed: bool) -> dict[str, Any]:
    limit = f"(tolerance {found.tolerance:.1e})"
    if found.document_leak is not None and not found.document_leak <= found.tolerance:
        why = f"a loss moved by {found.document_leak:.3g} nat when another document changed {limit}"
        return {"verdict": "leak", "why": why}
    if not found.future_leak <= found.tolerance:
        why = f"a loss moved by {found.future_leak:.3g} nat when later tokens changed {limit}"
        return {"verdict": "leak", "why": why}
    if not found.control > found.tolerance:
        why = (
            f"no loss moved by more than {found.control:.3g} nat when the first token of its own document changed "
            f"{limit}: with these weights the probe sees nothing"
        )
        return {"verdict": "not applicable", "why": why}
    if found.document_leak is not None:
        made = " (two halves of other sequences stood for documents)" if constructed else ""
        why = f"no loss moved when other documents or later tokens changed {limit}{made}"
    elif not found.documents_isolated:
        why = (
            f"no loss moved when later tokens changed {limit}; documents see each other: "
            "data.reset_attention_mask is off"
        )
    else:
        why = f"no loss moved when later tokens changed {limit}; a sequence is too short for two documents"
    return {"verdict": "clean", "why": why}


class _LossOfEachPlace(OutputHead):
    """Keeps the loss of every place, masked or not, instead of summing it. Whatever runs the decoder ends here."""

    def __init__(self, inner: OutputHead, vocab_size: int) -> None:
        self._inner = inner
        self._rows = max(1, _LOGITS_AT_ONCE // vocab_size)
        self.found: list[Tensor] = []

    def cross_entropy_sum(
        self, hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, mask_T: Tensor
    ) -> Tensor:
        """Nothing: 0."""
        del mask_T
        losses = []
        with torch.no_grad():
            for start in range(0, len(labels_T), self._rows):
                part = slice(start, start + self._rows)
                logits_CV = self._inner.logits(hidden_TD[part], weight_VD).float()
                losses.append(F.cross_entropy(logits_CV, labels_T[part], reduction="none"))
        self.found.append(torch.cat(losses))
        return hidden_TD.new_zeros((), dtype=torch.promote_types(hidden_TD.dtype, torch.float32))


def losses_of_places(decoder: Decoder, run: Callable[[Batch], object], batch: Batch) -> Tensor | None:
    """(B, S) fp64 on the CPU: cross-entropy of every place, masked or not; None on a rank without the model's end.

    Args:
        run: computes the loss of a batch, by whatever way the decoder is trained.
    """
    head, recording = decoder.head, _LossOfEachPlace(decoder.head, decoder.model.vocab_size)
    decoder.head = recording
    try:
        with torch.enable_grad():
            run(batch)
    finally:
        decoder.head = head
    return recording.found[0].view(batch.labels.shape).cpu().double() if recording.found else None


def _losses(decoder: Decoder, batch: Batch) -> Tensor:
    losses = losses_of_places(decoder, decoder.loss_sum, batch)
    assert losses is not None
    return losses


def _largest(differences: Tensor) -> float:
    """The largest absolute value; infinite where one is not a number, so that it never looks like no change."""
    if differences.numel() == 0:
        return 0.0
    largest = differences.abs().max()
    return float(largest) if bool(torch.isfinite(largest)) else float("inf")


def write_gradients(run_path: Path, gradients: Mapping[str, Tensor]) -> None:
    """Write whole gradients: (each parameter's shape), fp32, by parameter name."""
    on_host = {
        name: value.detach().to("cpu", torch.float32).contiguous() for name, value in gradients.items()
    }
    _make_folder(run_path)
    write_bytes(run_path / GRADIENTS_FILE, save(on_host))


def measure_leak(
    config: RunConfig, corpus: Corpus, decoder: Decoder, losses: Callable[[Batch], Tensor] | None = None
) -> Leak:
    """Run the leak probe on a decoder that has not been trained yet; ``losses`` as in :func:`probe_leak`."""
    state = capture_random_state()
    try:
        # A user's transform may draw from the generators.
        batch = probe_batch(config, corpus)
    finally:
        restore_random_state(state)
    return probe_leak(decoder, batch, documents_isolated=config.data.reset_attention_mask, losses=losses)


def write_leak(run_path: Path, leak: Leak) -> None:
    """Write the result of the leak probe."""
    _make_folder(run_path)
    write_json(run_path / LEAK_FILE, leak.to_document())


def _make_folder(run_path: Path) -> None:
    folder = run_path / "probe"
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise write_fault(folder, error, "the probe's results could not be written") from error
