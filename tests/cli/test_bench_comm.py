"""``drivetrain bench comm``: the rates of real processes, and what is refused."""

import json
import os
from pathlib import Path

import pytest

from drivetrain.engine.link_probe import ALL_PAIRS_UP_TO, ProbeSettings, pairs_of, probe_links
from drivetrain.engine.parallel.process_group import Ranks, join
from drivetrain.measure.links import PairRate
from forkserver import run_drivetrain
from rank_processes import on_kept_ranks

SMALL = ProbeSettings(message_bytes=20_000, messages=3, pings=3)


def _probe() -> list[PairRate]:
    with join(Ranks.from_environment(), "cpu", 1.0) as group:
        return probe_links(group, SMALL)


def test_every_rank_knows_both_directions_of_every_pair() -> None:
    answers = on_kept_ranks(_probe, 3)
    assert answers[0] == answers[1] == answers[2]
    assert {(one.source, one.target) for one in answers[0]} == {
        (a, b) for a in range(3) for b in range(3) if a != b
    }
    assert all(one.bytes_per_s > 0 and one.latency_s > 0 and one.same_host for one in answers[0])


def test_of_many_ranks_each_is_probed_with_the_next() -> None:
    assert len(pairs_of(ALL_PAIRS_UP_TO)) == ALL_PAIRS_UP_TO * (ALL_PAIRS_UP_TO - 1) // 2
    pairs = pairs_of(ALL_PAIRS_UP_TO + 1)
    assert len(pairs) == ALL_PAIRS_UP_TO + 1
    assert {rank for pair in pairs for rank in pair} == set(range(ALL_PAIRS_UP_TO + 1))


@pytest.mark.long
def test_processes_of_this_machine_are_started_and_one_document_is_printed(tmp_path: Path) -> None:
    done = run_drivetrain(
        ["bench", "comm", "--nproc", "2", "--message-mb", "0.1", "--messages", "3", "--json"],
        tmp_path,
        dict(os.environ),
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [(one["source"], one["target"]) for one in document["pairs"]] == [(0, 1), (1, 0)]
    assert document["message_bytes"] == 100_000


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        ([], {}, "give --nproc 2"),
        (["--nproc", "2", "--message-mb", "0"], {}, "from 0.001 to 4000"),
        (["--nproc", "2"], {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, "drop one of them"),
        ([], {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}, "start at least two"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_message(
    tmp_path: Path, arguments: list[str], environment: dict[str, str], words: str
) -> None:
    done = run_drivetrain(["bench", "comm", *arguments], tmp_path, {**os.environ, **environment}, timeout=240)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
