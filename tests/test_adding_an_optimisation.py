"""Adding an optimisation touches three places: field, entry, implementation. Everything else knows it then."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import drivetrain
from runs_on_the_spot import Tiny

FIELD = '''
    dummy: bool = False
    """Do what the dummy does, which is nothing."""
'''
ENTRY = '''
"""An optimisation that does nothing."""

from drivetrain.catalogue.entry import Optimisation
from drivetrain.config import Rule
from drivetrain.measure.optimisation import Evidence

__all__ = ["ENTRY"]


def _few_layers(config, facts):
    return None if config.model.num_layers < 9 else "the dummy knows no more than 8 layers"


ENTRY = Optimisation(
    name="dummy",
    summary="does nothing, and says so",
    sources=("nobody",),
    field="fusion.dummy",
    requested=lambda config: config.fusion.dummy,
    on=lambda config, facts: None if config.fusion.dummy else {"fusion.dummy": True},
    off=lambda config: {"fusion.dummy": False},
    numerics="exact",
    treats=("idle",),
    evidence=lambda config, seen, account: Evidence("shown", "every step was idle"),
    requires=(Rule("few-layers-for-dummy", ("fusion.dummy",), _few_layers, "The dummy needs few layers."),),
    evidence_rule="always shown",
)
'''
IMPLEMENTATION = '''
"""What does nothing."""

from drivetrain.engine.optimisations.implementation import Implementation, Status

__all__ = ["IMPLEMENTATION"]

IMPLEMENTATION = Implementation(lambda building: Status(active=True, reason="it does nothing"))
'''
ORIGINAL = Path(drivetrain.__file__).parent


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with one optimisation more."""
    root = tmp_path_factory.mktemp("extended")
    package = root / "drivetrain"
    shutil.copytree(ORIGINAL, package, ignore=shutil.ignore_patterns("__pycache__"))
    original = content(package)
    schema = package / "config" / "fusion.py"
    text = schema.read_text()
    place = text.index("_CORE = (")
    schema.write_text(f"{text[:place].rstrip()}{FIELD}\n\n{text[place:]}")
    (package / "catalogue" / "dummy.py").write_text(ENTRY.lstrip())
    (package / "engine" / "optimisations" / "dummy.py").write_text(IMPLEMENTATION.lstrip())
    now = content(package)
    touched = sorted(name for name in now if now[name] != original.get(name))
    assert touched == ["catalogue/dummy.py", "config/fusion.py", "engine/optimisations/dummy.py"]
    assert original.keys() <= now.keys()
    return root


def run(root: Path, arguments: Sequence[str], cwd: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_the_copy_is_what_runs(extended: Path, tmp_path: Path) -> None:
    done = run(extended, ["-c", "import drivetrain; print(drivetrain.__file__)"], tmp_path)
    assert done.stdout.strip() == str(extended / "drivetrain" / "__init__.py")


def test_check_knows_its_field_and_its_rule(extended: Path, tmp_path: Path) -> None:
    check = ["-m", "drivetrain", "check", "llama-2m", "fusion.dummy=true", "--json"]
    document = json.loads(run(extended, check, tmp_path).stdout)
    (asked,) = [one for one in document["optimisations"] if one["name"] == "dummy"]
    assert (document["accepted"], asked["requested"]) == (True, True)
    broken = run(extended, [*check, "model.num_layers=9", "model.hidden_size=130"], tmp_path)
    assert broken.returncode == 1
    rules = [one["rule"] for one in json.loads(broken.stdout)["violations"]]
    assert rules == ["heads-divide-hidden", "few-layers-for-dummy"], "basic rules and its own, together"
    wrong = run(extended, ["-m", "drivetrain", "check", "llama-2m", "fusion.dummy=perhaps"], tmp_path)
    assert wrong.returncode == 2
    assert "fusion.dummy: expected true or false" in wrong.stderr


def test_the_catalogue_and_its_page_show_it(extended: Path, tmp_path: Path) -> None:
    done = run(extended, ["-m", "drivetrain", "catalogue", "--json"], tmp_path)
    entries = {one["name"]: one for one in json.loads(done.stdout)["optimisations"]}
    assert entries["dummy"]["requires"] == ["The dummy needs few layers."]
    page = tmp_path / "catalogue.md"
    assert run(extended, ["-m", "drivetrain.catalogue.docs", str(page)], tmp_path).returncode == 0
    assert "\n## dummy\n" in page.read_text()
    schema = tmp_path / "config.md"
    assert run(extended, ["-m", "drivetrain.config.docs", str(schema)], tmp_path).returncode == 0
    assert "| `dummy` |" in schema.read_text()


def test_a_run_records_it_with_its_evidence(extended: Path, tiny: Tiny) -> None:
    window = ["profiler.profile=true", "profiler.profile_step_start=5", "profiler.profile_step_end=6"]
    train = ["-m", "drivetrain", "train", str(tiny.file), "fusion.dummy=true", *window, "--json"]
    done = run(extended, train, tiny.folder)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    (record,) = [one for one in document["optimisations"] if one["name"] == "dummy"]
    assert record == {
        "name": "dummy",
        "field": "fusion.dummy",
        "value": True,
        "requested": True,
        "active": True,
        "reason": "it does nothing",
        "evidence": "shown",
        "evidence_why": "every step was idle",
        "served": {},
    }
    finding = "fusion.dummy = true is in effect, but it does nothing"
    assert finding in document["findings"]
    assert f"warning: {finding}" in done.stderr
    refused = run(extended, [*train, "model.num_layers=9"], tiny.folder)
    assert refused.returncode == 2
    assert "the dummy knows no more than 8 layers" in refused.stderr
