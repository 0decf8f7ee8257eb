"""Regular expressions that see a client's or a model's text take time in proportion to it."""

import importlib
import pkgutil
import re
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.project.sources import PACKAGE

SHORT, LONG = 500, 4_000  # characters
LINEAR = LONG / SHORT
NOISE_S = 0.002  # below this nothing is compared
TRUSTED = ("vllm_mlx.cli", "vllm_mlx.disk", "vllm_mlx.formats.selection")  # they read the operator's text and files
ENDS = ("", "\0")
AT_ONE_PLACE = {"match", "fullmatch"}
COMMON = (
    '"', '\\"', "\\/", "/", " ", "\n", "\r\n", "a", "a ", "0", "<", "{", "{#", "{{", "[", "(", "\\", "<a ", "a=", "é",
)  # fmt: skip


def modules() -> Iterator[Any]:
    for found in pkgutil.walk_packages([str(PACKAGE)], "vllm_mlx."):
        if not found.name.endswith("__main__") and not found.name.startswith(TRUSTED):
            yield importlib.import_module(found.name)


def uses() -> Iterator[tuple[str, re.Pattern[Any], bool]]:
    """Every pattern of a module, and whether it is searched for in a text rather than tried at one place."""
    for module in modules():
        source = Path(str(module.__file__)).read_text(encoding="utf-8")
        for name, value in vars(module).items():
            if isinstance(value, re.Pattern) and f"\n{name} = " in source:
                methods = set(re.findall(rf"\b{name}\.(\w+)\(", source))
                yield f"{module.__name__}.{name}", value, not methods or not methods <= AT_ONE_PLACE
        for number, text in enumerate(
            re.findall(r"re\.(?:search|findall|sub|split)\(r?b?\"((?:\\.|[^\"\\])*)\"", source)
        ):
            yield f"{module.__name__}#{number}", re.compile(text), True


def texts(pattern: re.Pattern[Any]) -> set[str]:
    """Pieces that, repeated, make the pattern begin a match at many places and fail late."""
    source = pattern.pattern if isinstance(pattern.pattern, str) else pattern.pattern.decode("latin-1")
    marks = [char for char in dict.fromkeys(source.replace("\\", "")) if char.isascii() and char.isprintable()][:40]
    words = re.findall(r"[A-Za-z<{#%/ ]{2,}", source)
    return {*COMMON, *marks, *(f"{mark}a" for mark in marks), *words}


def seconds(pattern: re.Pattern[Any], text: Any, is_searched: bool) -> float:
    run = partial(pattern.sub, text[:0], text) if is_searched else partial(pattern.match, text)
    start = time.thread_time()
    run()
    return time.thread_time() - start


def is_linear(pattern: re.Pattern[Any], piece: str, end: str, is_searched: bool) -> bool:
    """Whether any of three tries is in proportion, so that a busy machine fails nothing."""
    for _ in range(3):
        short, long = ((piece * (size // len(piece) + 1))[:size] + end for size in (SHORT, LONG))
        if isinstance(pattern.pattern, bytes):
            short, long = short.encode(), long.encode()  # type: ignore[assignment]
        taken = seconds(pattern, long, is_searched)
        if taken < NOISE_S or taken < 3 * LINEAR * max(seconds(pattern, short, is_searched), NOISE_S / 40):
            return True
    return False


@pytest.mark.parametrize("use", [pytest.param(use, id=use[0].removeprefix("vllm_mlx.")) for use in uses()])
def test_a_pattern_takes_time_in_proportion_to_the_text(use: tuple[str, re.Pattern[Any], bool]) -> None:
    _, pattern, is_searched = use
    tried = ((piece, end) for piece in sorted(texts(pattern)) for end in ENDS)
    slow = next((each for each in tried if not is_linear(pattern, *each, is_searched)), None)
    assert slow is None


def test_a_pattern_that_is_tried_again_from_every_place_is_noticed() -> None:
    assert not is_linear(re.compile(r'"(?:\\.|[^"\\\n])*"'), '\\"', "", True)
