"""The project's own Python files, for the tests that look at all of them."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "vllm_mlx"


def python_files() -> list[Path]:
    return sorted(file for folder in ("vllm_mlx", "tests", "scripts") for file in (ROOT / folder).rglob("*.py"))


def imported_modules(source: str, package: tuple[str, ...]) -> Iterator[str]:
    """Absolute dotted names of what a module in `package` imports, wherever in it the import stands.

    `from .. import server` and `from vllm_mlx import server` both give `vllm_mlx.server`.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
