"""A run's newest checkpoint as a source of text."""

from collections.abc import Callable, Iterator

from tokenizers.decoders import DecodeStream

from drivetrain.archive.reader import Run
from drivetrain.engine.checkpoint import find_latest, load_model
from drivetrain.engine.data.corpus import ensure_corpus
from drivetrain.engine.failures import explained
from drivetrain.engine.generation import generate
from drivetrain.engine.model.decoder import Decoder
from drivetrain.engine.precision import compute_dtype
from drivetrain.errors import DrivetrainError, RunError

__all__ = ["stream_text"]


def stream_text(
    run: Run,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
    warn: Callable[[str], None],
) -> Iterator[str]:
    """Yield pieces of text that follow ``prompt``, as soon as they are whole characters.

    Args:
        warn: told of each damaged checkpoint that was passed over.

    Raises:
        DrivetrainError: no checkpoint, no tokenizer, or one that does not fit.
    """
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise DrivetrainError(f"--prompt: no UTF-8 text at character {error.start}") from None
    config = run.config()
    checkpoint = find_latest(
        run.path / "checkpoints",
        lambda path, why: warn(f"checkpoint {path.name} is damaged ({why}); not used"),
    )
    if checkpoint is None:
        raise RunError(f"{run.path} has no checkpoint yet; train it further, or set checkpoint.save_interval")
    corpus = ensure_corpus(config.data, config.model)
    tokenizer = corpus.require_tokenizer()
    with explained():
        decoder = Decoder(config.model, compute_dtype(config.precision))
        load_model(checkpoint, decoder)
    start = tokenizer.encode(prompt, add_special_tokens=False).ids
    if corpus.eod_id is not None:
        # A document begins after the end of another one: that is how the model has seen every beginning.
        start = [corpus.eod_id, *start]
    stream = DecodeStream(skip_special_tokens=True)
    for token in generate(
        decoder,
        start,
        max_new_tokens=max_new_tokens,
        context_length=min(config.model.seq_length, config.model.max_positions),
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        end_id=corpus.eod_id,
        vocab_size=min(tokenizer.get_vocab_size(), config.model.vocab_size),
    ):
        piece = stream.step(tokenizer, token)
        if piece is not None:
            yield piece
