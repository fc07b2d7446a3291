"""``drivetrain generate``: text from a run's newest checkpoint, streamed."""

import sys
from typing import Annotated

import typer

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("generate")(generate)


def generate(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run directory, its name, or `latest`.")],
    prompt: Annotated[
        str, typer.Option("--prompt", help="Text to continue. Empty: from a document's start.")
    ] = "",
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Most tokens to add.")] = 100,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, help="0: always the likeliest.")
    ] = 0.8,
    top_k: Annotated[
        int, typer.Option("--top-k", min=0, help="Draw from the k likeliest. 0: from all.")
    ] = 50,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the draws.")] = 0,
    runs_dir: Annotated[str, typer.Option("--runs-dir", help="Folder of runs, for names.")] = "runs",
    json: Annotated[
        bool, typer.Option("--json", help="One JSON document on stdout instead of a stream.")
    ] = False,
) -> None:
    """Stream text that continues PROMPT from the run's newest checkpoint.

    Example: drivetrain generate latest --prompt "def main(" --temperature 0.5
    """
    from drivetrain.archive.listing import resolve_run
    from drivetrain.cli.environment import require_torch
    from drivetrain.cli.output import show_document

    opened = resolve_run(run, runs_dir)
    require_torch()
    from drivetrain.engine.sampling import stream_text

    def warn(message: str) -> None:
        print(f"warning: {message}", file=sys.stderr)

    pieces = stream_text(
        opened,
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        warn=warn,
    )
    if json:
        show_document({"run": str(opened.path), "prompt": prompt, "text": "".join(pieces)})
        return
    sys.stdout.write(prompt)
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
