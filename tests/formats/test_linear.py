"""The work of reading a reply grows as its length: no text is read again and again while it is not decided."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from tests.support.named_formats import OutputParser
from vllm_mlx.formats.family import Family as ProductFamily

from .families import Family
from .support import schemas_of, tool
from .test_each_family import CASES, openings, reasoning_name

TOOLS = [tool("write", text={}, other={})]
SIZE = 150  # each shape is read at this size and at four times this size
PIECE = 5  # characters


def begin(family: ProductFamily) -> str:
    return (openings(family) or family.calls.reads.openings)[0].marker if family.calls is not None else ""


Shape = Callable[[ProductFamily, Family, int], str]
SHAPES: dict[str, Shape] = {
    "many calls": lambda _, writer, size: writer.calls(*[("write", {"text": "x"})] * (size // 10)),
    "a long argument": lambda _, writer, size: writer.calls(("write", {"text": "a <b> " * size})),
    "deep arguments": lambda _, writer, size: writer.calls(("write", {"text": nested(size // 2)})),
    "arguments before the name": lambda family, _, size: (
        begin(family) + '{"arguments": {"text": "' + "x " * size + '"}, "name": "write"}'
    ),
    "many arguments": lambda _, writer, size: writer.calls(("write", {f"k{n}": "v" for n in range(size // 10)})),
    "an unfinished header": lambda family, _, size: begin(family) + "word " * size,
    "an unfinished name": lambda family, _, size: begin(family) + "x" * size * 4,
    "white space": lambda family, _, size: begin(family) + " \n" * size * 2,
    "white space in a tag": lambda _, writer, size: (
        writer.calls(("write", {"text": "x"})).split("text")[0] + " \n" * size * 2
    ),
    "opening tags": lambda family, _, size: begin(family) * size,
    "opening tags in lines": lambda family, _, size: f"{begin(family)}\n" * size,
    "brackets": lambda family, _, size: begin(family) + "[" * size + "{" * size + "<" * size,
    "half tags": lambda family, _, size: f"x{begin(family)[:-1]} " * size,
    "channels": lambda _, __, size: "<|channel|>analysis to=" * size,
}


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def work(feed: Callable[[str], Any], text: str) -> int:
    """The characters that are handed to functions while the text is read in small pieces, and the calls."""
    seen = 0

    def count(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal seen
        if event == "call":
            code = frame.f_code
            values = (frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount])
            seen += 1 + sum(len(value) for value in values if isinstance(value, str))

    pieces = [text[start : start + PIECE] for start in range(0, len(text), PIECE)]
    sys.setprofile(count)
    try:
        for piece in pieces:
            feed(piece)
    finally:
        sys.setprofile(None)
    return seen


def check(family: ProductFamily, writer: Family, shape: Shape) -> None:
    name = family.call_choices[0]

    def total(size: int) -> int:
        parser = OutputParser(reasoning_name(family), name, schemas=schemas_of(TOOLS))
        return work(parser.feed, shape(family, writer, size))

    small, large = total(SIZE), total(4 * SIZE)
    assert large < 8 * small, (small, large)  # linear: 4 times, more beyond a limit of depth; quadratic: 16 times


@pytest.mark.full
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("family", "writer"), CASES)
def test_every_format_reads_every_shape_in_linear_work(family: ProductFamily, writer: Family, shape: str) -> None:
    check(family, writer, SHAPES[shape])


@pytest.mark.parametrize(("number", "shape"), enumerate(SHAPES))
def test_work_is_linear(number: int, shape: str) -> None:
    """Every run reads each shape in one format."""
    for case in CASES[number :: 6 * len(SHAPES)]:
        family, writer = case.values
        check(family, writer, SHAPES[shape])
