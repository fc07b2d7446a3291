"""A machine that cannot have a lab says why, in one message."""

import os

import pytest

from drivetrain.errors import EnvironmentFault
from drivetrain.lab import Lab, missing, requirements


def test_without_root_nothing_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert missing() is not None
    with pytest.raises(EnvironmentFault, match="takes root, and this is user 1000"):
        Lab(2, 1).make()


def test_a_program_that_is_not_installed_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(requirements, "program", lambda name: None if name == "tc" else f"/usr/sbin/{name}")
    with pytest.raises(EnvironmentFault, match="needs tc, not installed here; install iproute2"):
        Lab(2, 1).make()


def test_other_systems_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements.sys, "platform", "darwin")
    assert missing() == "the network lab needs Linux, and this is darwin"
