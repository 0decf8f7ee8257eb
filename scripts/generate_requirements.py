#!/usr/bin/env python3
"""Writes docs/requirements.md: each requirement with the tests that hold it. Runs no test.

It ends with 1 if a requirement has no test, and names the requirement.
"""

import ast
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "requirements.md"
_HEAD = """# Requirements

What the server promises, and the tests that hold each promise. `scripts/generate_requirements.py` writes this page
from `tests/requirements.toml` and the `@row(…)` marks of the tests.
"""


def requirements() -> dict[str, dict[str, str]]:
    """Return sections by name; in each its `title` and the sentence of every row."""
    return tomllib.loads((ROOT / "tests" / "requirements.toml").read_text(encoding="utf-8"))


def marks() -> dict[str, list[str]]:
    """Return the tests of each row, as `tests/file.py::name`, sorted."""
    found: dict[str, list[str]] = defaultdict(list)
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        source = file.read_text(encoding="utf-8")
        if "@row(" in source:
            for name, rows in _marked(ast.parse(source)):
                for row in rows:
                    found[row].append(f"{file.relative_to(ROOT).as_posix()}::{name}")
    return found


def _marked(module: ast.Module) -> Iterator[tuple[str, Sequence[str]]]:
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and isinstance(mark.func, ast.Name) and mark.func.id == "row":
                    yield node.name, [str(ast.literal_eval(argument)) for argument in mark.args]


def page(sections: Mapping[str, Mapping[str, str]], tests: Mapping[str, Sequence[str]]) -> str:
    parts = [_HEAD]
    missing = untested(sections, tests)
    total = sum(len(section) - 1 for section in sections.values())
    parts.append(
        f"{total - len(missing)} of {total} have a test."
        + (f" Without one: {', '.join(missing)}." * bool(missing))
        + "\n"
    )
    for section in sections.values():
        parts.append(f"## {section['title']}\n\n| row | requirement | tests |\n| --- | --- | --- |")
        for row, sentence in section.items():
            if row != "title":
                held = "<br>".join(f"`{test}`" for test in tests.get(row, ())) or "none"
                parts.append(f"| {row} | {sentence} | {held} |")
        parts.append("")
    return "\n".join(parts)


def untested(sections: Mapping[str, Mapping[str, str]], tests: Mapping[str, Sequence[str]]) -> list[str]:
    return [row for section in sections.values() for row in section if row != "title" and row not in tests]


def main() -> int:
    sections, tests = requirements(), marks()
    PAGE.write_text(page(sections, tests), encoding="utf-8")
    missing = untested(sections, tests)
    if missing:
        print(f"No test holds {', '.join(missing)}. Mark one with @row.", file=sys.stderr)
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
