"""Updates of one token and of several: where they are cut changes nothing that a client gets or a grammar sees."""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Ids
from typing import Any

import pytest

from tests.support.named_formats import ReplyFormats
from tests.support.rows import row
from vllm_mlx.core.events import FinishReason, ReasoningDelta, TextDelta
from vllm_mlx.core.messages import Message, TextPart
from vllm_mlx.core.request import Request, TokenSampling
from vllm_mlx.core.sequence import PromptInputs, Sequence
from vllm_mlx.core.step import SequenceUpdate, TokenOutput
from vllm_mlx.engine.client import Reply
from vllm_mlx.engine.monitoring.counters import ReplyStats
from vllm_mlx.formats.pipeline import OutputPipeline

from .random_sampler import sampler
from .test_reasoning import Model

REQUEST = Request(request_id="r", messages=(Message("user", (TextPart("hi"),)),))
THOUGHT = "no yes <thin hm"
ANSWER = "yes"
# The end is one token, several tokens, or plain text, which tokenizers merge with the text around it.
FORMATS = [
    ("qwen3", ("<think>", "</think>")),
    ("qwen3", ()),
    ("kimi_k3", ("<|open|>", "<|close|>", "<|sep|>")),
    ("openai_gptoss", ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")),
    ("granite", ()),
    ("hunyuan_a13b", ()),
]


class Recorded:
    """A matcher that notes the tokens which reach it."""

    def __init__(self, matcher: Any, fed: list[int]):
        self._matcher = matcher
        self._fed = fed

    def deep_copy(self) -> "Recorded":
        self._fed.clear()  # a constraint begins anew with a copy
        return Recorded(self._matcher.deep_copy(), self._fed)

    def consume_token(self, token_id: int) -> Any:
        self._fed.append(token_id)
        return self._matcher.consume_token(token_id)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)


def recorded(model: Model) -> tuple[Recorded, list[int]]:
    fed: list[int] = []
    return Recorded(model.constraint(model.start, ANSWER).matcher, fed), fed


def answered(model: Model) -> list[int]:
    """Return the tokens of a reply that reasons and then answers as its grammar demands."""
    row = model.row(model.start, ANSWER)
    ids = model.ids(f" {THOUGHT} {model.end}")
    for token_id in ids:
        row.feed(token_id)
    free = {*model.sampler.tokenizer.eos_token_ids, *model.ids("\n"), *model.ids("\n\n")}
    while allowed := set(model.allowed(row)) - free:
        ids.append(max(allowed))
        row.feed(ids[-1])
    return ids


def delivered(model: Model, name: str, updates: Iterable[SequenceUpdate]) -> list[Any]:
    """Return the reasoning, the content and the end of a reply whose tokens arrive in these updates."""
    prompt = PromptInputs(token_ids=tuple(model.ids(model.start)), starts_in_reasoning=True)
    constraint = model.constraint(model.start, ANSWER)
    output = OutputPipeline(model.sampler.tokenizer, REQUEST, prompt, ReplyFormats(name), constraint=constraint)
    seq = Sequence(seq_id=0, prompt=prompt, sampling=TokenSampling(), max_tokens=1000)
    stats = ReplyStats(request_id="r", max_tokens=1000, arrived_s=0.0, queued_s=0.0)
    reply = Reply(0, seq, output, stats)
    events = [event for update in updates for event in reply.take(update)]
    texts = ["".join(event.text for event in events if isinstance(event, kind)) for kind in (ReasoningDelta, TextDelta)]
    return [*texts, events[-1]]


def update_of(ids: Ids[int], finish_reason: FinishReason | None = None) -> SequenceUpdate:
    tokens = tuple(TokenOutput(0, token_id) for token_id in ids)
    return SequenceUpdate(seq_id=0, tokens=tokens, finish_reason=finish_reason)


def cuttings(ids: Ids[int]) -> Iterator[list[Ids[int]]]:
    """Cut the tokens into updates of one size, and into two updates at every place."""
    for size in (1, 2, 3, 5, len(ids)):
        yield [ids[begin : begin + size] for begin in range(0, len(ids), size)]
    for at in range(1, len(ids)):
        yield [ids[:at], ids[at:]]


formats = pytest.mark.parametrize(("name", "tokens"), FORMATS, ids=[f"{name}{len(tags)}" for name, tags in FORMATS])


@row("S2-3", "S2-4")
@formats
def test_a_client_gets_the_same_however_updates_are_cut(name: str, tokens: tuple[str, ...]) -> None:
    model = Model(name, sampler(tokens))
    ids = answered(model)
    expected = delivered(model, name, [*(update_of([token_id]) for token_id in ids), update_of([], FinishReason.STOP)])
    assert [text.strip() for text in expected[:2]] == [THOUGHT, ANSWER]
    for updates in cuttings(ids):
        *first, last = updates
        several = [*map(update_of, first), update_of(last, FinishReason.STOP)]
        assert delivered(model, name, several) == expected, updates
        assert delivered(model, name, [SequenceUpdate.joined(several)]) == expected


@row("S2-3", "S2-4")
@formats
def test_a_grammar_sees_the_same_however_many_tokens_come_at_once(name: str, tokens: tuple[str, ...]) -> None:
    """A constraint takes in the tokens that its sequence has by then, one or several, the end anywhere among them."""
    model = Model(name, sampler(tokens))
    ids, num_reasoning = answered(model), len(model.ids(f" {THOUGHT} {model.end}"))
    for at in range(len(ids) + 1):
        matcher, fed = recorded(model)
        row = model.row(model.start, ANSWER, known=ids[:at], matcher=matcher)
        for token_id in ids[at:]:
            row.feed(token_id)
        assert fed == ids[num_reasoning:], at
        assert set(model.allowed(row)) == model.sampler.tokenizer.eos_token_ids
