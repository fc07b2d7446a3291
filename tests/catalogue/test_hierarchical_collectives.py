"""Where collectives in levels can have no effect, and why; on which machines they can."""

import pytest

from drivetrain.catalogue import entry
from drivetrain.catalogue.rules import all_rules
from drivetrain.config import LaunchFacts, load_config, violations

ON = "overlap.hierarchical_collectives=true"
BASE = ("training.micro_batch_size=1", "training.global_batch_size=24", ON)
ZERO, TP = "parallelism.zero_stage", "parallelism.tensor_model_parallel_size"
SHARD = "parallelism.hybrid_shard_size"


def reason(facts: LaunchFacts, *overrides: str) -> str | None:
    config = load_config("llama-2m", [*BASE, *overrides]).config
    assert violations(config, facts, all_rules()) == []
    return entry("hierarchical_collectives").applies(config, facts)


@pytest.mark.parametrize(
    ("facts", "overrides", "why"),
    [
        (LaunchFacts(1), (), "one process"),
        (LaunchFacts(2, 1), (f"{TP}=2",), "one data-parallel rank"),
        (LaunchFacts(4), (), "are on one machine"),
        (LaunchFacts(4, 4), (), "are on one machine"),
        (LaunchFacts(4, 1), (), "each machine has one"),
        (LaunchFacts(4, 2), (f"{TP}=2",), "each machine has one"),
        (LaunchFacts(4, 3), (), "different numbers"),
        # Shards of a machine, replicas between them: the layout has the levels already.
        (LaunchFacts(4, 2), (f"{ZERO}=2", f"{SHARD}=2"), "of dp_shard that communicate are on one machine"),
        (LaunchFacts(4, 2), (f"{ZERO}=3", f"{SHARD}=2"), "of dp_shard that communicate are on one machine"),
        (LaunchFacts(4, 2), (), None),
        (LaunchFacts(4, 2), (f"{ZERO}=2",), None),
        (LaunchFacts(4, 2), (f"{ZERO}=3",), None),
        # Whole gradients are summed over all of them.
        (LaunchFacts(4, 2), (f"{ZERO}=1", f"{SHARD}=2"), None),
        (LaunchFacts(8, 4), (f"{TP}=2",), None),
    ],
)
def test_it_says_why_it_has_no_effect(
    facts: LaunchFacts, overrides: tuple[str, ...], why: str | None
) -> None:
    found = reason(facts, *overrides)
    assert found is None if why is None else found is not None and why in found


def test_a_layout_that_is_refused_is_not_this_entrys_affair() -> None:
    config = load_config("llama-2m", [*BASE, f"{TP}=2"]).config
    assert entry("hierarchical_collectives").applies(config, LaunchFacts(3, 1)) is None
    assert violations(config, LaunchFacts(3, 1), all_rules()) != []
