"""A body is told by its first character, even where the tokenizer holds its tag as one token."""

from tests.support.named_formats import OutputParser
from tests.support.rows import row
from vllm_mlx.core.events import TextDelta, ToolCallDelta, ToolCallEnd, ToolCallStart

PIECES = ["<tool_call>", "\n", "<function=", "Read>\n", "<parameter=", "path>\nnotes.txt\n", "</parameter>", "\n"]
ENDS = ["</function>", "\n", "</tool_call>"]
TOKENS = frozenset({"<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>"})


@row("S0-7")
def test_tags_inside_a_call_may_be_tokens():
    parser = OutputParser("qwen3", "qwen3_xml", marker_tokens=TOKENS, call_ids=lambda: "call_1")
    events = [event for piece in (*PIECES, *ENDS) for event in parser.feed(piece, special=piece in TOKENS)]
    events += parser.finish()
    arguments = "".join(event.arguments for event in events if isinstance(event, ToolCallDelta))
    assert not [event for event in events if isinstance(event, TextDelta)]
    assert events[0] == ToolCallStart(0, "call_1", "Read")
    assert arguments == '{"path": "notes.txt"}'
    assert events[-1] == ToolCallEnd(0)
