"""The page on the optimisations is fresh and holds everything about each."""

from pathlib import Path

from drivetrain.catalogue import catalogue
from drivetrain.catalogue import docs as catalogue_docs

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_fresh() -> None:
    written = (ROOT / catalogue_docs.PATH).read_text(encoding="utf-8")
    assert written == catalogue_docs.render(), "run: python -m drivetrain.catalogue.docs"


def test_each_optimisation_has_its_section_with_everything_about_it() -> None:
    page = catalogue_docs.render()
    for one in catalogue():
        section = page.partition(f"\n## {one.name}\n")[2].partition("\n## ")[0]
        assert section, one.name
        for text in (one.field, one.numerics, one.evidence_rule, *one.treats, *one.sources):
            assert text in section, (one.name, text)
        for knob in one.knobs:
            assert f"`{knob.field}`" in section
        assert one.capability is None or f"`{one.capability}`" in section
