"""Tokenizers: trained on the spot or loaded from a ``tokenizer.json``; text to ids; bytes of each id."""

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import DTypeLike, NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from drivetrain.errors import DataError

__all__ = [
    "END_OF_DOCUMENT",
    "SMALLEST_VOCABULARY",
    "TokenByteLengths",
    "cuts_behind_line_breaks",
    "encode",
    "end_of_document_id",
    "load_tokenizer",
    "parallel_tokenizers",
    "pieces_of",
    "token_byte_lengths",
    "tokenizer_hash",
    "train_tokenizer",
    "vocabulary_size",
]

END_OF_DOCUMENT = "<|endoftext|>"
END_OF_DOCUMENT_NAMES = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "<|end|>", "[EOS]", "[SEP]")
SMALLEST_VOCABULARY = 257
"""256 bytes and the end of a document."""
LARGEST_VOCABULARY = 16_777_216
"""The most that ``model.vocab_size`` may be."""
PIECE_CHARACTERS = 1 << 18


@contextmanager
def parallel_tokenizers() -> Iterator[None]:
    """Let the tokenizers library use all cores inside, unless the user's environment says otherwise.

    Left to itself it stops doing so, with a warning, in a process that was forked from one that used it.
    """
    name = "TOKENIZERS_PARALLELISM"
    if name in os.environ:
        yield
        return
    os.environ[name] = "true"
    try:
        yield
    finally:
        del os.environ[name]


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE of at most ``vocab_size`` ids, ``<|endoftext|>`` first. Deterministic.

    Fewer ids come out where the text has no more pairs to merge.

    Raises:
        DataError: ``vocab_size`` has no room for the 256 bytes and the end of a document, or is beyond
            ``model.vocab_size``.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise DataError(
            f"a byte-level vocabulary of {vocab_size} cannot hold the 256 bytes and {END_OF_DOCUMENT}; "
            f"the smallest is {SMALLEST_VOCABULARY}"
        )
    if vocab_size > LARGEST_VOCABULARY:
        # The library reserves room for all of them at once, and aborts the process where there is none.
        raise DataError(
            f"a vocabulary of {vocab_size:,} is larger than any model's; the largest is {LARGEST_VOCABULARY:,}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    with parallel_tokenizers():
        tokenizer.train_from_iterator(texts, trainer=trainer)
    return tokenizer


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Read a ``tokenizer.json``. Raises DataError where it is missing or no tokenizer."""
    try:
        content = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise DataError(f"no tokenizer at {str(path)!r}; expected the path of a tokenizer.json") from error
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"tokenizer {str(path)!r} cannot be read: {error}") from error
    try:
        tokenizer = Tokenizer.from_str(content)
    # The library raises plain Exception for every kind of malformed file.
    except Exception as error:
        raise DataError(f"{str(path)!r} is no tokenizer.json: {error}") from error
    # A file saved for inference may cut or fill what it encodes; a corpus must do neither.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """Hex SHA-256 of which token each id is.

    The layout of the file and the version of the library that wrote it do not matter.
    """
    vocabulary = sorted(
        (index, token) for token, index in tokenizer.get_vocab(with_added_tokens=True).items()
    )
    return hashlib.sha256(orjson.dumps(vocabulary)).hexdigest()


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """One more than the largest id: ids need not be dense."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def end_of_document_id(tokenizer: Tokenizer, token: str | None = None) -> int | None:
    """The id that ends a document: of ``token``, or of the first name in use in the field that exists.

    Raises:
        DataError: ``token`` is given and the tokenizer does not have it.
    """
    if token is not None:
        found: int | None = tokenizer.token_to_id(token)
        if found is None:
            special = [
                added.content for added in tokenizer.get_added_tokens_decoder().values() if added.special
            ]
            raise DataError(
                f"the tokenizer has no token {token!r} to end documents with; "
                f"its special tokens: {', '.join(map(repr, special[:20])) or 'none'}"
            )
        return found
    ids = (tokenizer.token_to_id(name) for name in END_OF_DOCUMENT_NAMES)
    return next((found for found in ids if found is not None), None)


def encode(
    tokenizer: Tokenizer,
    documents: Sequence[str],
    *,
    split_long: bool = False,
    dtype: DTypeLike = np.int64,
) -> list[NDArray[Any]]:
    """Token ids of each document, without any special token: text that spells one is text.

    Args:
        tokenizer: what to encode with.
        documents: their texts.
        split_long: encode long documents in pieces, by all cores. They are cut after a single line break
            before a letter or digit. The pre-tokenizers of byte-level tokenizers cut there too, so that
            the ids are those of the whole; for other tokenizers leave it off.
        dtype: of the ids, which holds the largest.
    Returns:
        One (length,) array for each document.
    """
    before = tokenizer.encode_special_tokens
    tokenizer.encode_special_tokens = True
    pieces: list[str] = []
    counts: list[int] = []
    for document in documents:
        parts = list(pieces_of(document)) if split_long else [document]
        pieces.extend(parts)
        counts.append(len(parts))
    try:
        with parallel_tokenizers():
            encodings = tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
    finally:
        tokenizer.encode_special_tokens = before
    result = []
    at = 0
    for count in counts:
        # Without a look through the list for the kind of its numbers, which asarray takes first.
        parts_ids = [np.fromiter(part.ids, dtype, len(part)) for part in encodings[at : at + count]]
        result.append(parts_ids[0] if count == 1 else np.concatenate(parts_ids))
        at += count
    return result


def cuts_behind_line_breaks(tokenizer: Tokenizer) -> bool:
    """Whether no token of ``tokenizer``, which is byte-level, goes across the places where ``pieces_of`` cuts."""
    step = tokenizer.pre_tokenizer
    if step is None:
        return False
    for before in ("a", "A", "1", ".", ")"):
        for behind in ("a", "A", "1"):
            pieces = step.pre_tokenize_str(f"word{before}\n{behind} word")
            if all(start != len(f"word{before}\n") for _, (start, _) in pieces):
                return False
    return True


def pieces_of(document: str) -> Iterator[str]:
    """Pieces of a long document, cut where the pre-tokenizers of byte-level tokenizers cut too."""
    start = 0
    while len(document) - start > 2 * PIECE_CHARACTERS:
        end = document.find("\n", start + PIECE_CHARACTERS) + 1
        while 0 < end < len(document) and (document[end - 2].isspace() or not document[end].isalnum()):
            end = document.find("\n", end) + 1
        if not 0 < end < len(document):
            break
        yield document[start:end]
        start = end
    yield document[start:]


@dataclass(frozen=True)
class TokenByteLengths:
    """How many bytes of text each id stands for.

    Attributes:
        values: (V,) int32, special tokens 0; None where ids do not stand for a fixed number of bytes.
        reason: why ``values`` is None, else an empty string.
    """

    values: NDArray[np.int32] | None
    reason: str = ""


def token_byte_lengths(tokenizer: Tokenizer) -> TokenByteLengths:
    """Bytes of each id: exact for byte-level BPE that neither normalises nor adds text, else withheld."""
    description: dict[str, Any] = orjson.loads(tokenizer.to_str(pretty=False))
    reason = _no_fixed_bytes(description)
    if reason:
        return TokenByteLengths(None, f"bytes per token are not defined: {reason}")
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    if not alphabet.issubset(description["model"]["vocab"]):
        return TokenByteLengths(
            None, "bytes per token are not defined: some bytes have no token of their own"
        )
    values = np.zeros(vocabulary_size(tokenizer), dtype=np.int32)
    for token, index in tokenizer.get_vocab(with_added_tokens=False).items():
        # In the byte-level alphabet one character stands for one byte.
        values[index] = len(token) if alphabet.issuperset(token) else len(token.encode())
    for index, added in tokenizer.get_added_tokens_decoder().items():
        values[index] = 0 if added.special else len(added.content.encode())
    return TokenByteLengths(values)


def _no_fixed_bytes(description: dict[str, Any]) -> str:
    model = description.get("model") or {}
    if model.get("type") != "BPE":
        return f"the tokenizer's model is {model.get('type')}, not byte-level BPE"
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return "the tokenizer marks parts of words"
    if description.get("normalizer") is not None:
        return f"the tokenizer normalises text ({description['normalizer'].get('type')})"
    pre_tokenizer = description.get("pre_tokenizer") or {}
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    byte_level = [step for step in steps if step.get("type") == "ByteLevel"]
    if not byte_level:
        return "the tokenizer does not split text into bytes"
    if any(step.get("add_prefix_space") for step in byte_level):
        return "the tokenizer puts a space before the text"
    if any(step.get("behavior") == "Removed" for step in steps):
        return "the tokenizer drops text between words"
    others = {step.get("type") for step in steps} - {"ByteLevel", "Split", "Digits", "Punctuation"}
    if others:
        return f"the tokenizer changes text before splitting it ({', '.join(sorted(map(str, others)))})"
    if any(token.get("lstrip") or token.get("rstrip") for token in description.get("added_tokens", [])):
        return "an added token swallows the spaces around it"
    return ""
