"""The style's words, package by package and page by page."""

import re
from pathlib import Path

import pytest

from tests.project.sources import PACKAGE, ROOT
from tests.project.words import begins_with_preposition, faults_of, in_prose, in_python

MAX_PROSE = 100  # characters of a line of prose in docs
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
CODE_BLOCK = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
GENERATED = {"requirements.md"}
GLOSSARY = "contributing.md"  # it names the words that the style rules out


def place_of(file: Path) -> str:
    """`engine` for vllm_mlx/engine/engine.py, `clients/codex.md` for a page."""
    if file.suffix == ".md":
        return file.name if file.parent == ROOT else file.relative_to(ROOT / "docs").as_posix()
    parts = file.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else "root"


def places() -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for file in (*sorted(PACKAGE.rglob("*.py")), *PAGES):
        if file.name not in GENERATED and file.name != GLOSSARY:
            found.setdefault(place_of(file), []).append(file)
    return found


@pytest.mark.parametrize("place", places())
def test_words_that_the_style_rules_out(place: str) -> None:
    faults = [fault for file in places()[place] for fault in faults_of(file)]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("page", PAGES, ids=place_of)
def test_prose_is_wrapped(page: Path) -> None:
    if page.name in GENERATED:
        return
    long = [number for number, line in prose_lines(page) if len(line) > MAX_PROSE]
    assert not long, f"wrap the lines {long} of {place_of(page)} at {MAX_PROSE} characters"


def prose_lines(page: Path) -> list[tuple[int, str]]:
    """Without code blocks, tables, headings, quoted messages and lines that a link makes long."""
    text = re.sub(
        r"^ *```.*?^ *```", lambda block: "\n" * block[0].count("\n"), read(page), flags=re.DOTALL | re.MULTILINE
    )
    lines = enumerate(text.splitlines(), 1)
    return [
        (number, line)
        for number, line in lines
        if not line.lstrip().startswith(("|", "#", "<", ">")) and len(re.sub(r"\]\([^)]*\)", "]", line)) > MAX_PROSE
    ]


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ('"""Made anew."""', "anew: write again"),
        ("x = 1  # of the row", "begins with a preposition: of the row"),
        ("# It is told\nx = 1", "told: write reported, sent"),
        ("# Two lines are one text, which is given\n# way to another\nx = 1", "given way: write yield, is evicted"),
        ("def thoughts() -> None: ...", "the name thoughts: write reasoning, vision encoder or image"),
        ("class BigPicture: ...", "the name BigPicture: write reasoning, vision encoder or image"),
        ("y = [each for each in x]", "a variable named each: name the thing"),
        ('def f(x):\n    """Of all rows."""', "begins with a preposition: Of all rows."),
        ('x: int = 1\n"""Anew."""', "Anew: write again"),
        ('option(help="Show thoughts.")', "thoughts: write reasoning"),
        ('raise Error(f"Row {x} has no `tower`, as told.")', "told: write reported, sent"),
        ('option("Of one row.")', "begins with a preposition: Of one row."),
    ],
)
def test_a_fault_of_python_is_found(source: str, fault: str) -> None:
    assert [found for _, found in in_python(source)] == [fault]


def test_code_in_prose_is_left_alone() -> None:
    page = "Set `--tower`, as [told](tower.md).\n\n```\npictures\n```\n\nThen it is had.\n"
    assert list(in_prose(page)) == [(1, "told: write reported, sent"), (7, "is had: write is fetched, is read")]


@pytest.mark.parametrize(
    ("text", "is_fault"),
    [
        ("Of all rows.", True),
        ("As the server gives it.", True),
        ("by seq_id", False),
        ("For each row, plan a chunk.", False),
        ("Plan a chunk for each row.", False),
    ],
)
def test_a_docstring_begins_with_its_subject(text: str, is_fault: bool) -> None:
    assert begins_with_preposition(text) is is_fault
