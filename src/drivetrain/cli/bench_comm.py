"""``drivetrain bench comm``: rates between pairs of ranks, and which link is slow."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from drivetrain.cli.environment import require_packages
from drivetrain.cli.output import show_document
from drivetrain.errors import DrivetrainError

if TYPE_CHECKING:
    from drivetrain.measure.links import PairRate, SlowLink

__all__ = ["COMM_HELP", "comm"]

COMM_HELP = """Rates between pairs of ranks, one pair at a time, and which link is slow.

Messages of host memory over gloo, as gradients of a CPU run travel. Under torchrun each process is a rank; otherwise
--nproc processes of this machine are started. All pairs of up to 16 ranks, of more each rank and the next.

\b
Example:
  torchrun --nnodes 2 --nproc-per-node 1 ... -m drivetrain bench comm
"""

_LEAST_BYTES = 1_000


def comm(
    nproc: Annotated[
        int | None,
        typer.Option("--nproc", min=2, max=1024, help="Processes on this machine.", show_default=False),
    ] = None,
    message_mb: Annotated[
        float, typer.Option("--message-mb", help="Size of a message in MB (1e6 bytes).")
    ] = 8.0,
    messages: Annotated[
        int,
        typer.Option("--messages", min=3, max=1000, help="Messages in each direction; the median counts."),
    ] = 7,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Rates between pairs of ranks."""
    if not _LEAST_BYTES <= message_mb * 1e6 <= 4e9:
        raise DrivetrainError(
            f"--message-mb {message_mb:g}: from {_LEAST_BYTES / 1e6:g} to 4000, for example 8"
        )
    require_packages("torch")
    from drivetrain.engine.parallel.process_group import Ranks

    if Ranks.started_by_torchrun():
        if nproc is not None:
            raise DrivetrainError(
                "--nproc under torchrun, which has started the processes already: drop one of them"
            )
        _as_one_rank(message_mb, messages, as_json)
        return
    if nproc is None:
        raise DrivetrainError("one process has nobody to send to: give --nproc 2, or start it under torchrun")
    raise typer.Exit(_started_here(nproc, message_mb, messages, as_json))


def _started_here(nproc: int, message_mb: float, messages: int, as_json: bool) -> int:
    from drivetrain.engine.launch import launch_module

    arguments = ["bench", "comm", "--message-mb", f"{message_mb:g}", "--messages", str(messages)]
    launch = launch_module([*arguments, *(["--json"] if as_json else [])], nproc, keeps_stdout=True)
    if launch.signal_name is not None:
        return 130
    if launch.failure is not None:
        print(f"error: {launch.failure}", file=sys.stderr)
    return launch.exit_code


def _as_one_rank(message_mb: float, messages: int, as_json: bool) -> None:
    from drivetrain.engine.link_probe import ProbeSettings, probe_links
    from drivetrain.engine.parallel.process_group import Ranks, join
    from drivetrain.measure.links import slow_links

    settings = ProbeSettings(message_bytes=round(message_mb * 1e6), messages=messages)
    ranks = Ranks.from_environment()
    if ranks.world_size == 1:
        raise DrivetrainError("one process has nobody to send to: start at least two")
    with join(ranks, "cpu", timeout_minutes=5) as group:
        rates = probe_links(group, settings, _progress if group.is_main else None)
    if ranks.rank:
        return
    slow = slow_links(rates)
    for link in slow:
        print(f"warning: slow link {link.in_words()}", file=sys.stderr)
    if as_json:
        show_document(_document(rates, slow, settings.message_bytes))
        return
    typer.echo("from to  where             GB/s   latency, us")
    for one in rates:
        where = "one machine" if one.same_host else "two machines"
        typer.echo(
            f"{one.source:>4} {one.target:<3} {where:<12} {one.bytes_per_s / 1e9:>9.3f} {one.latency_s * 1e6:>13.1f}"
        )
    if not slow:
        typer.echo("no link is slow")


def _progress(done: int, of: int) -> None:
    if done == of or done % 10 == 0:
        print(f"{done} of {of} pairs", file=sys.stderr)


def _document(rates: "Sequence[PairRate]", slow: "Sequence[SlowLink]", message_bytes: int) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "schema": 1,
        "message_bytes": message_bytes,
        "transport": "gloo, host memory",
        "pairs": [asdict(one) for one in rates],
        "slow": [
            {
                "source": link.pair.source,
                "target": link.pair.target,
                "bytes_per_s": link.pair.bytes_per_s,
                "reference_bytes_per_s": link.reference_bytes_per_s,
                "reference": link.reference,
            }
            for link in slow
        ],
    }
