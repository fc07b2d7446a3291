"""Shared by all tests. Its place also puts this folder on the import path: helpers lie beside it."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Before torch is imported, here and in the processes that tests start: threads that spin while they wait for each other
# take the cores of whoever else works, and several test processes do.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A deadline would be an assertion about time, which a busy machine breaks.
settings.register_profile("drivetrain", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("drivetrain")

pytest_plugins = ["runs_on_the_spot"]

SHARED = Path(__file__).resolve().parents[2] / "shared"
"""Facts and traces of others, beside the repository on some machines. A user has none."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    """Where the facts are there, a test that skips for want of them is a broken test, not a missing file."""
    report = yield
    if report.skipped and SHARED.is_dir() and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2]
        if "shared" in reason:
            report.outcome = "failed"
            report.longrepr = f"{SHARED} is there, and yet this was skipped: {reason}"
    return report


@pytest.fixture(autouse=True)
def _deterministic_mode_is_off_after_each_test() -> Iterator[None]:
    """A run sets it for its process, and here that is the process of the tests that follow."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic = False
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
