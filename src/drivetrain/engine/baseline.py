"""The interpolated bigram model that a run must beat, on exactly what the run has seen.

It is fitted on the (input, label) pairs the model was trained on so far and scored on the pairs it was
evaluated on, under the same loss masks, so that the two figures stand for the same text.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from drivetrain.archive.reader import open_run
from drivetrain.engine.data.corpus import ensure_corpus
from drivetrain.engine.data.loader import BatchLoader
from drivetrain.errors import RunError
from drivetrain.measure.bigram import fit_bigram_pairs

__all__ = ["BigramBaseline", "bigram_baseline"]


@dataclass(frozen=True)
class BigramBaseline:
    """Bits per byte of the bigram model, and how many tokens it was fitted and scored on."""

    bits_per_byte: float
    seen_tokens: int
    validation_tokens: int


def bigram_baseline(run_path: Path) -> BigramBaseline:
    """Fit and score the bigram model of a run that has trained.

    Raises:
        RunError: the run has no summary, or its tokenizer does not tell the bytes of a token.
    """
    run = open_run(run_path)
    config, summary = run.config(), run.summary()
    if summary is None:
        raise RunError(f"{run_path} has no summary yet; let it finish or stop it with Ctrl-C")
    corpus = ensure_corpus(config.data, config.model)
    lengths = corpus.token_byte_lengths()
    if lengths.values is None:
        raise RunError(f"no bits per byte for {run_path}: {lengths.reason}")
    global_batch_size = config.training.global_batch_size
    with BatchLoader(
        config, corpus, "train", num_samples=summary["steps"] * global_batch_size, num_workers=0
    ) as loader:
        contexts, targets = _pairs(loader)
    with BatchLoader(
        config, corpus, "validation", num_samples=config.training.eval_iters * global_batch_size
    ) as loader:
        held_out_contexts, held_out_targets = _pairs(loader)
    bigram = fit_bigram_pairs(contexts, targets, config.model.vocab_size)
    return BigramBaseline(
        bits_per_byte=bigram.bits_per_byte_of_pairs(held_out_contexts, held_out_targets, lengths.values),
        seen_tokens=contexts.size,
        validation_tokens=held_out_contexts.size,
    )


def _pairs(loader: BatchLoader) -> tuple["np.ndarray[tuple[int], np.dtype[np.int64]]", ...]:
    contexts, targets = [], []
    for batch in loader:
        contexts.append(batch.token_ids[batch.loss_mask].numpy())
        targets.append(batch.labels[batch.loss_mask].numpy())
    return np.concatenate(contexts), np.concatenate(targets)
