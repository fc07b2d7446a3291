"""``benchmarks/overlap.py``: what is made of measured times; and that every part runs, in a lab."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import overlap
from drivetrain.errors import DrivetrainError
from drivetrain.lab import missing
from harness import lab_weak_scaling
from harness.claims import Claim, claim_of_ratios, verdict
from harness.lab_data_parallel import COMPUTE, OFF, WIRE
from harness.lab_figures import Sweep, least_effect, sweep_svg, sweep_text
from harness.lab_ranks import hidden_share, others_share
from harness.lab_weak_scaling import ALL, ONE
from harness.quiet import TICKS_PER_S

OVERLAP = Path(overlap.__file__)


def test_what_is_hidden_is_what_the_step_is_shorter_than_both_in_turn() -> None:
    assert hidden_share([1.0], [0.5], [1.5]) == [0.0]
    assert hidden_share([1.0], [0.5], [1.0]) == [1.0]
    assert hidden_share([1.0, 1.0], [0.5, 0.5], [1.25, 1.75]) == [0.5, -0.5]


def test_what_the_ranks_take_themselves_is_not_others() -> None:
    second = TICKS_PER_S
    assert others_share((0.0, 0, 0), (1.0, second, second)) == 0.0
    assert others_share((0.0, 0, 0), (1.0, 10**9, 0)) > 1.0


SWEEP = Sweep(
    "A step",
    "MB",
    {"ours": [(1, 0.3), (4, 0.2), (200, 0.5)], "DDP": [(1, 0.4), (4, 0.5), (200, 0.6)]},
    {"alone": 0.1},
)


def test_an_optimum_at_an_end_of_a_sweep_is_none_between_the_ends() -> None:
    assert SWEEP.best("ours") == (4, 0.2)
    assert SWEEP.interior("ours") == pytest.approx(1.5)
    assert SWEEP.interior("DDP") == 1.0


def test_a_sweep_is_drawn_with_every_point_and_says_in_words_what_is_least() -> None:
    drawn = sweep_svg(SWEEP)
    assert drawn.count("<circle") == 6
    assert "ours least 200.0 ms at 4" in drawn
    assert "computation" not in drawn
    assert ">alone<" in drawn
    assert "4 200 ms" in sweep_text(SWEEP)


def played(found: dict[str, dict[str, Any]]) -> Any:
    """In place of a lab: what its ranks are to have found."""
    return lambda _script, part, _settings, **_lab: found[part]


def data_found(ours_s: float) -> dict[str, dict[str, Any]]:
    times = {
        COMPUTE: [1.0, 1.0],
        WIRE: [0.7, 0.7],
        OFF: [1.7, 1.7],
        "ours 4 MB": [ours_s, ours_s],
        "DDP 8 MB": [1.15, 1.15],
    }
    return {
        "calibrate": {"compute_s": 1.0, "bytes": 50_000_000},
        "data": {
            "torch": "2.13",
            "sweep": {"ours": [[1, 1.2], [4, ours_s], [200, 1.7]], "DDP": [[1, 1.3], [8, 1.15], [200, 1.7]]},
            "best": {"ours": 4.0, "DDP": 8.0},
            "times": times,
            "others": {name: [0.0, 0.0] for name in times},
            "bytes": 50_000_000,
        },
    }


@pytest.mark.parametrize(("ours_s", "verdicts"), [(1.1, "won won won won"), (1.25, "lost lost lost lost")])
def test_claims_of_data_parallelism_are_won_by_what_is_fast_enough_and_lost_by_what_is_not(
    monkeypatch: pytest.MonkeyPatch, ours_s: float, verdicts: str
) -> None:
    monkeypatch.setattr(overlap, "run_part", played(data_found(ours_s)))
    monkeypatch.setattr(overlap, "draw", lambda *_: "not drawn")
    claims = overlap.data_claims("quick")
    assert [verdict(claim) for claim in claims] == verdicts.split()
    assert claims[0].ratio == pytest.approx((1.7 - ours_s) / 0.7)


def test_the_wire_is_made_as_fast_as_the_claim_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "run_part", played(data_found(1.0)))
    # 50 MB and 5% of headers in 0.7 s.
    assert overlap.rate_for("quick", 0.7) == "600mbit"


def test_a_machine_that_is_too_noisy_wins_nothing() -> None:
    assert least_effect(0.0) == 0.01
    assert least_effect(0.02) == 0.04
    assert least_effect(3.0) == 0.05


def weak_found(all_s: float) -> dict[str, Any]:
    times = {ONE: [1.0, 1.0], COMPUTE: [1.02, 1.02], ALL: [all_s, all_s]}
    return {"times": times, "others": {name: [0.0, 0.0] for name in times}, "bytes": 24_000_000}


def test_weak_scaling_is_won_by_two_ranks_that_lose_little_and_claims_nothing_of_four_against_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lab_weak_scaling, "run_part", lambda *_, ranks, **__: weak_found(1.1 * ranks))
    claims = lab_weak_scaling.weak_claims(OVERLAP, "full", "600mbit")
    assert [verdict(claim) for claim in claims] == ["won", "won", "lost", "information"]
    assert claims[0].ratio == pytest.approx(1 / 1.1)
    assert claims[2].ratio == pytest.approx(1.02 / 2.2)
    assert claims[0].a == [1.1, 1.1]
    assert all("1024 tokens a rank" in claim.note for claim in claims)


def failing(_size: str) -> list[Claim]:
    raise DrivetrainError("rank 1 failed")


def test_a_part_that_fails_leaves_what_was_finished_before_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = claim_of_ratios("first", "none", "", [1.5], target=1.0, note="n")

    def shown(_size: str) -> list[Claim]:
        assert "first" in capsys.readouterr().err, "the claims of a part are printed when it is done"
        return failing(_size)

    monkeypatch.setattr(overlap, "missing", lambda: None)
    monkeypatch.setattr(overlap, "PARTS", {"data": lambda _: [first], "wire": shown})
    with pytest.raises(SystemExit) as ended:
        overlap.main(["--json"])
    assert ended.value.code == "error in part wire: rank 1 failed"
    assert [one["claim"] for one in json.loads(capsys.readouterr().out)["claims"]] == ["first"]


SHORT = ("share", "levels")
"""Parts that long tests run; each of the others takes as long or some minutes."""


@pytest.mark.timeout(1800)  # it may have to wait for the labs of other tests
@pytest.mark.usefixtures("only_labs_here")
@pytest.mark.parametrize(
    "part",
    [
        pytest.param(part, marks=pytest.mark.long if part in SHORT else pytest.mark.exhaustive)
        for part in overlap.PARTS
    ],
)
def test_every_part_runs_in_a_lab_and_prints_one_document(part: str, tmp_path: Path) -> None:
    reason = missing(tmp_path)
    if reason is not None:
        pytest.skip(reason)
    done = subprocess.run(
        [sys.executable, str(OVERLAP), "--tiny", "--json", "--part", part],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    claims = json.loads(done.stdout)["claims"]
    assert claims
    counted = {
        claim["claim"]: claim["ratio"] for claim in claims if claim["claim"].startswith("bytes that leave")
    }
    # What is counted does not depend on how busy the machine is.
    for words, ratio in counted.items():
        assert 1.45 < ratio < 1.55 if "levels" in words else 1.9 < ratio < 2.05, (words, ratio)
    assert bool(counted) == (part in ("levels", "wire"))
