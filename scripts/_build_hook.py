"""Writes the commit into a wheel, so that `vllm-mlx --version` names it there too. It is part of the build."""

import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CommitHook(BuildHookInterface):
    """Adds `vllm_mlx/commit.txt`. A build outside of a clone has none."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the file before a wheel is made; an editable installation asks its clone instead."""
        command = ["git", "-C", self.root, "rev-parse", "--short=10", "HEAD"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if version == "standard" and result.returncode == 0:
            path = Path(tempfile.mkdtemp()) / "commit.txt"
            path.write_text(result.stdout)
            build_data["force_include"][str(path)] = "vllm_mlx/commit.txt"
