"""Two tuners on one file at once, and who is said to serve a product that the configuration speaks of."""

import fcntl
import threading
from pathlib import Path

import pytest
from test_recording import tiny
from test_tune_session import CONFIG, TWO, statuses, tune
from tuning_examples import MODULE, Asked, norm_call, recorded

from drivetrain.engine.ops.tuned_file import Entry, parse_entries
from drivetrain.engine.ops_tuning.session import Report, Settings, tune_calls, tune_configuration
from drivetrain.engine.ops_tuning.writing import merge_tuned, write_tuned
from drivetrain.errors import DrivetrainError


def entries(path: Path) -> dict[str, Entry]:
    return {one.call: one for one in parse_entries(path.read_bytes(), path)[1]}


def tune_widths(path: Path, *widths: int, ask: Asked | None = None, fresh: bool = False) -> Report:
    settings = Settings(600.0, ask=ask or Asked(), fresh=fresh, module_of=lambda _: MODULE)
    calls = [recorded(norm_call(width=width), TWO) for width in widths]
    return tune_calls(CONFIG, calls, settings, path, progress=lambda _: None)


def test_what_another_tuner_writes_meanwhile_stays_and_is_not_tuned_again(tmp_path: Path) -> None:
    path = tmp_path / "t.toml"

    def another(number: int) -> None:
        if number == 1:
            tune_widths(path, 48, 64)

    ask = Asked(after=another)
    # The first of three calls is being tried while the other finishes the third, and one that nobody asks for here.
    assert statuses(tune(path, ask)) == ["tuned", "tuned", "kept"]
    assert len(ask.requests) == 6
    assert len(entries(path)) == 4


def test_a_newer_choice_of_another_tuner_is_not_put_back(tmp_path: Path) -> None:
    path = tmp_path / "t.toml"
    tune_widths(path, 16)

    def another(number: int) -> None:
        if number == 1:
            tune_widths(path, 16, ask=Asked({"quick": 0.1}), fresh=True)

    tune_widths(path, 16, 32, ask=Asked(after=another))
    assert sorted(one.backend for one in entries(path).values()) == ["eager", "quick"]


def test_a_file_begun_anew_holds_nothing_of_before_and_keeps_what_comes_after(tmp_path: Path) -> None:
    path = tmp_path / "t.toml"
    tune_widths(path, 96)

    def another(number: int) -> None:
        # Between the first write and the second.
        if number == 4:
            tune_widths(path, 64)

    tune_widths(path, 16, 32, ask=Asked(after=another), fresh=True)
    widths = {
        width for width in (16, 32, 64, 96) if any(f"weight float32[{width}]" in one for one in entries(path))
    }
    assert widths == {16, 32, 64}


def test_a_file_that_another_environment_has_replaced_meanwhile_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "t.toml"
    with pytest.raises(DrivetrainError, match=r"torch: 1\.0 there"):
        tune_widths(path, 16, ask=Asked(after=lambda _: write_tuned(path, {"torch": "1.0"}, ())))
    assert entries(path) == {}


def test_a_writer_waits_until_the_other_is_done(tmp_path: Path) -> None:
    path = tmp_path / "t.toml"
    tune_widths(path, 16)
    (one,) = entries(path).values()
    environment = parse_entries(path.read_bytes(), path)[0]
    second = one.model_copy(update={"tokens": 999})
    with (tmp_path / ".t.toml.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        writer = threading.Thread(
            target=merge_tuned,
            args=(path, environment, {second.name: second}),
            kwargs={"base": None, "keep": lambda _: True},
        )
        writer.start()
        writer.join(0.2)
        assert writer.is_alive()
        assert len(entries(path)) == 1
        # What is written before the lock is free is seen behind it.
        third = one.model_copy(update={"tokens": 77})
        write_tuned(path, environment, [one, third])
    writer.join(30)
    assert {found.tokens for found in parse_entries(path.read_bytes(), path)[1]} == {24, 77, 999}


def with_gaps(path: Path, *overrides: str, seconds: dict[str, float] | None = None) -> set[str]:
    """Operators whose calls were tuned with the layout that a joined product leaves."""
    config = tiny("data.reset_attention_mask=false", "run.num_threads=1", *overrides)
    settings = Settings(600.0, ask=Asked(seconds or {}))
    report = tune_configuration(config, settings, path, progress=lambda _: None)
    return {one.operator for one in report.outcomes if "with gaps" in one.call}


def test_a_product_that_the_configuration_names_decides_the_layout_whatever_was_tuned(tmp_path: Path) -> None:
    assert with_gaps(tmp_path / "a.toml", "fusion.qkv_product=joined") == {"rotary", "attention"}
    joined_is_quick = {"joined": 0.5}
    assert with_gaps(tmp_path / "b.toml", "fusion.qkv_product=eager", seconds=joined_is_quick) == {"glu"}
    assert with_gaps(tmp_path / "c.toml", seconds=joined_is_quick) == {"rotary", "attention", "glu"}


def test_evaluation_is_tuned_as_calls_of_its_own(tmp_path: Path) -> None:
    settings = Settings(600.0, ask=Asked())
    config = tiny("data.reset_attention_mask=false", "run.num_threads=1", "training.eval_iters=2")
    report = tune_configuration(config, settings, tmp_path / "t.toml", only=["glu"], progress=lambda _: None)
    trained, evaluated = report.outcomes
    assert ", gradient" in trained.call
    assert ", gradient" not in evaluated.call
    assert trained.calls_per_step > evaluated.calls_per_step > 0


def test_with_dropout_the_norms_that_a_level_computes_by_are_tuned_beside_dropout_by_an_operator(
    tmp_path: Path,
) -> None:
    dropping = tiny(
        "data.reset_attention_mask=false",
        "run.num_threads=1",
        "training.eval_iters=0",
        "model.hidden_dropout=0.1",
    )
    report = tune_configuration(
        dropping, Settings(600.0, ask=Asked()), tmp_path / "t.toml", progress=lambda _: None
    )
    per_step = {one.operator: one.calls_per_step for one in report.outcomes}
    # 3 layers and 3 micro-batches: the norm before attention, and the final one.
    assert (per_step["add_rms_norm"], per_step["bias_dropout_add"], per_step["rms_norm"]) == (9, 18, 12)
