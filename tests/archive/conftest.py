"""Sample runs for the archive's tests."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drivetrain.archive.writer import RunWriter
from drivetrain.config import config_hash, load_config, to_toml


@pytest.fixture
def manifest() -> dict[str, Any]:
    return {
        "config_hash": "0" * 64,
        "layout": {"data_parallel_size": 1, "world_size": 1},
        "provenance": {
            "command": ["drivetrain", "train", "llama-2m"],
            "git": {"commit": "1" * 40, "branch": "main", "dirty": False},
            "packages": {"torch": "2.13.0", "numpy": "2.3.0"},
            "host": "somewhere",
        },
        "devices": {"type": "cpu", "name": "a processor", "count": 1},
        "dataset": {"fingerprint": "abc", "prefix": "corpus"},
        "seed": 1234,
    }


@pytest.fixture
def make_run(tmp_path: Path, manifest: dict[str, Any]) -> Callable[..., RunWriter]:
    """Make a run in ``tmp_path / "runs"``; keywords replace keys of its manifest."""

    def make(name: str = "llama-2m", overrides: tuple[str, ...] = (), **changes: Any) -> RunWriter:
        config = load_config("llama-2m", overrides).config
        facts = {**manifest, "config_hash": config_hash(config), **changes}
        return RunWriter.create(tmp_path / "runs", name, config_toml=to_toml(config), manifest=facts)

    return make
