"""``data prepare --bake``: apply ``data.transform`` once, and write the documents it gives as a corpus of their own."""

from pathlib import Path

from drivetrain.archive.atomic import write_bytes, write_fault
from drivetrain.config import DataConfig
from drivetrain.engine.data.baked import BakedFrom, write_baked
from drivetrain.engine.data.corpus import Corpus
from drivetrain.engine.data.indexed import IndexedWriter, index_path
from drivetrain.engine.data.meta import CorpusMeta, fingerprints, write_meta
from drivetrain.engine.data.prepare import tokenizer_path_of
from drivetrain.engine.data.progress import Progress, ProgressCallback, silent
from drivetrain.engine.data.transform import TransformChain, source_hash
from drivetrain.errors import DataError

__all__ = ["bake"]

EACH = 256
"""Documents between two words of progress."""


def bake(
    corpus: Corpus, data: DataConfig, output: str | Path, progress: ProgressCallback = silent
) -> CorpusMeta:
    """Write the corpus ``output``: the documents of ``corpus`` after ``data.transform``, in the same order.

    Killed at any point, it leaves no corpus, or the one that was there before. Nothing is kept of half the work.

    Raises:
        DataError: there is no transform, or a transform's fault.
        EnvironmentFault: the files can't be written.
    """
    if data.transform is None:
        raise DataError("data.transform is absent: there is nothing to apply to the documents")
    output, reader = Path(output), corpus.reader
    chain = TransformChain(data.transform, corpus.vocab_size)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with IndexedWriter(output, corpus.vocab_size) as writer:
            for index in range(reader.num_documents):
                writer.add(chain.apply(reader.document(index).astype("int64"), f"document {index}"))
                if (index + 1) % EACH == 0 or index + 1 == reader.num_documents:
                    progress(
                        Progress(f"applying {data.transform}", writer.num_tokens, reader.num_tokens, "tokens")
                    )
            files = fingerprints(*writer.seal())
            meta = corpus.meta.model_copy(
                update={
                    "origin": "prepared",
                    "max_id": writer.max_id,
                    "files": files,
                    "eod_id": corpus.eod_id,
                }
            )
            baked = BakedFrom(
                transform=data.transform,
                transform_source=source_hash(data.transform),
                source=corpus.prefix,
                source_fingerprint=corpus.fingerprint,
                files=files,
            )
            # The old index goes first and the new one comes last, so that the facts never belong to others.
            index_path(output).unlink(missing_ok=True)
            if corpus.tokenizer_file is not None:
                write_bytes(tokenizer_path_of(output), corpus.tokenizer_file.read_bytes())
            write_baked(output, baked)
            write_meta(output, meta)
            writer.commit()
    except OSError as error:
        raise write_fault(Path(f"{output}.bin"), error, "no corpus was written") from error
    return meta
