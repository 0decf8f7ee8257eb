"""One model on two ranks replies as one process does, and both ranks do the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.two_ranks import together


def session(name: str, path: Path, **arguments: Any) -> Any:
    result, codes, text = together(f"tests.ranks.sessions:{name}", path=str(path), **arguments)
    assert codes == [0, 0], text
    return result


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_5"])
def test_replies_equal_those_of_one_process(checkpoint: Callable[..., Path], architecture: str) -> None:
    found = session("everything", checkpoint(architecture))
    ranks, one = found["ranks"], found["one"]
    for kind in one:
        assert ranks[kind] == one[kind], kind
    assert min(ranks["cached"]) > 100 and ranks["preemptions"] > 0
    assert found["left"] == 0
