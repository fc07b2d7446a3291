"""What ``check`` accepts can be built; what it refuses says why."""

import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from configuration_strategies import as_toml, configurations
from drivetrain.config import LaunchFacts, data_parallel_size, parse_config, violations
from drivetrain.engine.dry_run import dry_run
from drivetrain.errors import ConfigurationError

FAST, LONG = 150, 2000
LEAST_ACCEPTED = 0.3


class Tally:
    """How many configurations were seen, and how many accepted."""

    def __init__(self) -> None:
        self.seen = 0
        self.accepted = 0

    def take(self, values: dict[str, Any], world_size: int) -> None:
        self.seen += 1
        try:
            config = parse_config(as_toml(values))
        except ConfigurationError as error:
            for problem in error.problems:
                assert re.match(r"[a-z_]+(\.[a-z_0-9]+)?\b", problem), f"no field is named: {problem}"
                assert len(problem) > 20, "a refusal says why"
            return
        broken = violations(config, LaunchFacts(world_size=world_size))
        if not broken:
            self.accepted += 1
            built = dry_run(config, world_size)
            assert built.logits_shape == (
                config.training.micro_batch_size,
                config.model.seq_length,
                config.model.vocab_size,
            )
            assert (
                built.num_microbatches
                * config.training.micro_batch_size
                * data_parallel_size(config, world_size)
                == config.training.global_batch_size
            )
            return
        for violation in broken:
            assert len(violation.message) > 20, "a refusal says why"
            assert violation.fields
            assert all("." in field for field in violation.fields)


def judge(examples: int) -> None:
    tally = Tally()

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(configurations())
    def every_configuration(drawn: tuple[dict[str, Any], int]) -> None:
        tally.take(*drawn)

    every_configuration()
    assert tally.seen >= examples * 0.9
    assert tally.accepted >= LEAST_ACCEPTED * tally.seen, f"{tally.accepted} of {tally.seen} accepted"


def test_a_sample_of_random_configurations() -> None:
    judge(FAST)


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_two_thousand_random_configurations() -> None:
    judge(LONG)
