"""Shared by all tests. Its place also puts this folder on the import path: helpers lie beside it."""

import fcntl
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Before torch is imported, here and in the processes that tests start: threads that spin while they wait for each other
# take the cores of whoever else works, and several test processes do.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A deadline would be an assertion about time, which a busy machine breaks; how much of what is drawn is filtered or too
# large is chance.
settings.register_profile(
    "drivetrain",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
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


@pytest.fixture(scope="module")
def only_labs_here() -> Iterator[None]:
    """No other process of tests has network labs meanwhile: they share the machine's list of namespaces, which tests
    compare before and after."""
    place = Path(tempfile.gettempdir()) / f"drivetrain-tests-of-labs-{os.getuid()}.lock"
    with place.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(autouse=True)
def _random_numbers_are_those_of_a_fresh_process() -> None:
    """What a test draws does not depend on the tests that this process had before it."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.manual_seed(67280421310721)  # torch's own default


@pytest.fixture(autouse=True)
def _deterministic_mode_is_off_after_each_test() -> Iterator[None]:
    """A run sets it for its process, and here that is the process of the tests that follow."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic = False
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
