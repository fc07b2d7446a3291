"""Preparing and serving tokens: how fast text becomes a corpus and one core builds batches, what that adds to a step,
how full packed sequences are.

    python benchmarks/data.py --quick --json

Everything is written to a temporary folder (``--folder``): a corpus of drawn ids, and the index of a corpus of ten
billion tokens whose token file is a hole.
"""

import argparse
import contextlib
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from drivetrain.config import RunConfig
from drivetrain.engine.data.corpus import Corpus
from drivetrain.engine.data.indexed import (
    HEADER,
    MAGIC,
    VERSION,
    IndexedReader,
    IndexedWriter,
    index_path,
    tokens_path,
)
from drivetrain.engine.data.loader import BatchLoader
from drivetrain.engine.data.packing import best_fit, cut_to_length
from drivetrain.engine.data.split import Pieces
from drivetrain.engine.model.decoder import Decoder
from drivetrain.engine.model.initialization import initialize
from harness.claims import Claim, claim_of_ratios, document
from harness.data_prepare import prepare_claims

SEQ_LENGTH = 2048
MICRO_BATCH = 8
VOCABULARY = 32_000
TOKENS_PER_SECOND = 50e6
ADDED_S = 1e-3
OPENED_S = 1.0
FILL = 0.99
EFFECTIVE = 1.9
SPARSE_DOCUMENTS, SPARSE_LENGTH = 10_000_000, 1_000
REPEATS = 7


def lengths_of(kind: str, count: int, longest: int) -> NDArray[np.int64]:
    """(count,) document lengths: log-normal of median 300, or uniform with a mean of half of ``longest``."""
    random = np.random.default_rng(5)
    if kind == "log-normal":
        drawn = random.lognormal(np.log(300), 1.0, count)
        return np.clip(drawn, 2, 100 * longest).astype(np.int64)
    return random.integers(2, longest, size=count, endpoint=False)


def write_corpus(prefix: Path, lengths: NDArray[np.int64], vocab_size: int) -> Corpus:
    """Documents of those lengths, of drawn ids."""
    random = np.random.default_rng(6)
    with IndexedWriter(prefix, vocab_size) as writer:
        for length in lengths.tolist():
            writer.add(random.integers(0, vocab_size, size=length))
        writer.commit()
    return Corpus.open(prefix, vocab_size=vocab_size)


def config_of(
    seq_length: int, micro_batch: int, vocab_size: int, *, hidden: int = 8, **data: object
) -> RunConfig:
    """A run of one process whose steps are one micro-batch."""
    model = {
        "num_layers": 2,
        "hidden_size": hidden,
        "num_attention_heads": max(1, hidden // 32),
        "vocab_size": vocab_size,
        "seq_length": seq_length,
    }
    training = {"micro_batch_size": micro_batch, "global_batch_size": micro_batch}
    return RunConfig.model_validate(
        {"model": model, "training": training, "data": {"split": "100,0", **data}, "run": {"device": "cpu"}}
    )


def seconds(action: Callable[[], object]) -> float:
    """That ``action`` takes."""
    before = time.perf_counter()
    action()
    return time.perf_counter() - before


def serving(corpus: Corpus, packing: str, batches: int) -> list[float]:
    """Seconds a micro-batch, one value a repeat; built when it is asked for, in this thread."""
    config = config_of(SEQ_LENGTH, MICRO_BATCH, VOCABULARY, packing=packing)
    with BatchLoader(config, corpus, "train") as loader:
        for _ in range(batches):
            next(loader)  # pages, and the first calls of everything
        return [seconds(lambda: [next(loader) for _ in range(batches)]) / batches for _ in range(REPEATS)]


def serving_claims(folder: Path, quick: bool) -> Iterator[Claim]:
    """Tokens a second, and what building a micro-batch adds to a step that waits for it."""
    corpus = write_corpus(
        folder / "served", lengths_of("log-normal", 5_000 if quick else 30_000, SEQ_LENGTH), VOCABULARY
    )
    tokens = MICRO_BATCH * SEQ_LENGTH
    for packing in ("concatenate", "best_fit"):
        times = serving(corpus, packing, 20 if quick else 60)
        rate = tokens / statistics.median(times)
        note = (
            f"{rate / 1e6:.0f} M tokens/s: {MICRO_BATCH} x {SEQ_LENGTH} tokens in "
            f"{statistics.median(times) * 1e3:.2f} ms, log-normal documents of median 300, warm page cache, one thread"
        )
        yield claim_of_ratios(
            f"serving, {packing}: tokens a second of one core, over {TOKENS_PER_SECOND:.0e}",
            "target",
            "",
            [tokens / one / TOKENS_PER_SECOND for one in times],
            target=1.0,
            note=note,
        )
        yield claim_of_ratios(
            f"serving, {packing}: {ADDED_S * 1e3:g} ms over what a micro-batch adds to a step",
            "target",
            "",
            [ADDED_S / one for one in times],
            target=1.0,
            note="no workers and no thread: the step waits for all of it",
        )


def write_sparse(prefix: Path) -> None:
    """The index of ten billion tokens; the token file is a hole of 20 GB."""
    lengths = np.full(SPARSE_DOCUMENTS, SPARSE_LENGTH, dtype="<i4")
    pointers = np.arange(SPARSE_DOCUMENTS, dtype="<i8") * SPARSE_LENGTH * 2
    with index_path(prefix).open("wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, 8, SPARSE_DOCUMENTS, SPARSE_DOCUMENTS + 1))
        for part in (lengths, pointers, np.arange(SPARSE_DOCUMENTS + 1, dtype="<i8")):
            file.write(part.tobytes())
    with tokens_path(prefix).open("wb") as file:
        file.truncate(SPARSE_DOCUMENTS * SPARSE_LENGTH * 2)


def opening_claim(folder: Path) -> Claim:
    """An index of 10,000 million tokens, checked to the byte."""
    prefix = folder / "sparse"
    write_sparse(prefix)
    times = [seconds(lambda: IndexedReader(prefix)) for _ in range(REPEATS)]
    for path in (tokens_path(prefix), index_path(prefix)):
        path.unlink()
    return claim_of_ratios(
        "opening the index of 10 billion tokens: 1 s over the time",
        "target",
        "",
        [OPENED_S / one for one in times],
        target=1.0,
        note=f"{SPARSE_DOCUMENTS:,} documents, {statistics.median(times):.2f} s, every length held against its pointer",
    )


def fill_claims(quick: bool) -> Iterator[Claim]:
    """How full best-fit rows are, and what packing costs."""
    count = 20_000 if quick else 200_000
    lengths = lengths_of("log-normal", count, SEQ_LENGTH)
    pieces = Pieces(np.arange(count), np.zeros(count, np.int64), lengths)
    cut = cut_to_length(pieces, SEQ_LENGTH)
    buffer = config_of(SEQ_LENGTH, 1, VOCABULARY).data.packing_buffer
    before = time.perf_counter()
    packed = best_fit(cut.lengths, SEQ_LENGTH + 1, buffer)
    taken = time.perf_counter() - before
    fill = float(cut.lengths.sum()) / ((len(packed.first) - 1) * (SEQ_LENGTH + 1))
    yield claim_of_ratios(
        f"best-fit: share of places that hold tokens, over {FILL}",
        "target",
        "",
        [fill / FILL],
        target=1.0,
        note=f"{fill:.4f} of {count:,} log-normal documents; {taken / len(cut) * 1e6:.2f} us a document",
    )


def effective_claim(folder: Path, quick: bool) -> Claim:
    """Tokens with loss a second of training, against one document a row; in turns A B B A."""
    length, vocabulary = 256, 1024
    lengths = lengths_of("uniform", 4_000, length)
    corpus = write_corpus(folder / "uniform", lengths, vocabulary)
    loaders, decoders = {}, {}
    with contextlib.ExitStack() as stack:
        for packing in ("best_fit", "pad"):
            config = config_of(length, 8, vocabulary, hidden=128, packing=packing)
            loaders[packing] = stack.enter_context(BatchLoader(config, corpus, "train"))
            decoders[packing] = Decoder(config.model, torch.float32)
            initialize(decoders[packing], 0)

        def rate(packing: str) -> float:
            tokens, before = 0, time.perf_counter()
            for _ in range(4 if quick else 12):
                batch = next(loaders[packing])
                decoders[packing].loss_sum(batch).backward()
                decoders[packing].zero_grad(set_to_none=True)
                tokens += batch.num_valid_tokens
            return tokens / (time.perf_counter() - before)

        rate("best_fit"), rate("pad")
        ratios = []
        for _ in range(2 if quick else 6):
            ours, theirs = rate("best_fit"), rate("pad")
            theirs, ours = theirs + rate("pad"), ours + rate("best_fit")
            ratios.append(ours / theirs)
        padding = {packing: loader.samples.padding_fraction for packing, loader in loaders.items()}
    return claim_of_ratios(
        "best-fit: tokens with loss a second of training, over one padded document a sequence",
        "padding",
        "",
        ratios,
        target=EFFECTIVE,
        note=(
            f"mean length is half the maximum of {length}; padding {padding['best_fit']:.1%} and {padding['pad']:.1%}; "
            "two layers of 128, forward and backward, both sides attend inside documents alone"
        ),
    )


def all_claims(folder: Path, quick: bool) -> Iterator[Claim]:
    """One after the other, as they are measured."""
    yield from serving_claims(folder, quick)
    yield opening_claim(folder)
    yield from fill_claims(quick)
    yield effective_claim(folder, quick)
    yield from prepare_claims(quick=quick)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="smaller corpora, fewer steps: under a minute")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--folder", type=Path, default=None, help="where the corpora are written")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    torch.set_num_threads(1)
    claims = []
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        for claim in all_claims(Path(name), options.quick):
            claims.append(claim)
            print(
                f"{claim.claim}: {claim.ratio:.3f} (target {claim.target:g}); {claim.note}",
                file=sys.stderr,
                flush=True,
            )
    if options.json:
        print(document(claims))


if __name__ == "__main__":
    main()
