"""The product's doors to formats of replies, by the names that a user chooses. A format stands for itself."""

from collections.abc import Sequence
from typing import Any

from vllm_mlx import formats
from vllm_mlx.core.config import EngineConfig
from vllm_mlx.formats import pipeline
from vllm_mlx.formats.families import CALL_FORMATS, REASONING_FORMATS
from vllm_mlx.formats.family import Header
from vllm_mlx.formats.tokenizer import Tokenizer
from vllm_mlx.guidance.constraint_builder import ConstraintBuilder
from vllm_mlx.guidance.grammars import CallsWriter, GuidedTool, LarkWriter
from vllm_mlx.guidance.reasoning import CheckpointReasoning


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


def constraint_builder(
    tokenizer: Tokenizer, reasoning: Any = None, tools: Any = None, *, vocab_size: int | None = None, **config: Any
) -> ConstraintBuilder:
    """`config`: fields of EngineConfig. `vocab_size`: by default, the tokenizer's."""
    settings = EngineConfig(model="m", **config)
    strings, width = settings.reasoning_config, vocab_size or tokenizer.vocab_size
    has_tags = reasoning is not None or strings is not None
    judge = CheckpointReasoning(tokenizer, reasoning_format(reasoning), strings) if has_tags else None
    return ConstraintBuilder(tokenizer, settings, vocab_size=width, reasoning=judge, tools=call_format(tools))


def required_calls(
    tools: Sequence[GuidedTool], choice: Any, writer: LarkWriter, header: Header, most: int | None
) -> str:
    return CallsWriter(call_format(choice), writer).required(tools, header, most)


def calls_in_text(
    tools: Sequence[GuidedTool], choice: Any, writer: LarkWriter, header: Header, most: int | None
) -> str:
    return CallsWriter(call_format(choice), writer).in_text(tools, header, most)
