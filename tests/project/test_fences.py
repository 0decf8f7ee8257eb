"""Errors of any kind are caught in few places, and each of them names what it protects."""

import ast
from collections.abc import Iterator
from functools import cache

from tests.project.sources import PACKAGE

MAX_FENCES = 12
# Here an error goes on: it is raised again, or in the thread that waits for the result.
PASSED_ON = {
    "cli/serve.py": 1,  # as the error with which the command ends
    "core/tasks.py": 1,  # a future
    "engine/engine.py": 2,  # the future of the load, and the end of the engine thread
    "engine/generation.py": 1,
    "guidance/grammar_compiler.py": 1,  # a future
    "media/loader.py": 1,
    "server/response_store.py": 1,
    "server/responses.py": 1,
}
BROAD = {"Exception", "BaseException"}


def names(node: ast.expr | None) -> set[str]:
    if node is None:
        return {"BaseException"}
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def fences(tree: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("Fence"):
            yield node


def broad_handlers(tree: ast.AST, kind: str) -> int:
    return sum(isinstance(node, ast.ExceptHandler) and kind in names(node.type) for node in ast.walk(tree))


@cache
def trees() -> dict[str, ast.Module]:
    return {
        file.relative_to(PACKAGE).as_posix(): ast.parse(file.read_text(encoding="utf-8"))
        for file in PACKAGE.rglob("*.py")
    }


def test_every_error_is_caught_by_a_fence_only() -> None:
    assert {file: number for file, tree in trees().items() if (number := broad_handlers(tree, "Exception"))} == {}


def test_fences_are_few_and_name_what_they_protect() -> None:
    found = [(file, call) for file, tree in trees().items() for call in fences(tree)]
    lines = [f"{file}:{call.lineno}" for file, call in found]
    assert len(found) <= MAX_FENCES, "\n".join(lines)
    assert all(call.args and len(ast.literal_eval(call.args[0]).split()) > 2 for _, call in found), lines


def test_a_handler_of_base_exceptions_passes_them_on() -> None:
    found = {file: number for file, tree in trees().items() if (number := broad_handlers(tree, "BaseException"))}
    assert found == PASSED_ON


def test_suppress_is_not_broad() -> None:
    suppressed = {
        name
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress")
        for argument in node.args
        for name in names(argument)
    }
    assert not suppressed & BROAD


def test_handlers_and_fences_are_found() -> None:
    tree = ast.parse("try: pass\nexcept (ValueError, Exception): pass\nwith RowFence('the other rows'): pass")
    bare = ast.parse("try: pass\nexcept: pass")
    assert broad_handlers(tree, "Exception") == 1 and len(list(fences(tree))) == 1
    assert broad_handlers(bare, "BaseException") == 1
