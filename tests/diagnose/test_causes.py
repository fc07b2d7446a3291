"""The list of causes: complete, documented, and the same in rules, catalogue and page."""

from pathlib import Path

import pytest

from drivetrain.catalogue import catalogue
from drivetrain.diagnose import docs
from drivetrain.diagnose.causes import CAUSES, SEARCH
from drivetrain.diagnose.facts import NEEDS
from drivetrain.diagnose.finding import Finding
from drivetrain.diagnose.rule import rules

ROOT = Path(__file__).resolve().parents[2]


def test_every_cause_is_found_by_a_rule_and_belongs_to_an_area_of_the_search() -> None:
    found = {cause for rule in rules() for cause in rule.causes}
    assert found == CAUSES.keys()
    assert {cause.area for cause in CAUSES.values()} == {area for area, _ in SEARCH}


def test_what_an_entry_cures_is_a_cause() -> None:
    for entry in catalogue():
        assert set(entry.cures) <= CAUSES.keys(), entry.name


def test_needs_are_documented() -> None:
    assert {need for rule in rules() for need in rule.needs} <= NEEDS.keys()


def test_the_page_is_fresh_and_holds_every_cause_and_rule() -> None:
    page = docs.render()
    written = (ROOT / docs.PATH).read_text(encoding="utf-8")
    assert written == page, "run: python -m drivetrain.diagnose.docs"
    for name, cause in CAUSES.items():
        section = page.partition(f"### `{name}`\n")[2].partition("\n### ")[0]
        assert cause.symptom in section
        assert cause.cost in section
        assert any(f"`{rule.name}`" in section for rule in rules() if name in rule.causes), name


def test_a_finding_of_an_undocumented_cause_is_our_own_defect() -> None:
    with pytest.raises(AssertionError, match="no documented cause"):
        Finding("rule", "loss", "something", "host.gremlins", "gremlins", 1.0, 1.0)
