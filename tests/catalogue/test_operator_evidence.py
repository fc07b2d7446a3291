"""What the lack of an operator's regions says, by what could have opened them."""

import pytest

from drivetrain.catalogue import entry
from drivetrain.config import RunConfig, load_config
from drivetrain.measure.optimisation import Count, Observation

FORWARD = Observation(2, ranges={"drivetrain/forward": Count(2, 100)})
GLU = Observation(2, ranges={**FORWARD.ranges, "drivetrain/operator/glu/eager": Count(4, 40)})
STAGES = ("parallelism.pipeline_model_parallel_size=2", "training.global_batch_size=32")


def config(*overrides: str) -> RunConfig:
    return load_config("llama-2m", ["fusion.level=core", "fusion.glu=eager", *overrides]).config


@pytest.mark.parametrize("name", ["glu", "attention", "fusion_level"])
def test_a_stage_without_an_operator_proves_nothing_of_a_pipeline(name: str) -> None:
    assert entry(name).evidence(config(), FORWARD, None).kind == "absent"
    found = entry(name).evidence(config(*STAGES), FORWARD, None)
    assert (found.kind, "another stage" in found.why) == ("unknown", True)


def test_a_stage_that_has_the_operator_proves_it() -> None:
    assert entry("glu").evidence(config(*STAGES), GLU, None).kind == "shown"
    assert entry("fusion_level").evidence(config(*STAGES), GLU, None).kind == "shown"


def test_another_backend_on_this_stage_is_absent_in_a_pipeline_too() -> None:
    asked = config(*STAGES, "fusion.glu=inductor")
    assert entry("glu").evidence(asked, GLU, None).kind == "absent"


def test_compiled_code_opens_no_regions() -> None:
    found = entry("glu").evidence(config("fusion.compile=true"), FORWARD, None)
    assert (found.kind, found.why) == ("unknown", "code of torch.compile opens no regions")
