"""Calls that are written as text are read again as the same calls, in every family."""

import json

import pytest

from tests.support.named_formats import OutputParser
from vllm_mlx.core.events import ToolCallDelta, ToolCallStart
from vllm_mlx.core.messages import ToolCallPart
from vllm_mlx.formats import SchemaBudget, read_schemas
from vllm_mlx.formats.families import FAMILIES
from vllm_mlx.formats.family import Family, Spelling
from vllm_mlx.formats.written import written_calls

CALLS = (
    ToolCallPart("functions.read:0", "read", {"path": 'a "b"\'.py\nc', "limit": 3, "all": True}),
    ToolCallPart("functions.edit:1", "edit", {"lines": [1.5, None, "x"], "more": {"key": {"deep": False}}}),
    ToolCallPart("functions.none:2", "none", {}),
)
TYPES = {"path": "string", "limit": "integer", "all": "boolean", "lines": "array", "more": "object"}
SCHEMA = {"type": "object", "properties": {name: {"type": type_} for name, type_ in TYPES.items()}}
SPELLINGS = [
    pytest.param(family, spelling, id=f"{family.name}-{number}")
    for family in FAMILIES
    if family.calls is not None
    for number, spelling in enumerate(family.calls.writes)
]


@pytest.mark.parametrize(("family", "spelling"), SPELLINGS)
def test_they_are_read_as_they_were(family: Family, spelling: Spelling) -> None:
    calls = CALLS[:1] if spelling.is_single else CALLS
    text = written_calls(spelling, calls)
    tools = ((call.name, SCHEMA, "tools") for call in calls)
    parser = OutputParser(None, family.call_choices[0], schemas=read_schemas(tools, SchemaBudget()))
    events = [*parser.feed(text), *parser.finish(is_end=True)]
    names = [event.name for event in events if isinstance(event, ToolCallStart)]
    found = ["" for _ in names]
    for event in events:
        if isinstance(event, ToolCallDelta):
            found[event.index] += event.arguments
    assert names == [call.name for call in calls]
    assert [json.loads(arguments or "{}") for arguments in found] == [call.arguments for call in calls]
