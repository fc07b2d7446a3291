"""``check --dry-run``: chosen ranks of a world of any size, built without memory."""

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from drivetrain.errors import DrivetrainError

if TYPE_CHECKING:
    from drivetrain.config import RunConfig
    from drivetrain.engine.dry_run_ranks import DryWorld, RankFigures

__all__ = ["dry_run_document", "parse_ranks", "print_dry_run"]

_SILENT_S = 2.0
"""Progress is shown of what takes longer."""


def parse_ranks(text: str, world_size: int) -> list[int]:
    """``"0,7,4095"`` as rank numbers.

    Raises:
        DrivetrainError: not a list of ranks of the world.
    """
    try:
        ranks = [int(part) for part in text.split(",")]
    except ValueError:
        raise DrivetrainError(
            f"--ranks {text}: expected rank numbers with commas between them, such as 0,{world_size - 1}"
        ) from None
    for rank in ranks:
        if not 0 <= rank < world_size:
            nearest = min(max(rank, 0), world_size - 1)
            raise DrivetrainError(
                f"--ranks {text}: {world_size} processes have the ranks 0 to {world_size - 1}; the nearest to {rank} "
                f"is {nearest}"
            )
    return ranks


def dry_run_document(
    config: "RunConfig", world_size: int, ranks: list[int] | None, *, by_parameter: bool
) -> dict[str, Any]:
    """What ``--json`` shows of it. Progress goes to stderr."""
    from drivetrain.cli.environment import require_torch

    require_torch()
    from drivetrain.engine.dry_run_ranks import dry_run_of_ranks

    world = dry_run_of_ranks(config, world_size, ranks, progress=_progress())
    return {
        "failed": [
            {"rank": rank, "error": failure.error, "traceback": failure.traceback}
            for rank, failure in sorted(world.failed.items())
        ],
        "ranks": [_rank(figures, by_parameter) for figures in world.ranks],
        "kinds": world.kinds,
        "all_ranks": _total(world),
        "model_elements": world.model_elements,
    }


def _progress() -> Callable[[int, int], None]:
    started = time.monotonic()

    def show(done: int, total: int) -> None:
        if time.monotonic() - started > _SILENT_S and done < total:
            print(f"dry run: {done} of {total} ranks", file=sys.stderr, flush=True)

    return show


def _rank(figures: "RankFigures", by_parameter: bool) -> dict[str, Any]:
    resident = figures.resident
    amounts = {
        "parameters": (resident.parameters, "counted"),
        "gradients": (resident.gradients, figures.gradients_source),
        "moments": (resident.moments, "counted"),
    }
    document: dict[str, Any] = {
        "rank": figures.rank,
        "place": dict(figures.place),
        "stands_for": figures.stands_for,
        **{
            name: {"elements": amount.elements, "bytes": amount.bytes, "source": source}
            for name, (amount, source) in amounts.items()
        },
        "collectives": [
            {
                "group": group,
                "kind": kind,
                "calls": None if count is None else count.calls,
                "bytes": None if count is None else count.bytes,
                "source": figures.traffic_source if count is not None else None,
            }
            for (group, kind), count in sorted(figures.traffic.items())
        ],
        "why_formula": figures.why_formula,
    }
    if by_parameter:
        document["by_parameter"] = [
            {
                "name": name,
                "full_shape": list(shape),
                "shape": [last - first for first, last in ranges],
                "offset": [first for first, _ in ranges],
            }
            for name, shape, ranges in figures.parts
        ]
    return document


def _total(world: "DryWorld") -> dict[str, Any]:
    total = world.total
    amounts = {
        "parameters": total.parameters,
        "gradients": total.gradients,
        "moments": total.moments,
    }
    return {
        name: {"elements": amount.elements, "bytes": amount.bytes, "source": "formula"}
        for name, amount in amounts.items()
    }


def print_dry_run(document: dict[str, Any]) -> None:
    """The same for a reader; failures first, on stderr."""
    for failure in document["failed"]:
        print(f"rank {failure['rank']} cannot be shown: {failure['error']}", file=sys.stderr)
        if failure["traceback"]:
            print(failure["traceback"], file=sys.stderr)
    ranks = document["ranks"]
    print(
        f"dry run: {len(ranks)} rank{'s' if len(ranks) != 1 else ''} built without memory, "
        f"of {document['kinds']} kind{'s' if document['kinds'] != 1 else ''}"
    )
    for rank in ranks:
        place = ", ".join(f"{dim} {index}" for dim, index in rank["place"].items())
        alike = f"; {rank['stands_for']} ranks are alike" if rank["stands_for"] > 1 else ""
        print(f"rank {rank['rank']} ({place}{alike})")
        _print_amounts(rank)
        if rank["why_formula"] is not None:
            print(f"  by the formulas, because {rank['why_formula']}")
        for one in rank["collectives"]:
            figures = (
                f"{one['calls']:>10,} calls {one['bytes']:>20,} bytes a step  {one['source']}"
                if one["source"] is not None
                else "neither counted nor given by a formula"
            )
            print(f"  {one['group']:12} {one['kind']:14} {figures}")
        for part in rank.get("by_parameter", []):
            shape, full = ("x".join(map(str, part[name])) for name in ("shape", "full_shape"))
            print(f"  {part['name']:42} {shape:>18} of {full}, from {tuple(part['offset'])}")
    print("all ranks together")
    _print_amounts(document["all_ranks"])


def _print_amounts(amounts: dict[str, Any]) -> None:
    for name in ("parameters", "gradients", "moments"):
        one = amounts[name]
        print(f"  {name:27} {one['elements']:>20,} elements {one['bytes']:>20,} bytes  {one['source']}")
