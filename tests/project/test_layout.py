"""Files earn their place, and packages depend on each other one way. Exceptions are listed, and may only get fewer."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.project.sources import PACKAGE, ROOT, imported_modules

MIN_LINES = 60  # of a file that one module alone imports and no test is named after
SMALL: set[str] = set()
CIRCLES: set[frozenset[str]] = set()  # packages that import each other, here with the ones below them only

Imports = Mapping[Path, set[Path]]


def imports() -> Imports:
    """The package's modules, and the ones that each imports."""
    files = {_dotted(file): file for file in PACKAGE.rglob("*.py")}
    return {
        file: {
            files[name]
            for name in imported_modules(file.read_text(encoding="utf-8"), file.relative_to(ROOT).parent.parts)
            if files.get(name, file) != file
        }
        for file in files.values()
    }


def _dotted(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def small(imports: Imports, tested: set[str]) -> Iterator[Path]:
    for file in imports:
        importers = {other for other, found in imports.items() if file in found and other.name != "__init__.py"}
        num_lines = len(file.read_text(encoding="utf-8").splitlines())
        if not file.name.startswith("__") and num_lines < MIN_LINES and len(importers) < 2 and file.stem not in tested:
            yield file


def circles(graph: Mapping[str, set[str]]) -> set[frozenset[str]]:
    """Largest sets of nodes that all lead to each other."""
    reached = {node: _reached(graph, node) for node in graph}
    return {frozenset({node, *(other for other in found if node in reached.get(other, ()))})
            for node, found in reached.items() if node in found}  # fmt: skip


def _reached(graph: Mapping[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    left = [start]
    while left:
        new = graph.get(left.pop(), set()) - found
        found |= new
        left += new
    return found


def packages(imports: Imports) -> dict[str, set[str]]:
    """Folders, and the folders that their files import. Files of the root package stand above all."""
    graph: dict[str, set[str]] = {}
    for file, found in imports.items():
        others = graph.setdefault(_folder(file), set())
        others |= {_folder(other) for other in found} - {_folder(file), "."}
    return graph


def _folder(file: Path) -> str:
    return file.parent.relative_to(PACKAGE).as_posix()


def test_a_small_file_serves_two_modules_or_has_tests_of_its_own() -> None:
    tested = {file.stem.removeprefix("test_") for file in (ROOT / "tests").rglob("test_*.py")}
    found = {file.relative_to(PACKAGE).as_posix() for file in small(imports(), tested)}
    assert found - SMALL == set(), "merge them into the module that they belong to"
    assert SMALL - found == set(), "these are no exceptions any more: take them off the list"


def test_packages_do_not_import_each_other_in_a_circle() -> None:
    found = circles(packages(imports()))
    assert found == CIRCLES, "a circle is new, or one of the list has gone"


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": set(), "f": {"a"}}
    assert circles(graph) == {frozenset("abc")}


def test_a_package_and_one_below_it_may_make_a_circle() -> None:
    upper, lower = PACKAGE / "x" / "one.py", PACKAGE / "x" / "y" / "two.py"
    assert circles(packages({upper: {lower}, lower: {upper}})) == {frozenset({"x", "x/y"})}
