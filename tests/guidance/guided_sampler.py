"""Draws one constrained reply without a model, any token that its mask allows, and reads it with its parsers."""

import random
from collections.abc import Sequence as Ids
from typing import Any

import numpy as np

from tests.support.named_formats import OutputParser, call_format, reasoning_format
from vllm_mlx.core.config import EngineConfig
from vllm_mlx.core.events import ReasoningDelta, TextDelta
from vllm_mlx.core.messages import Message, TextPart, ToolChoice, ToolSpec
from vllm_mlx.core.request import Request, SamplingParams, TokenSampling
from vllm_mlx.core.sequence import PromptInputs, Sequence
from vllm_mlx.formats import SchemaBudget, read_schemas
from vllm_mlx.guidance.constraint_builder import ConstraintBuilder
from vllm_mlx.guidance.reasoning import CheckpointReasoning
from vllm_mlx.runner.row_constraint import RowConstraint

from .random_sampler import RandomSampler, Read


class GuidedSampler:
    """Samples replies in one pair of formats."""

    def __init__(self, sampler: RandomSampler, reasoning: str | None, tools: str | None, **config: Any):
        self.sampler = sampler
        self._formats = (reasoning, tools)
        settings = EngineConfig(model="m", **config)
        strings, tokenizer = settings.reasoning_config, sampler.tokenizer
        has_tags = reasoning is not None or strings is not None
        self._guidance = ConstraintBuilder(
            tokenizer,
            settings,
            vocab_size=tokenizer.vocab_size,
            reasoning=CheckpointReasoning(tokenizer, reasoning_format(reasoning), strings) if has_tags else None,
            tools=call_format(tools),
        )

    def ids(self, text: str) -> list[int]:
        return self.sampler.tokenizer.encode(text, add_special_tokens=False)

    def reply(
        self,
        prompt: str,
        *,
        seed: int = 0,
        tools: Ids[ToolSpec] = (),
        choice: ToolChoice | None = None,
        thinking: Any = "auto",
        opens: str = "",
        most: int = 1500,
        **sampling: Any,
    ) -> list[int] | None:
        """Return the ids of a reply; None: it did not end. `opens`: text that the reply begins with."""
        request = Request(
            request_id="r",
            messages=(Message("user", (TextPart("hi"),)),),
            tools=tuple(tools),
            tool_choice=choice or ToolChoice("auto" if tools else "none"),
            thinking=thinking,
            sampling=SamplingParams(**sampling),
        )
        inputs = PromptInputs(token_ids=tuple(self.ids(prompt)))
        constraint = self._guidance.constraint(request, inputs)
        assert constraint is not None
        stop = self.sampler.tokenizer.eos_token_ids
        seq = Sequence(
            seq_id=0,
            prompt=inputs,
            sampling=TokenSampling(),
            max_tokens=most,
            stop_token_ids=stop,
            constraint=constraint,
            output_token_ids=self.ids(opens),
        )
        row = RowConstraint(constraint, seq)
        draw = random.Random(seed)
        mask = np.empty(constraint.mask_words, dtype=np.uint32)
        ids = list(seq.output_token_ids)
        while len(ids) < most:
            mask[:] = 0xFFFFFFFF
            if row.is_bounding:
                row.fill(mask)
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits[: self.sampler.tokenizer.vocab_size])
            ids.append(self._pick(draw, allowed, stop))
            row.feed(ids[-1])
            if ids[-1] in stop:
                return ids[:-1]
        return None

    def _pick(self, draw: random.Random, allowed: np.ndarray, stop: frozenset[int]) -> int:
        is_end = np.isin(allowed, list(stop))
        ends = allowed[is_end]
        if len(ends) and draw.random() < 0.3:
            return int(ends[0])
        return self.sampler.pick(draw, allowed if is_end.all() else allowed[~is_end])

    def read(self, prompt: str, ids: Ids[int], specs: Ids[ToolSpec] = ()) -> "ReadReply":
        reasoning, tools = self._formats
        parser = OutputParser(
            reasoning,
            tools if specs else None,
            schemas=read_schemas(((spec.name, spec.parameters, spec.name) for spec in specs), SchemaBudget()),
            starts_in_reasoning=bool(prompt),
            marker_tokens=self.sampler.tokenizer.marker_tokens,
        )
        events: list[Any] = []
        for text, special in self.sampler.pieces(ids):
            events += parser.feed(text, special)
        return ReadReply([*events, *parser.finish()])


class ReadReply(Read):
    def __init__(self, events: list[Any]):
        super().__init__(events)
        self.text = "".join(event.text for event in events if isinstance(event, TextDelta))
        self.reasoning = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
