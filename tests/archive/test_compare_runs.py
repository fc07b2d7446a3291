"""Five dimensions of a run, and runs side by side."""

import json
import math
import re
from collections.abc import Callable
from typing import Any

import pytest

from drivetrain.archive.compare import Comparison, compare_runs, ratio
from drivetrain.archive.dimensions import DIMENSIONS, figures_of, format_value
from drivetrain.archive.reader import Run, open_run
from drivetrain.archive.writer import RunWriter
from drivetrain.errors import RunError

MakeRun = Callable[..., RunWriter]

SUMMARY: dict[str, Any] = {
    "run": "x",
    "status": "finished",
    "final_loss": 2.0,
    "validation_loss": 2.2,
    "validation_bits_per_byte": 1.1,
    "tokens_per_second": 1000.0,
    "effective_tokens_per_second": 990.0,
    "mfu": 0.4,
    "hfu": 0.4,
    "step_time_s": {"p50": 0.1, "p90": 0.2, "max": 0.3},
    "data_wait_frac": 0.01,
    "communication_exposed_frac": None,
    "peak_memory_bytes": 10**9,
    "mfu_rule": {"flops_rule": "r", "token_rule": "t", "peak_source": "p", "window": [3, 10]},
    "steps": 10,
    "tokens": 5000,
    "reasons": {"communication_exposed_frac": "one process"},
}


def finished(writer: RunWriter, **changes: Any) -> Run:
    writer.open_segment(1)
    writer.event("end", status="finished", reason=None)
    writer.write_summary(SUMMARY | changes)
    writer.close()
    return open_run(writer.path)


def row(comparison: Comparison, key: str) -> tuple[tuple[float | None, ...], tuple[float | None, ...]]:
    return next((values, ratios) for figure, values, ratios in comparison.rows() if figure.key == key)


def test_the_figures_of_a_finished_run_are_those_of_its_summary(make_run: MakeRun) -> None:
    figures = figures_of(finished(make_run()))
    assert figures.source == "summary"
    assert not figures.partial
    assert figures.tokens == 5000
    assert figures.values["step_time_s.p90"] == 0.2
    assert figures.values["peak_memory_bytes"] == 1e9
    assert figures.values["communication_exposed_frac"] is None
    assert figures.reasons == {"communication_exposed_frac": "one process"}
    assert figures.values.keys() == {figure.key for figure in DIMENSIONS}


def test_the_figures_of_an_unfinished_run_come_from_its_steady_steps(make_run: MakeRun) -> None:
    writer = make_run()
    writer.open_segment(1)
    for step, seconds, tags in (
        (1, 9.0, ("warmup", "compile")),
        (2, 1.0, ()),
        (3, 2.0, ()),
        (4, 3.0, ()),
        (5, 8.0, ("evaluation",)),
    ):
        values = {
            "train/loss": 10.0 - step,
            "time/step_s": seconds,
            "time/data_wait_s": 0.5,
            "time/comm_exposed_s": 0.1 * seconds,
            "throughput/tokens_per_sec": 100.0 / seconds,
            "throughput/device/mfu": None,
            "memory/process_rss_peak_bytes": 1000.0 * step,
            "progress/tokens": 100 * step,
        }
        writer.log_metrics(step, values, tags)
    writer.event("evaluation", step=2, loss=9.0, bits_per_byte=3.0, tokens=10)
    writer.event("evaluation", step=4, loss=7.0, bits_per_byte=None, tokens=10)
    figures = figures_of(open_run(writer.path))
    assert figures.source == "metrics"
    assert figures.partial
    assert figures.tokens == 500
    assert figures.values == {
        "tokens_per_second": 50.0,
        "effective_tokens_per_second": None,
        "step_time_s.p50": 2.0,
        "step_time_s.p90": pytest.approx(2.8),
        "step_time_s.max": 3.0,
        "data_wait_frac": 1.5 / 6.0,
        "mfu": None,
        "hfu": None,
        "communication_exposed_frac": pytest.approx(0.1),
        "peak_memory_bytes": 5000.0,
        "final_loss": 5.0,
        "validation_loss": 7.0,
        "validation_bits_per_byte": None,
    }
    assert figures.reasons["mfu"] == "not in the logged steps"


def test_a_run_without_steps_has_no_figures_and_does_not_fail(make_run: MakeRun) -> None:
    figures = figures_of(open_run(make_run().path))
    assert set(figures.values.values()) == {None}
    assert figures.partial


def test_an_interrupted_run_is_partial_even_with_a_summary(make_run: MakeRun) -> None:
    writer = make_run()
    writer.open_segment(1)
    writer.event("end", status="interrupted", reason="SIGINT")
    writer.write_summary(SUMMARY | {"status": "interrupted"})
    figures = figures_of(open_run(writer.path))
    assert (figures.source, figures.partial) == ("summary", True)


def test_runs_are_compared_with_the_first(make_run: MakeRun) -> None:
    base = finished(make_run("base"))
    other = finished(
        make_run("other"), tokens_per_second=1500.0, peak_memory_bytes=5 * 10**8, final_loss=math.nan
    )
    comparison = compare_runs([base, other])
    assert row(comparison, "tokens_per_second") == ((1000.0, 1500.0), (1.0, 1.5))
    assert row(comparison, "peak_memory_bytes")[1] == (1.0, 0.5)
    assert row(comparison, "communication_exposed_frac") == ((None, None), (None, None))
    values, ratios = row(comparison, "final_loss")
    assert math.isnan(values[1] or 0)
    assert ratios == (1.0, None)
    assert comparison.warnings == ()
    assert comparison.configuration == {}
    assert comparison.environment == {}


def test_only_what_differs_in_the_configuration_is_shown(make_run: MakeRun) -> None:
    runs = [
        finished(make_run(overrides=overrides))
        for overrides in ((), ("optimizer.lr=0.5",), ("optimizer.lr=0.5", "fusion.compile=true"))
    ]
    default = runs[0].config().optimizer.lr
    assert compare_runs(runs).configuration == {
        "optimizer.lr": (default, 0.5, 0.5),
        "fusion.compile": (False, False, True),
    }


def test_only_what_differs_in_the_environment_is_shown(make_run: MakeRun, manifest: dict[str, Any]) -> None:
    provenance = manifest["provenance"]
    changed = provenance | {
        "command": ["another"],
        "packages": {"torch": "2.11.0", "numpy": "2.3.0"},
        "environment": {"OMP_NUM_THREADS": "1"},
    }
    comparison = compare_runs([finished(make_run()), finished(make_run(provenance=changed))])
    assert comparison.environment == {
        "packages.torch": ("2.13.0", "2.11.0"),
        "environment.OMP_NUM_THREADS": (None, "1"),
    }


@pytest.mark.parametrize(
    ("changes", "summary", "warning"),
    [
        ({"dataset": {"fingerprint": "zzz"}}, {}, "trained on different data"),
        ({"dataset": {"fingerprint": None}}, {}, "no dataset fingerprint"),
        (
            {"devices": {"type": "cuda", "name": "H200", "count": 8}},
            {},
            r"different devices \(1 x a processor, 8 x H200\)",
        ),
        ({}, {"tokens": 6000}, r"different numbers of tokens \(5,000, 6,000\)"),
        ({}, {"tokens": None}, "number of tokens of a run is not known"),
        ({}, {"mfu_rule": {"flops_rule": "6N"}}, r"different flops_rule \(6N; r\)"),
    ],
)
def test_runs_that_are_not_comparable_are_said_to_be(
    make_run: MakeRun, changes: dict[str, Any], summary: dict[str, Any], warning: str
) -> None:
    comparison = compare_runs([finished(make_run()), finished(make_run(**changes), **summary)])
    assert len(comparison.warnings) == 1
    assert re.search(warning, comparison.warnings[0])


def test_accounts_of_other_name_tables_are_said_to_be(make_run: MakeRun) -> None:
    runs = [finished(make_run()) for _ in range(2)]

    def warnings(*tables: str) -> tuple[str, ...]:
        for run, table in zip(runs, tables, strict=True):
            step = {"step": 1, "classes": {"idle": 5}, "unexplained_ns": 0, "window_ns": 5}
            account = {"ranks": [{"rank": 0, "steps": [step]}]}
            window = {"first": 1, "last": 1, "name_table": table, "account": account}
            (run.path / "account.json").write_text(json.dumps({"schema": 1, "windows": [window]}))
        return compare_runs(runs).warnings

    assert warnings("1+aa", "1+aa") == ()
    assert warnings("1+aa", "2+bb") == (
        "accounts are not comparable by class: other name tables (1+aa, 2+bb)",
    )


def test_an_unfinished_run_is_marked(make_run: MakeRun) -> None:
    writer = make_run()
    writer.open_segment(1)
    writer.log_metrics(1, {"train/loss": 3.0, "progress/tokens": 5000})
    comparison = compare_runs([finished(make_run()), open_run(writer.path)])
    assert comparison.statuses == ("finished", "running")
    assert [run["partial"] for run in comparison.document()["runs"]] == [False, True]
    assert any(
        "is running: its figures are partial, from the logged steps" in text for text in comparison.warnings
    )


def test_a_configuration_of_another_version_does_not_stop_the_comparison(make_run: MakeRun) -> None:
    other = finished(make_run())
    path = other.path / "config.toml"
    path.write_text(path.read_text().replace("num_layers", "num_lairs"))
    comparison = compare_runs([finished(make_run()), other])
    assert any(warning.startswith("configurations are not compared: ") for warning in comparison.warnings)
    assert row(comparison, "mfu")[1] == (1.0, 1.0)


def test_one_run_is_no_comparison(make_run: MakeRun) -> None:
    with pytest.raises(RunError, match="at least two runs"):
        compare_runs([finished(make_run())])


@pytest.mark.parametrize(
    ("value", "reference", "expected"),
    [
        (3.0, 2.0, 1.5),
        (None, 2.0, None),
        (1.0, None, None),
        (1.0, 0.0, None),
        (0.0, 2.0, 0.0),
        (math.inf, 2.0, None),
        (1.0, math.nan, None),
    ],
)
def test_a_ratio_without_meaning_is_none(
    value: float | None, reference: float | None, expected: float | None
) -> None:
    assert ratio(value, reference) == expected


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (None, "share", "-"),
        (0.3456, "share", "34.6%"),
        (12345.6, "token/s", "12,346"),
        (0.2314, "s", "231.4 ms"),
        (2.5, "s", "2.50 s"),
        (1.5e9, "byte", "1.50 GB"),
        (999.0, "byte", "999 B"),
        (3.14159, "nat/token", "3.1416"),
        (math.nan, "nat/token", "nan"),
        (-math.inf, "nat/token", "-inf"),
    ],
)
def test_figures_are_written_for_people(value: float | None, unit: str, text: str) -> None:
    assert format_value(value, unit) == text
