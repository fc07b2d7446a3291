"""A run that stands still: the stacks of every rank, and which rank the others wait for.

Each rank watches itself. When no step has ended for most of the time that a collective may take, it writes to the
run's folder ``stacks/``: ``r00001.txt``, the stacks of its threads, and ``r00001.json``, what torch's flight recorder
knows of its collectives. Then the collectives of the waiting ranks meet their time limit and the run ends; the launcher
reads the files. A rank whose interpreter is stuck writes its stacks all the same: a timer outside of Python does it.
"""

import ast
import faulthandler
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import _dump_fr_trace_json  # type: ignore[attr-defined]

__all__ = ["STACKS_FOLDER", "report_hang", "watched", "who_waits"]

STACKS_FOLDER = "stacks"
_SHARE = 0.8
"""Of the collectives' time limit: late enough to mean something, early enough to be there when the run ends."""


@contextmanager
def watched(run_path: Path, rank: int, limit_s: float, progress: Callable[[], object]) -> Iterator[None]:
    """While entered, write this rank's stacks when ``progress()`` has been the same for most of ``limit_s``.

    What was written is removed when it goes on after all, and at an end in order.
    """
    folder = run_path / STACKS_FOLDER
    folder.mkdir(exist_ok=True)
    watch = _Watch(folder, rank, limit_s * _SHARE, progress)
    try:
        yield
    except BaseException:
        watch.stop(keep=True)
        raise
    watch.stop(keep=False)
    with suppress(OSError):  # another rank's file is in it
        folder.rmdir()


class _Watch:
    def __init__(self, folder: Path, rank: int, patience_s: float, progress: Callable[[], object]) -> None:
        self._stacks = folder / f"r{rank:05d}.txt"
        self._collectives = folder / f"r{rank:05d}.json"
        self._unfinished = folder / f"r{rank:05d}.json.part"
        self._patience_s = patience_s
        self._progress = progress
        self._ended = threading.Event()
        self._file = self._stacks.open("w")
        self._collectives.unlink(missing_ok=True)
        self._thread = threading.Thread(target=self._run, name="hang-watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        seen: object = None
        first = True
        still = 0.0
        look_every_s = self._patience_s / 16
        while not self._ended.wait(look_every_s):
            now = self._progress()
            if first or now != seen:
                self._forget()
                # Fires if this thread cannot run any more; otherwise it is set again before.
                faulthandler.dump_traceback_later(self._patience_s * 17 / 16, file=self._file)
                seen, first, still = now, False, 0.0
                continue
            before, still = still, still + look_every_s
            if before < self._patience_s <= still:
                faulthandler.cancel_dump_traceback_later()
                self._write()

    def _write(self) -> None:
        faulthandler.dump_traceback(self._file, all_threads=True)
        self._file.flush()
        # Renamed when complete: the run may be ended while it is written.
        self._unfinished.write_bytes(_dump_fr_trace_json())
        self._unfinished.rename(self._collectives)

    def _forget(self) -> None:
        self._file.seek(0)
        self._file.truncate()
        self._unfinished.unlink(missing_ok=True)
        self._collectives.unlink(missing_ok=True)

    def stop(self, *, keep: bool) -> None:
        self._ended.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        if not keep:
            self._forget()
        empty = self._file.tell() == 0 and self._stacks.stat().st_size == 0
        self._file.close()
        if empty:
            self._stacks.unlink()


def report_hang(run_path: Path, since: float) -> list[str]:
    """Who waited for whom in a run that stood still after ``since`` (seconds since 1970); nothing if it did not."""
    folder = run_path / STACKS_FOLDER
    written = [path for path in sorted(folder.glob("r*.txt")) if path.stat().st_mtime >= since]
    stacks = [path for path in written if path.stat().st_size]
    if not stacks:
        return []
    records = {}
    for path in sorted(folder.glob("r*.json")):
        if path.stat().st_mtime >= since:
            with suppress(ValueError):  # damaged: its rank has written nothing that can be read
                records[int(path.stem[1:])] = json.loads(path.read_text())
    ranks = ", ".join(str(int(path.stem[1:])) for path in stacks)
    return [*who_waits(records), f"the run stood still; stacks of rank {ranks} are in {folder}"]


def who_waits(records: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Which ranks have begun a collective that others of its group have not, from each rank's flight recorder."""
    last: dict[str, dict[int, tuple[int, str]]] = {}
    complete: set[tuple[str, int]] = set()
    members: dict[str, set[int]] = {}
    for rank, record in records.items():
        for config in record.get("pg_config", {}).values():
            listed = config.get("ranks")
            members.setdefault(_name(config["name"], config["desc"]), set()).update(
                ast.literal_eval(listed) if isinstance(listed, str) and listed else []
            )
        for entry in record.get("entries", []):
            if entry["is_p2p"]:
                continue
            group = _name(*entry["process_group"])
            number = int(entry["collective_seq_id"])
            text = f"{entry['profiling_name'].rpartition(':')[2]} of {entry['input_sizes']}"
            if number >= last.setdefault(group, {}).get(rank, (0, ""))[0]:
                last[group][rank] = (number, text)
                (complete.add if entry.get("retired", False) else complete.discard)((group, rank))
    lines = []
    for group, ranks in sorted(last.items()):
        newest = max(number for number, _ in ranks.values())
        waiting = sorted(
            rank for rank, (number, _) in ranks.items() if number == newest and (group, rank) not in complete
        )
        arrived = {rank for rank, (number, _) in ranks.items() if number == newest}
        awaited = sorted((members.get(group, set()) | set(ranks)) - arrived)
        if not awaited or not waiting:
            continue
        what = ranks[waiting[0]][1]
        behind = ", ".join(
            f"rank {rank}, whose last was number {ranks[rank][0]}, {ranks[rank][1]}"
            if rank in ranks
            else f"rank {rank}, which {'has called none' if rank in records else 'has written nothing'}"
            for rank in awaited
        )
        lines.append(
            f"{_ranks(waiting)} in collective number {newest} of group {group}, {what}, for {behind}"
        )
    return lines


def _ranks(waiting: list[int]) -> str:
    return f"rank {waiting[0]} waits" if len(waiting) == 1 else f"ranks {', '.join(map(str, waiting))} wait"


def _name(name: str, description: str) -> str:
    return description if description not in ("", "undefined") else f"default_pg{name}"
