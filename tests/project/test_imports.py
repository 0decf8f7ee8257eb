"""The import rule of docs/architecture.md: a package imports only packages of lower rank, or itself.

Tests may import scripts and scripts may import tests, but no folder imports itself by way of the other side.
"""

from collections.abc import Iterable, Mapping
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.project.sources import PACKAGE, ROOT, imported_modules, python_files

RANKS = {
    "core": 1,
    "util": 2,
    "cache": 3,
    "formats": 3,
    "disk": 4,
    "guidance": 4,
    "media": 4,
    "prompt": 5,
    "runner": 5,
    "scheduler": 5,
    "ranks": 6,
    "api": 7,
    "engine": 7,
    "server": 8,
    "cli": 9,
}
PURE = {"core", "formats", "scheduler", "api"}
WRAPPERS = {PACKAGE / "formats" / "tokenizer.py", PACKAGE / "formats" / "remote_code.py"}  # of libraries, by pure files
HEAVY = {"mlx", "mlx_lm", "mlx_vlm", "numpy", "torch", "transformers", "tokenizers", "huggingface_hub", "fastapi"}
FILES = sorted(file for file in PACKAGE.rglob("*.py") if file.parent != PACKAGE)


def package_of(module: str) -> str | None:
    """`scheduler` for `vllm_mlx.scheduler.prefill_pacer`."""
    parts = module.split(".")
    return parts[1] if parts[0] == "vllm_mlx" and len(parts) > 1 and parts[1] in RANKS else None


def faults(source: str, folders: tuple[str, ...]) -> list[str]:
    """What `source`, a module in the package `folders`, must not import."""
    own = folders[1]
    found = []
    for module in imported_modules(source, folders):
        package = package_of(module)
        if package is not None and package != own and RANKS[package] >= RANKS[own]:
            found.append(f"{own} (rank {RANKS[own]}) imports {module} (rank {RANKS[package]})")
        if own in PURE and module.split(".")[0] in HEAVY:
            found.append(f"{own} is pure and imports {module}")
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_module_imports_only_what_its_rank_allows(file: Path) -> None:
    found = faults(file.read_text(encoding="utf-8"), file.relative_to(ROOT).parent.parts)
    assert [fault for fault in found if file not in WRAPPERS or " is pure " not in fault] == []


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Imports inside functions and for types count: each of them is a way that a reader goes."""
    names = {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in FILES}
    graph = {
        name: names.keys() & imported_modules(file.read_text(encoding="utf-8"), file.relative_to(ROOT).parent.parts)
        for name, file in names.items()
    }
    assert len(list(TopologicalSorter(graph).static_order())) == len(names)


def test_every_package_has_a_rank() -> None:
    packages = {file.relative_to(PACKAGE).parts[0] for file in PACKAGE.rglob("*.py") if file.parent != PACKAGE}
    assert packages <= RANKS.keys()


@pytest.mark.parametrize(
    "line",
    [
        "from ..server import app",
        "from .. import server",
        "from vllm_mlx.server.app import ServerConfig",
        "from vllm_mlx import server",
        "import vllm_mlx.server.app",
        "def later():\n    from ..api.openai import schema",
        "import mlx.core as mx",
        "import numpy",
    ],
)
def test_the_rule_sees_every_form_of_import(line: str) -> None:
    assert faults(line, ("vllm_mlx", "scheduler")) != []


def test_imports_of_lower_ranks_are_free() -> None:
    source = "import heapq\nfrom ..core.step import StepPlan\nfrom . import pacing\nfrom .pacing import Pacer\n"
    assert faults(source, ("vllm_mlx", "scheduler")) == []
    assert faults("from ...core.errors import ConfigError", ("vllm_mlx", "api", "openai")) == []
    assert faults("from ...server import app", ("vllm_mlx", "api", "openai")) != []


# Tests and scripts


def folder_of(module: str) -> str | None:
    """`scripts._bench` for `scripts._bench.client`, and None for a module of neither tests nor scripts."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] in ("tests", "scripts") and len(parts) > 1 else None


def imported_folders(sources: Iterable[tuple[str, tuple[str, ...]]]) -> dict[str, set[str]]:
    """By folder, the folders that its modules import. A source comes with the package that it stands in."""
    found: dict[str, set[str]] = {}
    for source, package in sources:
        own = ".".join(package[:2])
        others = {folder for module in imported_modules(source, package) if (folder := folder_of(module))}
        found.setdefault(own, set()).update(others - {own})
    return found


def reached(folder: str, imports: Mapping[str, set[str]]) -> set[str]:
    """All folders that `folder` imports, directly or by way of others."""
    seen: set[str] = set()
    waiting = [folder]
    while waiting:
        new = imports.get(waiting.pop(), set()) - seen
        seen |= new
        waiting += new
    return seen


def circles(imports: Mapping[str, set[str]]) -> list[tuple[str, str]]:
    """Pairs of a folder of scripts and one of tests that reach each other."""
    scripts = [folder for folder in imports if folder.startswith("scripts.")]
    return [
        (folder, other)
        for folder in scripts
        for other in sorted(reached(folder, imports))
        if other.startswith("tests.") and folder in reached(other, imports)
    ]


def test_tests_and_scripts_import_each_other_in_no_circle() -> None:
    files = [(file, file.relative_to(ROOT).parent.parts) for file in python_files()]
    sources = [(file.read_text(encoding="utf-8"), package) for file, package in files if package[0] != "vllm_mlx"]
    assert circles(imported_folders(sources)) == []


def test_a_circle_is_found_by_way_of_other_folders() -> None:
    sources = [
        ("from tests.support.rote import CALL", ("scripts", "_bench")),
        ("from ..acceptance import agent", ("tests", "support")),
        ("def later():\n    from scripts._bench.client import read", ("tests", "acceptance")),
    ]
    assert circles(imported_folders(sources)) == [
        ("scripts._bench", "tests.acceptance"),
        ("scripts._bench", "tests.support"),
    ]
    assert circles(imported_folders(sources[:2])) == []
