"""What ``drivetrain lab`` does."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drivetrain.cli.duration import seconds_of_duration
from drivetrain.cli.output import show_document
from drivetrain.errors import DrivetrainError
from drivetrain.lab import Lab, LabRun, clean_up, find_lab, format_rate, known_labs
from drivetrain.lab.state import DEFAULT_FOLDER

__all__ = ["lab_down", "lab_run", "lab_show", "lab_up"]

_SAVE_WITHIN_S = 30.0
"""What torchrun's agent gives its ranks too."""


def _folder() -> Path:
    return Path(os.environ.get("DRIVETRAIN_LAB_DIR") or DEFAULT_FOLDER)


def lab_up(hosts: int, ranks: int, rate: str, links: Sequence[str], name: str, *, as_json: bool) -> int:
    """The verb; returns the exit code."""
    lab = Lab(hosts, ranks, rate, links=dict(map(_link, links)), folder=_folder())
    lab.make(name)
    document = _described(lab)
    if as_json:
        show_document(document)
    else:
        print("\n".join(_lines(document)))
        print("run something in it with: drivetrain lab run -- COMMAND", file=sys.stderr)
    return 0


def _link(text: str) -> tuple[int, str]:
    number, equals, rate = text.partition("=")
    if not equals or not number.strip().isdecimal():
        raise DrivetrainError(
            f"--link {text!r}: write the number of a host and its rate, as in --link 1=100mbit"
        )
    return int(number), rate


def lab_run(command: Sequence[str], name: str, time_limit: str | None, *, as_json: bool) -> int:
    """The verb; returns the exit code."""
    limit_s = None if time_limit is None else seconds_of_duration("--time-limit", time_limit)
    if limit_s == 0:
        raise DrivetrainError(f"--time-limit {time_limit!r} leaves no time; leave it out for no limit")
    lab = find_lab(name, _folder())

    def tell(rank: int, stream: str, line: str) -> None:
        # One write a line: several threads come here.
        if rank == 0 and stream == "stdout" and not as_json:
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
        else:
            sys.stderr.write(f"[rank {rank}] {line}\n")
            sys.stderr.flush()

    done = lab.run(command, time_limit_s=limit_s, grace_s=_SAVE_WITHIN_S, on_line=tell)
    if as_json:
        show_document(_of_run(done))
    elif done.failure is not None:
        print(done.failure, file=sys.stderr)
    return done.exit_code


def _of_run(done: LabRun) -> dict[str, Any]:
    return {
        "schema": 1,
        "exit_code": done.exit_code,
        "failure": done.failure,
        "seconds": done.seconds,
        "ranks": [
            {
                "rank": one.rank,
                "host": one.host,
                "exit_code": one.exit_code,
                "stdout": one.stdout,
                "stderr": one.stderr,
            }
            for one in done.ranks
        ],
    }


def lab_show(*, as_json: bool) -> int:
    """The verb; returns the exit code."""
    folder = _folder()
    described = []
    for state in known_labs(folder):
        if state.is_stale or not state.is_complete:
            described.append({"name": state.id, "state": "stale" if state.is_stale else "being made"})
        else:
            described.append(_described(find_lab(state.id, folder)))
    if as_json:
        show_document({"schema": 1, "labs": described})
        return 0
    for document in described:
        print("\n".join(_lines(document)))
    if not described:
        print("no lab is up; make one with: drivetrain lab up")
    return 0


def lab_down(name: str | None, *, as_json: bool) -> int:
    """The verb; returns the exit code."""
    folder = _folder()
    stale = clean_up(folder)
    taken = []
    if name is not None:
        if name not in stale:
            find_lab(name, folder).take_down()
            taken.append(name)
    else:
        for state in known_labs(folder):
            # One that belongs to a process that lives is that process's to take down.
            if state.owner is None:
                find_lab(state.id, folder).take_down()
                taken.append(state.id)
    if as_json:
        show_document({"schema": 1, "taken_down": taken, "cleaned_up": stale})
        return 0
    for words, names in (("taken down", taken), ("cleaned up after a kill", stale)):
        for one in names:
            print(f"{one}: {words}")
    if not taken and not stale:
        print("no lab is up")
    return 0


def _described(lab: Lab) -> dict[str, Any]:
    topology, processes = lab.topology, lab.processes()
    return {
        "name": lab.id,
        "state": "in use" if processes else "up",
        "ranks_per_host": topology.ranks_per_host,
        "world_size": topology.world_size,
        "hosts": [
            {
                "host": number,
                "address": topology.address(number),
                "up_bits_per_s": link.up,
                "down_bits_per_s": link.down,
                "sent_bytes": passed.sent,
                "received_bytes": passed.received,
                "processes": processes.get(number, []),
            }
            for number, (link, passed) in enumerate(zip(topology.links, lab.wire_bytes(), strict=True))
        ],
    }


def _lines(document: dict[str, Any]) -> list[str]:
    if "hosts" not in document:
        return [
            f"{document['name']}: {document['state']}; `drivetrain lab down` removes what was left behind"
        ]
    lines = [
        f"{document['name']}: {document['state']}, {len(document['hosts'])} hosts of {document['ranks_per_host']} ranks"
    ]
    for host in document["hosts"]:
        lines.append(
            f"  host {host['host']}  {host['address']:<12} up {format_rate(host['up_bits_per_s']):<10} "
            f"down {format_rate(host['down_bits_per_s']):<10} sent {host['sent_bytes']:,} B, received "
            f"{host['received_bytes']:,} B, {len(host['processes'])} processes"
        )
    return lines
