"""Lets the processes of a test run share what transformers reads of itself. Python imports this file when it starts.

At each import, transformers looks through its 3,400 files twice for the names that they export, which takes as long as
all other imports of a server. Here the first process that does so writes the result beside the compiled files.
"""

import os
import pickle
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

MODULE = "transformers.utils.import_utils"


class Finder:
    """Finds the module that looks for exports, and changes it once it is there."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != MODULE:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_share(module: ModuleType) -> None:
                execute(module)
                share(module)

            spec.loader.exec_module = execute_and_share  # type: ignore[method-assign]
        return spec


def share(module: Any) -> None:
    look = module.create_import_structure_from_path
    source = Path(module.__file__)
    models = source.parents[1] / "models"
    file = models / "__pycache__" / f"exports-{source.stat().st_mtime_ns}.pickle"

    def shared(path: str | Path) -> Any:
        if Path(path) not in (models, models / "__init__.py"):
            return look(path)
        if file.exists():
            return pickle.loads(file.read_bytes())
        found = look(path)
        own = file.with_suffix(f".{os.getpid()}")
        own.parent.mkdir(exist_ok=True)
        own.write_bytes(pickle.dumps(found))
        own.replace(file)
        return found

    module.create_import_structure_from_path = shared


sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]
