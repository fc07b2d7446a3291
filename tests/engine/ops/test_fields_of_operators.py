"""What a configuration may name are the registry's operators and backends, all of them."""

import pytest

from drivetrain.config import leaves, operator_fields
from drivetrain.config.fusion import LEVELS
from drivetrain.engine.ops.discovery import operator_named, operators

# Of no part of a model that Drivetrain builds, or requested by another field (optimizer.fused).
WITHOUT_FIELD = {"adamw", "gradient_clip", "grouped_product"}


def test_each_operator_has_a_field_or_a_reason_to_have_none() -> None:
    assert {operator.name for operator in operators()} == {*operator_fields(), *WITHOUT_FIELD}
    assert not WITHOUT_FIELD & set(operator_fields())


@pytest.mark.parametrize("name", operator_fields())
def test_the_legal_values_of_a_field_are_off_auto_and_the_names_of_all_backends(name: str) -> None:
    names = [backend.name for backend in operator_named(name).backends]
    assert sorted(leaves()[f"fusion.{name}"].choices) == sorted(["off", "auto", *names])


def test_levels_name_operators_and_each_holds_the_one_below() -> None:
    assert LEVELS["all"] <= set(operator_fields())
    assert LEVELS["off"] < LEVELS["core"] < LEVELS["all"]
