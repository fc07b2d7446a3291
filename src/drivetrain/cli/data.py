"""``drivetrain data``: make an indexed corpus from text, and look at one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from drivetrain.cli.environment import require_packages
from drivetrain.cli.output import show_document

if TYPE_CHECKING:
    from drivetrain.engine.data.progress import Progress

__all__ = ["register", "show_progress"]

AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]


def register(app: typer.Typer) -> None:
    """Add ``data prepare`` and ``data inspect``."""
    verb = typer.Typer(help="Text to an indexed corpus; show a corpus.", no_args_is_help=True)
    verb.command("prepare")(_prepare)
    verb.command("inspect")(_inspect)
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
        list[str],
        typer.Argument(
            metavar="INPUT...",
            help="Text files, folders, .jsonl/.ndjson/.json (one object a line) or .parquet files.",
        ),
    ],
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="PREFIX", help="Path of the corpus without suffix.")
    ],
    vocab_size: Annotated[
        int | None,
        typer.Option(help="Train byte-level BPE with this many ids.  [default: 8192 without --tokenizer]"),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="FILE", help="Use this tokenizer.json instead of training one.")
    ] = None,
    json_key: Annotated[str, typer.Option(help="Key, or Parquet column, that holds the text.")] = "text",
    eod_token: Annotated[
        str | None,
        typer.Option(help="Token that ends each document.  [default: the tokenizer's own, by usual names]"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make an indexed corpus (Megatron .bin and .idx) from text. The same inputs give the same bytes.

    Example: drivetrain data prepare notes/ books.jsonl --output corpora/mine --vocab-size 8192
    """
    require_packages("tokenizers")
    from drivetrain.engine.data.prepare import prepare

    with show_progress() as progress:
        meta = prepare(
            inputs,
            output,
            vocab_size=vocab_size,
            tokenizer_path=tokenizer,
            json_key=json_key,
            eod_token=eod_token,
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
    typer.echo(
        f"train on it: drivetrain train llama-2m data.data_path={output} model.vocab_size={meta.vocab_size}"
    )


def _inspect(
    prefix: Annotated[str, typer.Argument(metavar="PREFIX", help="Path of the corpus without suffix.")],
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="A tokenizer.json.  [default: the one beside the corpus]"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what a corpus holds; a damaged one is refused.

    Example: drivetrain data inspect corpora/mine
    """
    require_packages("tokenizers")
    from drivetrain.engine.data.inspection import inspect_corpus

    with show_progress() as progress:
        document = inspect_corpus(prefix, tokenizer, progress)
    if as_json:
        show_document(document)
        return
    for key, value in document.items():
        if key not in ("schema", "first_sample") and not (key == "bits_per_byte_reason" and value is None):
            typer.echo(f"{key.replace('_', ' '):26} {_shown(value)}")
    sample = document["first_sample"]
    typer.echo(f"{'first tokens':26} {' '.join(map(str, sample['token_ids'][:16]))} ...")
    if sample["text"] is not None:
        typer.echo(f"{'first text':26} {sample['text']!r}")


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
