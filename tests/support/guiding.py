"""Constraints for the tests of guided replies, made as requests make them, and what their replies must be."""

import json
from pathlib import Path
from typing import Any

import jsonschema

from vllm_mlx.core.config import EngineConfig, ReasoningStrings
from vllm_mlx.core.messages import Message, TextPart, ToolSpec
from vllm_mlx.core.request import Guide, GuideForm, JsonSchema, Request, SamplingParams
from vllm_mlx.core.sequence import Constraint, PromptInputs
from vllm_mlx.formats.tokenizer import Tokenizer
from vllm_mlx.guidance.constraint_builder import ConstraintBuilder
from vllm_mlx.guidance.reasoning import CheckpointReasoning

from .checkpoints import VOCAB_SIZE
from .named_formats import call_format, reasoning_format

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


class Guiding:
    """Of one checkpoint."""

    def __init__(
        self,
        path: Path,
        *,
        reasoning: str | None = "qwen3",
        strings: ReasoningStrings | None = None,
        vocab_size: int = VOCAB_SIZE,
        tools: str | None = None,
    ):
        self.tokenizer = Tokenizer.load(path)
        config = EngineConfig(model=str(path))
        has_tags = reasoning is not None or strings is not None
        judge = CheckpointReasoning(self.tokenizer, reasoning_format(reasoning), strings) if has_tags else None
        self._guidance = ConstraintBuilder(
            self.tokenizer, config, vocab_size=vocab_size, reasoning=judge, tools=call_format(tools)
        )

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def text(self, ids: list[int]) -> str:
        """Without the token that ended it."""
        return self.tokenizer.decode([token for token in ids if token not in self.tokenizer.eos_token_ids])

    def constraint(
        self, prompt: list[int], form: GuideForm | None = None, *, thinking: Any = "auto", **sampling: Any
    ) -> Constraint | None:
        guide = Guide(form=form) if form is not None else None
        request = Request(
            request_id="r", prompt=tuple(prompt), thinking=thinking, sampling=SamplingParams(guide=guide, **sampling)
        )
        return self._guidance.constraint(request, PromptInputs(token_ids=tuple(prompt)))

    def names(self, prompt: list[int], *names: str) -> Constraint:
        """What a request that declares tools with these names, and asks for no grammar, is held to."""
        tools = tuple(ToolSpec(name, None, {"type": "object"}) for name in names)
        request = Request(request_id="r", messages=(Message("user", (TextPart("hi"),)),), tools=tools)
        constraint = self._guidance.constraint(request, PromptInputs(token_ids=tuple(prompt)))
        assert constraint is not None and constraint.matcher is None
        return constraint

    def person(self, prompt: list[int], **fields: Any) -> Constraint | None:
        return self.constraint(prompt, JsonSchema(PERSON), **fields)


def is_person(text: str) -> bool:
    try:
        jsonschema.validate(json.loads(text), PERSON)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True
