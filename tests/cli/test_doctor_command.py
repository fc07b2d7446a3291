"""``drivetrain doctor``: complete with torch, useful without it, and its exit code is the answer."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from drivetrain.cli import doctor
from drivetrain.engine import environment
from drivetrain.engine.capabilities import CAPABILITY_NAMES
from drivetrain.engine.environment import allocator_setting, missing_packages, thread_setting
from drivetrain.errors import EnvironmentFault
from drivetrain.measure.ceilings import ceilings_path

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import typer
from drivetrain.cli import doctor
app = typer.Typer()
doctor.register(app)
app()
"""


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> typer.Typer:
    monkeypatch.setenv("DRIVETRAIN_CACHE", str(tmp_path))
    app = typer.Typer()
    app.callback()(lambda: None)
    doctor.register(app)
    return app


def document(app: typer.Typer) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["doctor", "--json"])
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_json_is_one_document_with_everything(app: typer.Typer) -> None:
    found = document(app)
    assert found["ready"] is True
    assert found["missing"] == []
    assert [one["name"] for one in found["capabilities"]] == list(CAPABILITY_NAMES)
    assert found["machine"]["usable_cores"] >= 1
    assert found["device"]["name"]
    assert {"python", "drivetrain", "torch", "numpy"} <= set(found["versions"])
    assert [one["name"] for one in found["settings"]] == ["threads", "allocator"]
    for bad in found["known_bad"]:
        assert bad["source"].startswith("https://")
        assert bad["concerns"]


def test_the_report_names_what_the_document_holds(app: typer.Typer) -> None:
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 0
    for heading in (
        "Machine",
        "Versions",
        "Capabilities",
        "Settings",
        "Ceilings",
        "Known to go wrong",
        "Missing: nothing",
    ):
        assert heading in done.stdout
    for name in CAPABILITY_NAMES:
        assert f" {name} " in done.stdout


def test_a_missing_capability_says_which_optimisation_needs_it(
    app: typer.Typer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    text = CliRunner().invoke(app, ["doctor"]).stdout
    place = text.index("no   compile ")
    assert "needed by the optimisation compile (fusion.compile)" in text[place:].splitlines()[1]


def test_an_unmeasured_ceiling_says_what_to_run(app: typer.Typer) -> None:
    for ceiling in document(app)["ceilings"]:
        assert ceiling["value"] is None
        assert "not measured; run: drivetrain bench" in ceiling["note"]


def test_damaged_ceilings_are_an_error(app: typer.Typer, tmp_path: Path) -> None:
    path = ceilings_path(tmp_path)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"{")
    done = CliRunner().invoke(app, ["doctor"])
    assert isinstance(done.exception, EnvironmentFault)
    assert str(path) in str(done.exception)


def test_a_missing_requirement_is_a_no(app: typer.Typer, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = environment.Missing("safetensors", True, "checkpoints", "pip install safetensors")
    monkeypatch.setattr(environment, "missing_packages", lambda versions: (lost,))
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 1
    assert "pip install safetensors" in done.stdout


def test_without_torch_the_rest_is_reported_with_the_fix(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, "--json"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={"PATH": "", "DRIVETRAIN_CACHE": str(tmp_path)},
    )
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    (torch,) = [one for one in found["missing"] if one["package"] == "torch"]
    assert torch["required"] is True
    assert "pip install 'torch>=2.11'" in torch["fix"]
    assert found["capabilities"] == []
    assert found["device"] is None
    assert found["machine"]["cpu"]


def test_what_is_missing_depends_on_what_is_installed() -> None:
    everything = {"torch": "2.13.0+cpu", "safetensors": "0.8", "tokenizers": "0.23", "pyarrow": "26.0"}
    assert missing_packages(everything) == ()
    (old,) = missing_packages({**everything, "torch": "2.10.1"})
    assert old.required
    assert "2.10.1" in old.needed_for
    del everything["pyarrow"]
    (parquet,) = missing_packages(everything)
    assert not parquet.required
    assert len(missing_packages({})) == 4


def test_thread_variables_that_differ_from_the_cores_are_pointed_out() -> None:
    assert thread_setting({}, 8).state == "good"
    assert thread_setting({"OMP_NUM_THREADS": "8"}, 8).state == "good"
    found = thread_setting({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "8"}, 8)
    assert found.state == "advice"
    assert "unset OMP_NUM_THREADS, or" in found.advice


@pytest.mark.parametrize(
    ("variables", "libc", "state"),
    [
        ({}, "glibc", "advice"),
        ({"MALLOC_MMAP_MAX_": "0"}, "glibc", "advice"),
        ({"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000"}, "glibc", "good"),
        ({"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"}, "glibc", "good"),
        ({}, "", "good"),
    ],
)
def test_allocator_advice_is_given_where_it_helps(variables: dict[str, str], libc: str, state: str) -> None:
    found = allocator_setting(variables, libc)
    assert found.state == state
    assert bool(found.advice) == (state == "advice")
