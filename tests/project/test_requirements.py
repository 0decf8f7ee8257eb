"""docs/requirements.md is current, and every mark names a requirement."""

from scripts.generate_requirements import PAGE, marks, page, requirements, untested


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(requirements(), marks()), "run scripts/generate_requirements.py"


def test_every_mark_names_a_requirement() -> None:
    known = {row for section in requirements().values() for row in section}
    assert marks().keys() <= known


def test_a_requirement_without_a_test_is_listed() -> None:
    sections = {"A": {"title": "A section", "A-1": "One.", "A-2": "Two."}}
    tests = {"A-1": ["tests/test_a.py::test_one"]}
    assert untested(sections, tests) == ["A-2"]
    written = page(sections, tests)
    assert "1 of 2 have a test. Without one: A-2." in written
    assert "| A-2 | Two. | none |" in written


def test_each_requirement_has_a_test() -> None:
    assert untested(requirements(), marks()) == []
