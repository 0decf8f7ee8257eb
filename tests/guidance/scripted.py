"""A model that wants to write one text, drawn token by token with the masks of a constraint. It needs no weights."""

import json
import random
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from tests.support.checkpoints import train_tokenizer
from tests.support.named_formats import call_format, reasoning_format
from vllm_mlx.core.config import EngineConfig
from vllm_mlx.core.messages import Message, TextPart, ToolChoice, ToolSpec
from vllm_mlx.core.request import Request, SamplingParams, TokenSampling
from vllm_mlx.core.sequence import Constraint, PromptInputs, Sequence
from vllm_mlx.formats.tokenizer import Tokenizer
from vllm_mlx.guidance.constraint_builder import ConstraintBuilder
from vllm_mlx.guidance.grammar_compiler import GrammarCompiler
from vllm_mlx.guidance.reasoning import CheckpointReasoning
from vllm_mlx.runner.row_constraint import RowConstraint

from .random_sampler import RandomSampler

DECLARED = ("get", "get_weather", "get_weather_by_day", "write.file")
INVENTED = "get_wealth"  # shares letters, and perhaps tokens, with declared names
ARGUMENTS = {"city": "Oslo", "days": 2}
TOOLS = tuple(ToolSpec(name, None, {"type": "object", "properties": {"city": {"type": "string"}}}) for name in DECLARED)


def request(tools: Ids[ToolSpec] = TOOLS, choice: ToolChoice | None = None, **fields: Any) -> Request:
    sampling = SamplingParams(**fields.pop("sampling", {}))
    messages = (Message("user", (TextPart("hi"),)),)
    return Request(
        request_id="r",
        messages=messages,
        tools=tuple(tools),
        tool_choice=choice or ToolChoice("auto"),
        sampling=sampling,
        **fields,
    )


@dataclass
class Written:
    ids: list[int] = field(default_factory=list)
    num_masks: int = 0
    changed_at: int | None = None  # where the reply is not what the model wanted


class Scripted:
    """A model that wants to write one text, token by token. Held to another name, it writes that, then the rest."""

    def __init__(self, one: RandomSampler, tools: str, reasoning: str | None = None, **config: Any):
        self.one = one
        self._tools = tools
        self._builder = ConstraintBuilder(
            one.tokenizer,
            EngineConfig(model="m", **config),
            vocab_size=one.tokenizer.vocab_size,
            reasoning=None if reasoning is None else CheckpointReasoning(one.tokenizer, reasoning_format(reasoning)),
            tools=call_format(tools),
        )

    def ids(self, text: str) -> list[int]:
        return self.one.tokenizer.encode(text, add_special_tokens=False)

    def constraint(self, asked: Request, prompt: str = "") -> Constraint | None:
        return self._builder.constraint(asked, PromptInputs(token_ids=tuple(self.ids(prompt))))

    def write(self, text: str, asked: Request | None = None, *, prompt: str = "") -> Written:
        constraint = self.constraint(asked or request(), prompt)
        assert constraint is not None
        inputs = PromptInputs(token_ids=tuple(self.ids(prompt)))
        stop = self.one.tokenizer.eos_token_ids
        seq = Sequence(
            seq_id=0, prompt=inputs, sampling=TokenSampling(), max_tokens=4000, stop_token_ids=stop,
            constraint=constraint,
        )  # fmt: skip
        reply, written = RowConstraint(constraint, seq), Written()
        wanted, draw = self.ids(text), random.Random(text)
        self._rest: tuple[int, str] | None = None  # where the invented name is written, and what follows it
        while wanted:
            allowed = self.allowed(reply, written)
            if allowed is None or wanted[0] in allowed:
                token_id = wanted.pop(0)
            else:
                if written.changed_at is None:
                    written.changed_at = len(written.ids)
                token_id, wanted = self._instead(written.ids, wanted, allowed, draw)
            written.ids.append(token_id)
            reply.feed(token_id)
        return written

    def allowed(self, reply: RowConstraint, written: Written) -> frozenset[int] | None:
        if not reply.is_bounding:
            return None
        written.num_masks += 1
        mask = np.empty(reply.num_words, dtype=np.uint32)
        reply.fill(mask)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: self.one.tokenizer.vocab_size]
        return frozenset(np.flatnonzero(bits).tolist())

    def _instead(
        self, ids: list[int], wanted: list[int], allowed: frozenset[int], draw: random.Random
    ) -> tuple[int, list[int]]:
        """Draw an allowed token with which some declared name continues, and say what the model wants behind it."""
        before, text = self.one.text(ids), self.one.text([*ids, *wanted])
        if self._rest is None:
            start = text.rindex(INVENTED)
            self._rest = start, text[start + len(INVENTED) :]
        start, rest = self._rest
        done = before[start:]
        options = {}
        for name in DECLARED:
            whole = name + rest
            for token_id in allowed:
                piece = self.one.text([token_id])
                if whole.startswith(done + piece) and len(done) < len(name):
                    options[token_id] = whole[len(done + piece) :]
        assert options, f"{done!r} goes on with {sorted(self.one.text([id]) for id in allowed)[:20]}"
        token_id = draw.choice(sorted(options))
        return token_id, self.ids(options[token_id])

    def calls(self, ids: Ids[int]) -> list[str]:
        return [name for name, _ in self.one.read(ids, self._tools, TOOLS).calls]


def with_tokens(*texts: str) -> RandomSampler:
    """A sampler whose vocabulary has these tokens of plain text, too."""
    backend = json.loads(train_tokenizer().to_str())
    first = len(backend["model"]["vocab"])
    backend["model"]["vocab"] |= {text: first + number for number, text in enumerate(texts)}
    for token in backend["added_tokens"]:
        token["id"] += len(texts)
    one = RandomSampler()
    fast = PreTrainedTokenizerFast(tokenizer_object=Backend.from_str(json.dumps(backend)), eos_token="<|im_end|>")
    one.tokenizer = Tokenizer(fast)
    one.compiler = GrammarCompiler(one.tokenizer, one.tokenizer.vocab_size)
    return one
