"""By which gate a change of who computes operators is judged."""

import pytest

from drivetrain.errors import RunError
from drivetrain.tune.gate_change import tier_of_change


@pytest.mark.parametrize("level", ["off", "core", "all"])
def test_a_level_changes_the_order_of_sums_and_nothing_else(level: str) -> None:
    tier, why = tier_of_change({"fusion.level": level})
    assert tier == "round-off"
    assert "fusion_level is round-off" in why


def test_a_backend_is_round_off_and_another_draw_of_dropout_is_not() -> None:
    assert tier_of_change({"fusion.attention": "chunked"})[0] == "round-off"
    assert tier_of_change({"fusion.bias_dropout_add": "eager"})[0] == "statistical"


def test_another_tuned_file_has_to_be_declared_because_it_claims_to_change_nothing() -> None:
    tier, why = tier_of_change({"fusion.tuned_file": "other.toml"})
    assert tier == "exact"
    assert "--tier" in why


def test_a_level_with_a_backend_of_its_own_is_two_changes() -> None:
    with pytest.raises(RunError, match="do not belong together"):
        tier_of_change({"fusion.level": "core", "fusion.glu": "eager"})
