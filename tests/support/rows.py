"""Marks of tests: the requirements that a test holds, and the cases that only the full run has.

`@row("S1-10")` names a requirement. tests/requirements.toml has their words.
"""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

row = pytest.mark.row
USUAL = ("qwen3", "gemma3_text", "qwen3_5", "nemotron_h")  # dense, sliding windows, gated delta, Mamba


def cases(names: Iterable[Any], usual: Collection[Any] = USUAL) -> list[Any]:
    """Cases of a test, by name. Every run of the tests has the `usual` ones; only the full run has the others."""
    return [pytest.param(name, marks=() if name in usual else pytest.mark.full) for name in names]
