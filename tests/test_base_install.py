"""``pip install drivetrain`` in a fresh environment: no torch, and everything that needs none works."""

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_fresh_environment_without_torch(tmp_path: Path) -> None:
    folder = tmp_path / "environment"
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", str(ROOT)], check=True
    )

    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [folder / "bin" / "drivetrain", *arguments],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
        )

    probe = subprocess.run([python, "-c", "import torch"], capture_output=True, text=True, check=False)
    assert "ModuleNotFoundError" in probe.stderr, "the base install must not bring torch"
    assert run("--version").stdout.startswith("drivetrain ")
    assert run("check", "llama2-7b").returncode == 0
    answer = run(
        "mfu", "llama2-7b", "--step-time", "10", "--devices", "64", "--device", "H100-SXM-80GB", "--json"
    )
    assert json.loads(answer.stdout)["mfu"]["causal"] > 0
    assert run("runs", "list").returncode == 0
    refused = run("train", "llama-2m")
    assert refused.returncode == 2
    assert "drivetrain[train]" in refused.stderr
    doctor = run("doctor", "--json")
    assert json.loads(doctor.stdout)
    assert doctor.returncode == 1, "the engine is missing, and doctor says so"


def test_every_module_outside_the_engine_imports_without_torch() -> None:
    source = ROOT / "src"
    modules = sorted(
        ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
        for path in (source / "drivetrain").rglob("*.py")
        if "engine" not in path.parts and path.name != "__main__.py"
    )
    code = (
        "import importlib, sys\n"
        "for name in ('torch', 'safetensors', 'tokenizers', 'pyarrow', 'transformers'):\n"
        "    sys.modules[name] = None\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ},
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert len(modules) > 40
