"""``drivetrain data``: make an indexed corpus from text, look at one, let a run go on with a changed one."""

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from drivetrain.cli.environment import require_packages, require_torch
from drivetrain.cli.output import show_document
from drivetrain.errors import DrivetrainError

if TYPE_CHECKING:
    from drivetrain.engine.data.progress import Progress

__all__ = ["register", "show_progress"]

SHOWN_PLACES = 5
SHOWN_SAMPLES = 300
"""Characters of a sample's text."""
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
CacheBytes = Annotated[
    int | None,
    typer.Option(min=1, help="Most bytes on disk of what URLs name.  [default: as data.remote_cache_bytes]"),
]


def register(app: typer.Typer) -> None:
    """Add ``data prepare``, ``data inspect`` and ``data accept``."""
    verb = typer.Typer(
        help="Text to an indexed corpus; show a corpus; let a run go on with a changed one.",
        no_args_is_help=True,
    )
    verb.command("prepare")(_prepare)
    verb.command("inspect")(_inspect)
    verb.command("accept")(_accept)
    app.add_typer(verb, name="data")


@contextmanager
def show_progress() -> Iterator[Callable[["Progress"], None]]:
    """A callback that draws the progress of work on a corpus on stderr: a bar, or a line a phase."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[amount]}"))
    with Bars(
        *columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as bars:
        tasks: dict[str, Any] = {}

        def callback(progress: "Progress") -> None:
            if progress.phase not in tasks:
                if not console.is_terminal or progress.total is None:
                    console.print(progress.phase, markup=False, highlight=False, soft_wrap=True)
                tasks[progress.phase] = bars.add_task(
                    progress.phase, total=progress.total, amount="", visible=progress.total is not None
                )
            if progress.total is not None:
                amount = f"{progress.done:,} of {progress.total:,} {progress.unit}"
                bars.update(tasks[progress.phase], completed=progress.done, amount=amount)

        yield callback


def _prepare(
    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="INPUT...",
            help="Text files, folders, JSON lines (.jsonl, .ndjson, .json; also .gz, .zst), .parquet, .arrow, "
            "WebDataset (.tar), or a folder of MDS or that the datasets library saved; also by URL. With --bake: "
            "overrides of its configuration.",
        ),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="PREFIX", help="Path of the corpus without suffix."),
    ] = None,
    bake: Annotated[
        str | None,
        typer.Option(
            metavar="CONFIG",
            help="Apply data.transform of a configuration to its corpus, once, instead of making one from text.",
        ),
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(help="Train byte-level BPE with this many ids.  [default: 8192 without --tokenizer]"),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="FILE", help="Use this tokenizer.json instead of training one.")
    ] = None,
    json_key: Annotated[str, typer.Option(help="Key, or column of a table, that holds the text.")] = "text",
    eod_token: Annotated[
        str | None,
        typer.Option(help="Token that ends each document.  [default: the tokenizer's own, by usual names]"),
    ] = None,
    drop_duplicates: Annotated[
        bool, typer.Option("--drop-duplicates", help="Of equal documents keep the first alone.")
    ] = False,
    strict: Annotated[
        bool,
        typer.Option("--strict", help="Stop at a broken JSON line, instead of counting it and going on."),
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option(min=1, max=4096, help="Processes that encode.  [default: one a core]"),
    ] = None,
    cache_bytes: CacheBytes = None,
    as_json: AsJson = False,
) -> None:
    """Make an indexed corpus (Megatron .bin and .idx) from text. The same inputs give the same bytes.

    Work that was ended midway, by whatever, goes on where it was when the same command is given again.

    Example: drivetrain data prepare notes/ books.jsonl --output corpora/mine --vocab-size 8192
    """
    require_packages("tokenizers")
    if bake is not None:
        options = {
            "--output": output,
            "--vocab-size": vocab_size,
            "--tokenizer": tokenizer,
            "--eod-token": eod_token,
            "--workers": workers,
            "--cache-bytes": cache_bytes,
            "--drop-duplicates": drop_duplicates or None,
            "--strict": strict or None,
        }
        _bake(bake, inputs or [], [name for name, value in options.items() if value is not None], as_json)
        return
    if not inputs or output is None:
        missing = "INPUT..." if not inputs else "--output PREFIX"
        raise DrivetrainError(f"data prepare: {missing} is missing; see drivetrain data prepare --help")
    from drivetrain.engine.data.prepare import prepare

    with show_progress() as progress:
        meta = prepare(
            inputs,
            output,
            vocab_size=vocab_size,
            tokenizer_path=tokenizer,
            json_key=json_key,
            eod_token=eod_token,
            drop_duplicates=drop_duplicates,
            strict=strict,
            workers=workers,
            cache_bytes=cache_bytes,
            progress=progress,
        )
    document = {"prefix": output, **meta.to_json()}
    if as_json:
        show_document(document)
        return
    typer.echo(f"{output}.bin, .idx: {meta.documents:,} documents, {meta.tokens:,} tokens")
    if meta.text_bytes is not None:
        typer.echo(f"text: {meta.text_bytes:,} bytes, {meta.text_bytes / meta.tokens:.2f} bytes a token")
    short = ""
    if meta.vocab_size_requested is not None and meta.vocab_size != meta.vocab_size_requested:
        short = f" (the text yields no more; {meta.vocab_size_requested:,} were asked for)"
    typer.echo(f"tokenizer: {meta.vocab_size:,} ids{short}")
    for reason, count in meta.skipped.items():
        typer.echo(f"left out: {count:,} {reason}")
    for place in meta.broken_lines[:SHOWN_PLACES]:
        typer.echo(f"  {place}")
    if meta.duplicates and not drop_duplicates:
        typer.echo(
            f"kept: {meta.duplicates:,} documents that are equal to an earlier one (--drop-duplicates)"
        )
    typer.echo(
        f"train on it: drivetrain train llama-2m data.data_path={output} model.vocab_size={meta.vocab_size}"
    )


def _bake(source: str, overrides: list[str], others: list[str], as_json: bool) -> None:
    """Apply the transform of a configuration; say where its result lies, and how to train on it."""
    from drivetrain.config import load_config
    from drivetrain.engine.data.opening import bake_all
    from drivetrain.measure.corpora import baked_data_path

    if others:
        raise DrivetrainError(
            f"--bake takes corpus and tokenizer from its configuration; drop {', '.join(others)}"
        )
    config = load_config(source, overrides).config
    if config.data.transform is None:
        raise DrivetrainError(f"{source}: data.transform is absent: there is nothing to apply")
    with show_progress() as progress:
        written = bake_all(config.data, config.model, progress)
    path = baked_data_path(config) or config.data.data_path
    if as_json:
        show_document({"transform": config.data.transform, "written": written, "data_path": path})
        return
    for prefix in written:
        typer.echo(f"{prefix}.bin, .idx: documents after {config.data.transform}")
    words = " ".join([source, *(one for one in overrides if not one.startswith("data.data_path="))])
    typer.echo(f"train on it: drivetrain train {words} data.data_path={shlex.quote(str(path))}")


def _inspect(
    prefix: Annotated[
        str,
        typer.Argument(
            metavar="CORPUS",
            help="Path or URL of the corpus without suffix; or a .bin of nanoGPT or llm.c, Parquet with input_ids.",
        ),
    ],
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="A tokenizer.json.  [default: the one beside the corpus]"),
    ] = None,
    vocab_size: Annotated[
        int | None, typer.Option(min=1, help="Refuse a corpus that holds ids from this one on.")
    ] = None,
    cache_bytes: CacheBytes = None,
    as_json: AsJson = False,
) -> None:
    """Show what a corpus holds; a damaged one is refused.

    Example: drivetrain data inspect corpora/mine
    """
    require_packages("tokenizers")
    from drivetrain.engine.data.inspection import inspect_corpus

    with show_progress() as progress:
        document = inspect_corpus(prefix, tokenizer, progress, vocab_size=vocab_size, cache_bytes=cache_bytes)
    if as_json:
        show_document(document)
        return
    for key, value in document.items():
        if key not in ("schema", "first_sample", "samples", "ids") and not (
            key == "bits_per_byte_reason" and value is None
        ):
            typer.echo(f"{key.replace('_', ' '):26} {_shown(value)}")
    ids = document["ids"]
    counted = "" if ids["counted_tokens"] == document["tokens"] else f" (of {ids['counted_tokens']:,} tokens)"
    typer.echo(
        f"{'ids' + counted:26} {ids['different_ids']:,} different, {ids['unused_below_largest']:,} below the largest "
        f"never; {ids['ids_that_make_up_half']:,} make up half"
    )
    for row in ids["most_frequent"]:
        shown = f"  {row['text']!r}" if row["text"] is not None else ""
        typer.echo(f"  {row['id']:>8} {row['share']:>7.2%}{shown}")
    for sample in document["samples"]:
        name = f"document {sample['document']:,}"
        typer.echo(f"{name:26} {' '.join(map(str, sample['token_ids'][:16]))} ...")
        if sample["text"] is not None:
            typer.echo(f"{'its text':26} {sample['text'][:SHOWN_SAMPLES]!r}")


def _accept(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run that is to go on.")],
    as_json: AsJson = False,
) -> None:
    """Let a run go on with its corpus as it is now, although it is not the one that the run was started with.

    Steps from the last checkpoint on see other data than they would have; the run records that.

    Example: drivetrain data accept runs/20261129-141503-llama-10m-3f2a
    """
    require_torch()
    from drivetrain.engine.data_acceptance import accept_data

    with show_progress() as progress:
        document = accept_data(run, progress)
    if as_json:
        show_document(document)
        return
    typer.echo(
        f"{document['run']} goes on with {document['prefix']} as it is (fingerprint {document['fingerprint'][:12]})"
    )
    typer.echo(f"continue it with: drivetrain train {document['run']}")


def _shown(value: Any) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(item)}" for key, item in value.items()) or "nothing"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "unknown"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
