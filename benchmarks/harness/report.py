"""RESULTS.md: the claims as a table, with the machine, versions, commands and date they were measured with."""

import datetime
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from drivetrain.measure.machine import cpu_flags, cpu_model
from harness.claims import Claim, verdict

__all__ = ["Section", "machine", "markdown"]

PACKAGES = ("drivetrain", "torch", "transformers", "accelerate", "lightning", "numpy")
INSTRUCTIONS = ("avx512f", "avx512_bf16", "amx_bf16")


@dataclass(frozen=True)
class Section:
    """One script's results. ``where``: the machine they are of; empty: that of the page."""

    script: str
    command: str
    claims: Sequence[Claim]
    where: str = ""


def markdown(sections: Sequence[Section], *, date: datetime.date, minutes: float, source: str) -> str:
    """The whole page. ``source`` names the revision of our code."""
    claims = [claim for section in sections for claim in section.claims]
    counts = {
        kind: sum(verdict(claim) == kind for claim in claims) for kind in ("won", "lost", "information")
    }
    lines = [
        "# Results",
        "",
        "Every claim is turned so that a ratio of at least its target is won; losses are listed like wins. "
        "How they are measured: [README.md](README.md). Raw step times: [results/](results/).",
        "",
        f"{counts['won']} won, {counts['lost']} lost, {counts['information']} for information. *Within noise*: the "
        "interval holds the target, so the verdict may turn over in another session.",
        "",
        *_facts(date, minutes, source),
    ]
    for section in sections:
        lines += ["", f"## {section.script}", "", f"`{section.command}`", ""]
        lines += [f"On {section.where}.", ""] if section.where else []
        lines += [*_table(section.claims), ""]
        lines += [f"{number}. {claim.note}" for number, claim in enumerate(section.claims, start=1)]
    return "\n".join(lines) + "\n"


def machine() -> str:
    """This machine in words: what decides how its figures compare with another's."""
    flags = cpu_flags()
    has: Mapping[str, str] = {name: "yes" if name in flags else "no" for name in INSTRUCTIONS}
    return f"{cpu_model()}, {os.cpu_count()} CPUs, " + ", ".join(f"{k}: {v}" for k, v in has.items())


def _facts(date: datetime.date, minutes: float, source: str) -> list[str]:
    rows = {
        "date": date.isoformat(),
        "machine": f"{machine()}, where a section names no other",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "versions": ", ".join(f"{name} {_version(name)}" for name in PACKAGES),
        "revision": source,
        "duration": f"{minutes:.0f} minutes",
    }
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _table(claims: Sequence[Claim]) -> list[str]:
    lines = [
        "| | claim | ours | theirs | ratio | 95% interval | target | |",
        "|---|---|---:|---:|---:|---|---:|---|",
    ]
    for number, claim in enumerate(claims, start=1):
        target = "" if verdict(claim) == "information" else f"{claim.target:g}"
        lines.append(
            f"| {number} | {claim.claim}{_against(claim)} | {_time(claim.a)} | {_time(claim.b)} | "
            f"{claim.ratio:.3f} | {claim.low:.3f} to {claim.high:.3f} | {target} | {_outcome(claim)} |"
        )
    return lines


def _outcome(claim: Claim) -> str:
    """The verdict, and whether the interval leaves it open."""
    outcome = verdict(claim)
    if outcome == "won" and claim.low < claim.target:
        return "won, within noise"
    if outcome == "lost" and claim.high >= claim.target:
        return "lost, within noise"
    return outcome


def _against(claim: Claim) -> str:
    return f"; {claim.peer} {claim.peer_version}" if claim.peer_version else ""


def _time(times: Sequence[float]) -> str:
    if not times:
        return ""
    ordered = sorted(times)
    middle = len(ordered) // 2
    median = ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
    return f"{median * 1e3:.1f} ms"
