"""A format with brackets that no family has is described by values alone: tags, a name, arguments."""

import json

import pytest

from vllm_mlx.core.events import TextDelta, ToolCallDelta, ToolCallStart
from vllm_mlx.core.messages import ToolCallPart
from vllm_mlx.formats.bodies.compose import Name, Tag
from vllm_mlx.formats.call_formats import named
from vllm_mlx.formats.family import Calls, NamedCall, Spelling
from vllm_mlx.formats.layouts import between
from vllm_mlx.formats.pipeline import OutputParser
from vllm_mlx.formats.written import written_calls

from .support import TOOLS, schemas_of

CALLS = (ToolCallPart("1", "get_weather", {"city": "Röm ⟧", "days": 2}), ToolCallPart("2", "now", {}))


def calls_in(left: str, right: str) -> Calls:
    opens, closes = f"{left}call ", f"{left}/call{right}"
    reads = between(named(Name(), Tag((right,))), opens, closes, inner=(right,))
    return Calls(reads, (Spelling(NamedCall("", right), opens, closes),))


@pytest.mark.parametrize("brackets", ["⟦⟧", "⟪⟫", "【】", "«»", "<>", "[]"])
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_calls_in_these_brackets_are_read_as_they_are_written(brackets: str, size: int) -> None:
    calls = calls_in(*brackets)
    text = f"Look.{written_calls(calls.writes[0], CALLS)}{calls.reads.closes[0]}"  # the last tag closes nothing
    parser = OutputParser(None, calls, schemas=schemas_of(TOOLS))
    events = [event for at in range(0, len(text), size) for event in parser.feed(text[at : at + size])]
    events += parser.finish(is_end=True)
    assert [event.name for event in events if isinstance(event, ToolCallStart)] == [call.name for call in CALLS]
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == "Look."
    for index, call in enumerate(CALLS):
        deltas = [each.arguments for each in events if isinstance(each, ToolCallDelta) and each.index == index]
        assert json.loads("".join(deltas) or "{}") == call.arguments


@pytest.mark.parametrize("brackets", ["⟦⟧", "«»"])
def test_a_tag_that_closes_nothing_is_not_shown(brackets: str) -> None:
    calls = calls_in(*brackets)
    parser = OutputParser(None, calls, schemas=schemas_of(TOOLS))
    events = [*parser.feed(f"Done.{calls.reads.closes[0]} Next>"), *parser.finish(is_end=True)]
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == "Done. Next>"
