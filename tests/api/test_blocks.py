"""Events → blocks."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_mlx.api.blocks import BlockDelta, BlockEnd, BlockEvent, BlockSplitter, BlockStart
from vllm_mlx.core.events import GenerationEvent, TextDelta, ToolCallDelta, ToolCallEnd, ToolCallStart

from .events import cut_anywhere, finished, replies

LS = ToolCallStart(0, "call_1", "ls")


def blocks(events: list[GenerationEvent]) -> list[BlockEvent]:
    splitter = BlockSplitter()
    return [block for event in events for block in splitter.feed(event)]


def ended(events: list[GenerationEvent]) -> list[BlockEnd]:
    return [block for block in blocks(events) if isinstance(block, BlockEnd)]


def test_a_reply_that_said_nothing_has_one_empty_text() -> None:
    assert blocks([TextDelta(""), finished()]) == [BlockStart(0, "text"), BlockEnd(0, "text", "")]


def test_arguments_that_never_came_are_an_empty_object() -> None:
    assert blocks([LS, ToolCallEnd(0), finished()]) == [
        BlockStart(0, "call", LS),
        BlockDelta(0, "call", "{}"),
        BlockEnd(0, "call", "{}", LS),
    ]


@pytest.mark.parametrize("after", [TextDelta("x"), ToolCallStart(1, "call_2", "cat"), finished()])
def test_a_call_without_its_end_is_ended_by_what_follows(after: GenerationEvent) -> None:
    first, *_ = ended([LS, ToolCallDelta(0, '{"a'), after, finished()])
    assert first == BlockEnd(0, "call", '{"a', LS)


@given(replies())
def test_blocks_follow_one_another_and_their_deltas_make_their_text(events: list[GenerationEvent]) -> None:
    open_block: BlockStart | None = None
    texts: list[str] = []
    count = 0
    for block in blocks(events):
        match block:
            case BlockStart(index):
                assert open_block is None and index == count
                open_block, texts = block, []
            case BlockDelta(index, kind, text):
                assert open_block is not None and (open_block.index, open_block.kind) == (index, kind) and text
                texts.append(text)
            case BlockEnd(index, kind, text, call):
                assert open_block == BlockStart(index, kind, call) and "".join(texts) == text
                open_block, count = None, count + 1
    assert open_block is None and count


@given(st.data(), replies())
def test_where_deltas_were_cut_does_not_matter(data: Any, events: list[GenerationEvent]) -> None:
    assert ended(data.draw(cut_anywhere(events))) == ended(events)
