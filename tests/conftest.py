"""Shared by all tests. Its place also puts this folder on the import path: helpers lie beside it."""

from hypothesis import HealthCheck, settings

# A deadline would be an assertion about time, which a busy machine breaks.
settings.register_profile("drivetrain", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("drivetrain")

pytest_plugins = ["runs_on_the_spot"]
