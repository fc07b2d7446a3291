"""``drivetrain catalogue``: all entries, one entry, the document, a wrong name."""

import json
from typing import Any

from typer.testing import CliRunner

from drivetrain.catalogue import catalogue
from drivetrain.cli.application import application
from drivetrain.errors import DrivetrainError


def answer(*arguments: str) -> Any:
    return CliRunner().invoke(application(), ["catalogue", *arguments])


def test_the_document_holds_each_entry_with_the_keys_of_the_contract() -> None:
    document = json.loads(answer("--json").stdout)
    assert document.keys() == {"optimisations"}
    assert [one["name"] for one in document["optimisations"]] == [one.name for one in catalogue()]
    for one in document["optimisations"]:
        assert one.keys() >= {"name", "field", "numerics", "treats", "knobs", "requires", "conflicts"}


def test_the_list_names_each_entry_with_field_numerics_and_classes() -> None:
    text = answer().stdout
    for one in catalogue():
        assert one.field in text
        assert ", ".join(one.treats) in text


def test_one_entry_is_shown_with_everything_about_it() -> None:
    text = answer("data_workers").stdout
    assert "data.num_workers from 1 to 16 (whole numbers)" in text
    assert "computed from the account" in text
    (one,) = json.loads(answer("data_workers", "--json").stdout)["optimisations"]
    assert one["name"] == "data_workers"


def test_a_wrong_name_is_refused_with_the_nearest() -> None:
    result = answer("ddp_buckets")
    assert isinstance(result.exception, DrivetrainError)
    assert "did you mean ddp_bucket?" in str(result.exception)
