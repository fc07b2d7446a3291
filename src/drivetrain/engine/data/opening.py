"""The data of a configuration: one corpus or a blend of several, made first where a transform is to be applied once."""

from pathlib import Path

from drivetrain.addresses import require_apart
from drivetrain.archive.atomic import write_fault
from drivetrain.config import DataConfig, ModelConfig
from drivetrain.config.blend import BAKED, corpora_of, with_prefixes
from drivetrain.engine.data.baked import read_baked
from drivetrain.engine.data.baking import bake
from drivetrain.engine.data.blend import BlendedCorpus, BlendedSamples
from drivetrain.engine.data.corpus import Corpus
from drivetrain.engine.data.fingerprint import combined_fingerprint
from drivetrain.engine.data.indexed import index_path
from drivetrain.engine.data.progress import ProgressCallback, silent
from drivetrain.engine.data.remote.cache import remote_cache
from drivetrain.engine.data.remote.inputs import bring_corpus
from drivetrain.engine.data.remote.store import is_url
from drivetrain.engine.data.samples import Samples
from drivetrain.engine.data.sequences import Sequences
from drivetrain.engine.data.split import Split
from drivetrain.engine.data.standard_library import only_one, standard_library_corpus
from drivetrain.engine.data.transform import source_hash
from drivetrain.measure.corpora import baked_prefix, standard_library_prefix, transform_key

__all__ = ["bake_all", "data_identity", "open_data", "samples_of"]


def open_data(data: DataConfig, model: ModelConfig, progress: ProgressCallback = silent) -> Corpus:
    """The corpus of a configuration, or the blend of several; the standard library's where none is named.

    Of a prefix that ``bake_transforms`` gives, and that is not there, the corpus is made: once, by one process.

    Raises:
        DataError: a corpus is damaged, missing, or does not fit the model or the others.
    """
    if data.data_path is None:
        prefix = standard_library_corpus(model.vocab_size, progress=progress)
        return Corpus.open(prefix, data.tokenizer_path, vocab_size=model.vocab_size, progress=progress)
    named = corpora_of(data.data_path)
    require_apart(one.prefix for one in named if is_url(one.prefix))
    opened = [_open_one(one.prefix, data, model, progress) for one in named]
    if len(opened) == 1:
        return opened[0]
    return BlendedCorpus.of(data.data_path, opened, [one.weight for one in named], progress)


def samples_of(corpus: Corpus, data: DataConfig, split: Split, seq_length: int, seed: int) -> Samples:
    """The samples of one split of what :func:`open_data` gave.

    Raises:
        DataError: too few tokens for one sample; a transform that cannot be found.
    """
    if isinstance(corpus, BlendedCorpus):
        return BlendedSamples(corpus, data, split, seq_length, seed)
    return Sequences(corpus, data, split, seq_length, seed)


def bake_all(data: DataConfig, model: ModelConfig, progress: ProgressCallback = silent) -> list[str]:
    """Apply ``data.transform`` to each corpus of a configuration, whatever was made before; the prefixes written."""
    path = data.data_path and with_prefixes(data.data_path, _unbaked)
    source = open_data(data.model_copy(update={"transform": None, "data_path": path}), model, progress)
    parts = source.parts if isinstance(source, BlendedCorpus) else (source,)
    written = []
    for part in parts:
        output = baked_prefix(part.prefix, data.transform or "")
        bake(part, data, output, progress)
        written.append(output)
    return written


def _unbaked(prefix: str) -> str:
    """The corpus that ``prefix`` was made from, where it was."""
    found = BAKED.match(prefix)
    return prefix if found is None else found["source"]


def _open_one(prefix: str, data: DataConfig, model: ModelConfig, progress: ProgressCallback) -> Corpus:
    if is_url(prefix):
        return _open_url(prefix, data, model, progress)
    found = BAKED.match(prefix)
    ours = found is not None and data.transform is not None and found["key"] == transform_key(data.transform)
    if found is not None and ours and not index_path(prefix).exists():
        _bake_once(prefix, found["source"], data, model, progress)
    return Corpus.open(prefix, data.tokenizer_path, vocab_size=model.vocab_size, progress=progress)


def _open_url(url: str, data: DataConfig, model: ModelConfig, progress: ProgressCallback) -> Corpus:
    """What a URL names, brought here; what its transform gives is kept beside it, on this machine."""
    baked = BAKED.match(url)
    if baked is not None and (data.transform is None or baked["key"] != transform_key(data.transform)):
        baked = None
    source = url if baked is None else baked["source"]
    brought = bring_corpus(source, remote_cache(data.remote_cache_path, data.remote_cache_bytes), progress)
    try:
        corpus = _open_one(f"{brought.path}{url.removeprefix(source)}", data, model, progress)
    except BaseException:
        brought.close()
        raise
    brought.hold_for(corpus.reader)
    return corpus


def _bake_once(
    prefix: str, source: str, data: DataConfig, model: ModelConfig, progress: ProgressCallback
) -> None:
    if Path(source) == standard_library_prefix(model.vocab_size):
        standard_library_corpus(model.vocab_size, progress=progress)
    corpus = Corpus.open(source, data.tokenizer_path, vocab_size=model.vocab_size, progress=progress)
    lock = Path(f"{prefix}.lock")
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        with only_one(lock, progress):
            if not index_path(prefix).exists():
                bake(corpus, data, prefix, progress)
    except OSError as error:
        raise write_fault(lock, error, "no corpus was written") from error


def data_identity(corpus: Corpus, data: DataConfig) -> str:
    """Hex SHA-256 of the documents that training sees: equal for a corpus with a transform, and for the corpus that
    holds the result of the same version of that transform. Without a transform it is the corpus' fingerprint."""
    if data.transform is None:
        return corpus.fingerprint
    if isinstance(corpus, BlendedCorpus):
        parts = zip(corpus.parts, corpus.weights, strict=True)
        return combined_fingerprint(*(f"{weight} {data_identity(part, data)}" for part, weight in parts))
    baked = read_baked(corpus.prefix)
    source = corpus.fingerprint if baked is None else baked.source_fingerprint
    return combined_fingerprint(source, source_hash(data.transform))
