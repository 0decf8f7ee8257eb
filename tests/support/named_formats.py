"""The product's doors to formats of replies, by the names that a user chooses. A format stands for itself."""

from collections.abc import Sequence
from typing import Any

from vllm_mlx import formats
from vllm_mlx.formats import pipeline
from vllm_mlx.formats.families import CALL_FORMATS, REASONING_FORMATS
from vllm_mlx.formats.family import Header
from vllm_mlx.guidance.grammars import CallsWriter, GuidedTool, LarkWriter


def reasoning_format(choice: Any) -> Any:
    return REASONING_FORMATS[choice] if isinstance(choice, str) else choice


def call_format(choice: Any) -> Any:
    return CALL_FORMATS[choice] if isinstance(choice, str) else choice


class ReplyFormats(formats.ReplyFormats):
    def __init__(self, reasoning: Any = None, calls: Any = None, **options: Any):
        super().__init__(reasoning_format(reasoning), call_format(calls), **options)


class OutputParser(pipeline.OutputParser):
    def __init__(self, reasoning: Any, tools: Any, **options: Any):
        super().__init__(reasoning_format(reasoning), call_format(tools), **options)


def required_calls(
    tools: Sequence[GuidedTool], choice: Any, writer: LarkWriter, header: Header, most: int | None
) -> str:
    return CallsWriter(call_format(choice), writer).required(tools, header, most)


def calls_in_text(
    tools: Sequence[GuidedTool], choice: Any, writer: LarkWriter, header: Header, most: int | None
) -> str:
    return CallsWriter(call_format(choice), writer).in_text(tools, header, most)
