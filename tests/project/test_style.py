"""The style of docs/contributing.md, as far as a program sees it: sizes of files, sentences, and who catches what."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.project.sources import PACKAGE, ROOT, imported_modules, python_files

MAX_LINES = 600
LONGER: dict[str, tuple[int, str]] = {}  # file → its own limit, and why it is not divided
MIN_LINES = 60  # of a file that one module alone imports and no test is named after
MAX_PROSE = 100  # characters of a line of prose in docs
MAX_FENCES = 13
MAX_PRIVATE = 60  # uses of private attributes in tests, from outside; lower it when there are fewer
PAGES = [
    page for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if page.name != "requirements.md"
]


@cache
def trees() -> dict[str, ast.Module]:
    """The package's modules."""
    return {
        file.relative_to(PACKAGE).as_posix(): ast.parse(file.read_text(encoding="utf-8"))
        for file in PACKAGE.rglob("*.py")
    }


def test_files_are_small_enough_to_be_read_in_one_sitting() -> None:
    lines = {file.relative_to(ROOT).as_posix(): len(file.read_text("utf-8").splitlines()) for file in python_files()}
    assert {file: number for file, number in lines.items() if number > LONGER.get(file, (MAX_LINES, ""))[0]} == {}
    assert [file for file in LONGER if lines.get(file, 0) <= MAX_LINES] == [], "take them off the list"


def test_a_small_file_serves_two_modules_or_has_tests_of_its_own() -> None:
    tested = {file.stem.removeprefix("test_") for file in (ROOT / "tests").rglob("test_*.py")}
    files = {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in PACKAGE.rglob("*.py")}
    importers: dict[str, int] = dict.fromkeys(files, 0)
    for file in files.values():
        if file.name != "__init__.py":
            names = set(imported_modules(file.read_text("utf-8"), file.relative_to(ROOT).parent.parts))
            for name in names & importers.keys():
                importers[name] += 1
    small = [
        name
        for name, file in files.items()
        if importers[name] < 2
        and file.stem not in tested
        and not file.stem.startswith("__")
        and len(file.read_text("utf-8").splitlines()) < MIN_LINES
    ]
    assert small == [], "merge them into the module that they belong to"


def test_tests_enter_by_public_names() -> None:
    files = [file for file in python_files() if file.is_relative_to(ROOT / "tests")]
    lines = [line for file in files for line in file.read_text("utf-8").splitlines()]
    outside = [line for line in lines if not re.search(r"\b(self|cls)\._|scripts\._", line)]
    assert sum(len(re.findall(r"\b[a-z_]+(?:\.[a-z_]+)*\._[a-z]\w*", line)) for line in outside) <= MAX_PRIVATE


# Sentences


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_prose_is_wrapped(page: Path) -> None:
    """Code blocks, tables, headings and quoted messages may be longer, and so may a line that a link makes long."""
    code = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
    text = code.sub(lambda block: "\n" * block[0].count("\n"), page.read_text(encoding="utf-8"))
    lines = [re.sub(r"\]\([^)]*\)", "]", line) for line in text.splitlines()]
    long = [
        number
        for number, line in enumerate(lines, 1)
        if len(line) > MAX_PROSE and not line.lstrip().startswith(("|", "#", "<", ">"))
    ]
    assert not long, f"wrap the lines {long} at {MAX_PROSE} characters"


# Errors of any kind are caught in few places, and each of them names what it protects.


def faulty_handlers(tree: ast.AST) -> Iterator[int]:
    """Lines that catch errors of any kind and keep them from the caller and from the thread that waits."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            names = {part.id for part in ast.walk(node.type or ast.Name("BaseException")) if isinstance(part, ast.Name)}
            is_passed_on = any(
                isinstance(part, ast.Raise) or (isinstance(part, ast.Name) and part.id == node.name)
                for statement in node.body
                for part in ast.walk(statement)
            )
            if "Exception" in names or ("BaseException" in names and not is_passed_on):
                yield node.lineno
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
            names = {ast.unparse(argument) for argument in node.args}
            yield from [node.lineno] * bool(names & {"Exception", "BaseException"})


def fences(tree: ast.AST) -> list[ast.Call]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [call for call in calls if isinstance(call.func, ast.Name) and call.func.id.endswith("Fence")]


def test_errors_of_any_kind_are_caught_by_a_fence_or_passed_on() -> None:
    assert [f"{file}:{line}" for file, tree in trees().items() for line in faulty_handlers(tree)] == []


def test_fences_are_few_and_name_what_they_protect() -> None:
    found = [call for tree in trees().values() for call in fences(tree)]
    assert len(found) <= MAX_FENCES
    assert all(call.args and len(ast.literal_eval(call.args[0]).split()) > 2 for call in found)


@pytest.mark.parametrize(
    "source",
    [
        "try: pass\nexcept (ValueError, Exception): raise",
        "try: pass\nexcept: pass",
        "with contextlib.suppress(Exception): pass",
    ],
)
def test_a_handler_that_keeps_errors_is_found(source: str) -> None:
    assert len(list(faulty_handlers(ast.parse(source)))) == 1
