"""Run parsers over pieces, and fold what they say."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tests.support.named_formats import OutputParser
from vllm_mlx.core.events import ContentEvent
from vllm_mlx.formats import SchemaBudget, Schemas, read_schemas
from vllm_mlx.formats.families import CALL_FORMATS
from vllm_mlx.formats.families import REASONING_FORMATS as REASONING_FORMATS
from vllm_mlx.formats.pipeline import merged

TOOL_FORMATS = {name: calls.reads for name, calls in CALL_FORMATS.items()}
THINK = ("<think>", "</think>")
TOOL_CALL = ("<tool_call>", "</tool_call>")
MARKERS = (*THINK, *TOOL_CALL)
Piece = tuple[str, bool]
# The tags that bound reasoning, by the name of a format.
REASONING = {
    "qwen3": ("<think>", "</think>"),
    "deepseek_r1": ("<think>", "</think>"),
    "glm45": ("<think>", "</think>"),
    "kimi_k2": ("<think>", "</think>"),
    "step3p5": ("<think>", "</think>"),
    "nemotron_v3": ("<think>", "</think>"),
    "minimax_m2": ("<think>", "</think>"),
    "minimax_m3": ("<mm:think>", "</mm:think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "gemma4": ("<|channel>thought", "<channel|>"),
    "granite": ("Here is my thought process:", "Here is my response:"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
    "hunyuan_a13b": ("<think>", "</think>"),
    "ernie45": ("<think>", "</think>"),
    "hy_v3": ("<think>", "</think>"),
    "hy_v4": ("<think:ab_1>", "</think:ab_1>"),
    "k2_horizon": ("<ifm|think_fast>", "</ifm|think_fast>"),
    "kimi_k3": ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    "cohere_command3": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "inkling": ("<|message_model|><|content_thinking|>", "<|end_message|>"),
    "plamo3": ("<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>"),
    "openai_gptoss": ("<|channel|>analysis<|message|>", "<|end|>"),
    "muse": ("to=self<|message|>", "<|eom|>"),
    "longcat": ("<longcat_think>", "</longcat_think>"),
    "apriel": ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
    "apertus": ("<|inner_prefix|>", "<|inner_suffix|>"),
}


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    tool("get_weather", city={"type": "string"}, days={"type": "integer"}),
    tool("write", path={"type": "string"}, text={"type": "string"}, tags={"type": "array"}),
    tool("now"),
]


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> Schemas:
    """The schemas of declared tools. Those of one list are read once."""
    if id(tools) not in _READ:
        functions = [spec["function"] for spec in tools]
        named = [(function["name"], function["parameters"], function["name"]) for function in functions]
        _READ[id(tools)] = tools, read_schemas(named, SchemaBudget())
    return _READ[id(tools)][1]


_READ: dict[int, tuple[Sequence[Mapping[str, Any]], Schemas]] = {}  # by the id of a list, which is held


def run(
    pieces: Iterable[str | Piece],
    *,
    reasoning: str | None = "qwen3",
    tools: str | None = "hermes",
    is_end: bool = False,
    tool_specs: Sequence[Mapping[str, Any]] = (),
    **options: Any,
):
    """The folded events of the pieces; a piece alone is plain text. Calls are named c0, c1, …"""
    numbers = itertools.count()
    options = {"schemas": schemas_of(tool_specs) if tool_specs else None, **options}
    parser = OutputParser(reasoning, tools, call_ids=lambda: f"c{next(numbers)}", **options)
    events: list[ContentEvent] = []
    for piece in pieces:
        text, special = piece if isinstance(piece, tuple) else (piece, False)
        events += parser.feed(text, special)
    return merged([*events, *parser.finish(is_end=is_end)])


def cuts(text: str, step: int = 1) -> Iterator[list[str]]:
    """Whole, in two at every place or every `step`-th, and every character alone."""
    yield [text]
    yield from ([text[:i], text[i:]] for i in range(1, len(text), step))
    yield list(text)


def as_special(text: str, markers: Iterable[str] = MARKERS) -> list[Piece]:
    """The text as a tokenizer gives it that has the markers as tokens."""
    pieces: list[Piece] = [(text, False)]
    for marker in markers:
        pieces = [part for piece in pieces for part in _split(piece, marker)]
    return pieces


def _split(piece: Piece, marker: str) -> Iterator[Piece]:
    text, special = piece
    if special:
        yield piece
        return
    for index, part in enumerate(text.split(marker)):
        if index:
            yield marker, True
        if part:
            yield part, False
