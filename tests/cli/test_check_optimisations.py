"""``check`` says of each optimisation what the record of the run will say."""

import json

import pytest
from typer.testing import CliRunner

from drivetrain.cli.application import application


def bucket_in_check(*arguments: str) -> tuple[bool, str | None]:
    done = CliRunner().invoke(application(), ["check", "llama-2m", "--json", *arguments])
    assert done.exit_code == 0, done.output
    (found,) = [one for one in json.loads(done.stdout)["optimisations"] if one["name"] == "ddp_bucket"]
    return found["requested"], found["no_effect_because"]


@pytest.mark.parametrize(
    ("arguments", "requested"),
    [
        ((), False),
        (("overlap.bucket_size_mb=3",), True),
        (("--devices", "2", "training.micro_batch_size=8", "overlap.bucket_size_mb=3"), True),
    ],
)
def test_a_default_that_can_have_no_effect_is_no_request(arguments: tuple[str, ...], requested: bool) -> None:
    asked, idle = bucket_in_check(*arguments)
    assert asked == requested
    assert (idle is None) == ("--devices" in arguments)
