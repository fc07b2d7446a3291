"""The benchmark that goes on in another layout: what it compares, and two pairs of layouts to the end."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from drivetrain.engine.checkpoint.manifest import damage, seal
from harness.claims import verdict
from harness.layout_runs import LAYOUTS, LayoutRuns
from resume_layouts import (
    FULL,
    MOST_ROOM,
    NEAR,
    ONE,
    QUICK,
    STEPS,
    Found,
    Plan,
    Session,
    _apart,
    claims_of,
    differing_files,
    room,
    with_other_moment,
)

FOUND = Found(loss=2e-7, at_step=30, moments=1e-6, same_bits=False, wrong=None)


def test_there_are_six_pairs_and_every_layout_has_a_name() -> None:
    assert sum(before != after for before, after in FULL.pairs) >= 6
    assert {layout for pair in (*FULL.pairs, *QUICK.pairs) for layout in pair} <= LAYOUTS.keys()
    assert set(FULL.exported) <= LAYOUTS.keys()


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (FOUND, NEAR / 2e-7),
        (replace(FOUND, loss=2e-6), 0.5),
        (replace(FOUND, loss=0.0), MOST_ROOM),
        (replace(FOUND, loss=float("inf")), 0.0),
        (replace(FOUND, wrong="it ends elsewhere"), 0.0),
        (replace(FOUND, moments=2e-4), 0.0),
        (replace(FOUND, moments=float("nan")), 0.0),
    ],
)
def test_room_is_left_where_losses_moments_and_counters_agree(found: Found, expected: float) -> None:
    assert room(found) == pytest.approx(expected)


def test_moments_are_apart_by_norm_and_another_shape_is_no_moment() -> None:
    one = np.array([3.0, 4.0], dtype=np.float32)
    assert _apart(one, np.array([3.0, 4.5], dtype=np.float32)) == pytest.approx(0.1)
    assert _apart(one, one) == 0
    assert _apart(one * 0, one * 0) == 0
    assert _apart(one * 0, one) == float("inf")
    assert _apart(one, one[:1]) == float("inf")


def test_files_that_are_missing_too_many_or_other_are_named(tmp_path: Path) -> None:
    for folder, names in (("a", "xyz"), ("b", "xyw")):
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).write_text(name)
    (tmp_path / "b" / "y").write_text("other")
    assert differing_files(tmp_path / "a", tmp_path / "b") == ["w", "y", "z"]
    assert differing_files(tmp_path / "a", tmp_path / "a") == []


def test_the_control_changes_one_moment_and_is_a_sound_checkpoint(tmp_path: Path) -> None:
    source = tmp_path / "step-00000020"
    source.mkdir()
    made = {
        f"{name}/{key}": np.full(size, 2.0, dtype=np.float32)
        for name, size in (("small", 3), ("large", 5))
        for key in ("exp_avg", "exp_avg_sq")
    }
    save_file(made, source / "optimizer.safetensors")
    seal(source, "a")
    changed = with_other_moment(source, tmp_path / "changed" / source.name)
    assert damage(changed) is None
    found = load_file(changed / "optimizer.safetensors")
    assert [name for name in made if not np.array_equal(made[name], found[name])] == ["large/exp_avg"]
    assert _apart(made["large/exp_avg"], found["large/exp_avg"]) == pytest.approx(0.01, rel=1e-4)


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_two_pairs_of_layouts_go_on_as_one_run_and_a_changed_moment_shows(tmp_path: Path) -> None:
    plan = Plan(pairs=[(ONE, "tp2 pp2"), ("tp2 pp2", "dp2 zero3"), (ONE, ONE)], exported=["tp2 pp2"])
    session = Session(LayoutRuns(tmp_path), plan)
    session.run()
    claims = claims_of(session)
    assert len(claims) == 5
    assert [verdict(claim) for claim in claims] == ["won"] * 5, [claim.note for claim in claims]
    assert STEPS == 40
