"""All parts together: the JSON document, its claims, and one table."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from gpu_parts.record import COPY, DRY, PRODUCTS
from harness.claims import Claim, claim_of_ratios, claim_of_times

__all__ = ["claims_of", "document_of", "is_wrong", "table"]

_COPIED = "a device copy of the same bytes"
_SHARE = "share of the bandwidth of a copy"
_BAD = ("wrong", "failed")


def document_of(head: Mapping[str, Any], parts: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """What is written: ``head``, the parts so far, and their claims; of ``names``, those that are not there yet."""
    waiting = [name for name in names if name not in parts]
    claims = [] if head["dry"] else claims_of(parts, head["device"])
    return {**head, "parts": dict(parts), "not_run": waiting, "claims": [asdict(claim) for claim in claims]}


def is_wrong(document: Mapping[str, Any]) -> bool:
    """Whether a part did not end well, or a backend failed or computed something else."""
    return any(
        part["status"] not in ("done", "left out") or any(row["verdict"] in _BAD for row in part["rows"])
        for part in document["parts"].values()
    )


def claims_of(parts: Mapping[str, Any], device: Mapping[str, Any]) -> list[Claim]:
    """The best of our backends against a copy of the same bytes, which has a target, and against each other one."""
    claims: list[Claim] = []
    for name in ("bandwidth", "loss", "attention"):
        part = parts.get(name, {"rows": [], "facts": {}})
        timed: dict[str, list[dict[str, Any]]] = {}
        for row in part["rows"]:
            if row["times"]:
                timed.setdefault(row["what"], []).append(row)
        for what, rows in timed.items():
            ours = [row for row in rows if row["ours"]]
            if ours:
                best = min(ours, key=lambda row: median(row["times"]))
                claims += _claims(name, what, best, rows, part["facts"].get("target", 0.0), device)
    return claims


def _claims(
    part: str,
    what: str,
    best: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    target: float,
    device: Mapping[str, Any],
) -> list[Claim]:
    note = (
        f"ours is {best['backend']}; {device['device']}, CUDA events, medians of {len(best['times'])} calls"
    )
    share = best["figures"].get("share_of_copy")
    found = []
    for row in rows:
        is_copy = row["backend"] == COPY
        if row["ours"] or row["backend"] == PRODUCTS or (is_copy and part == "loss" and share is None):
            continue
        if is_copy and part == "loss":
            beyond = f"{note}; of the time beyond the three products, which has no interval"
            found.append(
                claim_of_ratios(
                    f"{what}: {_SHARE}", _COPIED, str(device["torch"]), [share], target=target, note=beyond
                )
            )
            continue
        found.append(
            claim_of_times(
                f"{what}: {_SHARE if is_copy else 'time'}",
                _COPIED if is_copy else row["backend"],
                str(device["torch"]),
                best["times"],
                row["times"],
                target=target if is_copy else 0.0,
                note=note,
            )
        )
    return found


def table(document: Mapping[str, Any]) -> str:
    """As text, a line for each row, then what was left out, part by part."""
    device = document["device"]
    libraries = ", ".join(f"{name} {version}" for name, version in device["libraries"].items())
    lines = [
        f"{device['device']}, torch {device['torch']}, CUDA {device['cuda']}; {libraries}",
        f"{document['date']}, {document['command']}",
    ]
    if document["dry"]:
        lines.append(f"{DRY}: tiny shapes on a CPU; this shows that the script runs, and nothing else")
    for name, part in document["parts"].items():
        took = f", {part['seconds']:g} s" if "seconds" in part and not document["dry"] else ""
        lines += ["", f"== {name}: {part['status']}{took}"]
        lines += _rows(part["rows"])
        if part["error"]:
            lines.append(f"  {part['error'].strip().splitlines()[-1]}")
        lines += [f"  left out: {one}" for one in part["left_out"]]
    lines += [f"\n== {name}: not run" for name in document["not_run"]]
    return "\n".join(lines)


def _rows(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    if not rows:
        return []
    first = max(len(row["what"]) for row in rows)
    second = max(len(row["backend"]) for row in rows)
    return [
        f"  {row['what']:<{first}}  {row['backend']:<{second}}  {row['verdict']:<11}  {row['said']}"
        for row in rows
    ]
