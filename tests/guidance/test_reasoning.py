"""Where the reasoning of a reply begins and ends, by its prompt and token by token, at a cost that never grows."""

import json
import time
from collections.abc import Sequence as Ids
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.support.checkpoints import train_tokenizer
from tests.support.named_formats import ReplyFormats, call_format
from tests.support.rows import row
from vllm_mlx.core.events import FinishReason, TextDelta
from vllm_mlx.core.messages import Message, TextPart
from vllm_mlx.core.request import Choice, Guide, Request, TokenSampling
from vllm_mlx.core.sequence import Constraint, PromptInputs, Sequence, Tag, TagWatch
from vllm_mlx.core.step import TokenOutput
from vllm_mlx.formats.pipeline import OutputPipeline
from vllm_mlx.guidance.grammars import guide_grammar
from vllm_mlx.guidance.reasoning import CheckpointReasoning, TextWatch
from vllm_mlx.runner.row_constraint import RowConstraint

from ..formats.support import REASONING_FORMATS
from .random_sampler import RandomSampler, sampler

NAMES = sorted({id(format): name for name, format in REASONING_FORMATS.items()}.values())
TURNS = ("<|turn>", "<|start|>", "<tool_call>")


def sampler_of(name: str, *, has_tokens: bool) -> RandomSampler:
    """A sampler with a tokenizer that has the tags of a format as tokens, or none of them."""
    tags = [tag for tag in REASONING_FORMATS[name].tags if tag[0] in "<[" and tag[-1] in ">]"]
    return sampler((*dict.fromkeys([*tags, *TURNS]),) if has_tokens else ())


class Model:
    """The reasoning of one format, over one tokenizer."""

    def __init__(self, name: str, one: RandomSampler | None = None, *, has_tokens: bool = True):
        self.sampler = sampler_of(name, has_tokens=has_tokens) if one is None else one
        self.reasoning = CheckpointReasoning(self.sampler.tokenizer, REASONING_FORMATS[name])
        self.start, self.end = self.reasoning.tags.starts[0], self.reasoning.tags.ends[0]

    def ids(self, text: str) -> list[int]:
        return self.sampler.tokenizer.encode(text, add_special_tokens=False)

    def tag(self, prompt: str) -> Tag | None:
        """The tag that decides about the prompt."""
        return self.reasoning.prompt_state(self.ids(prompt)).tag

    def watch(self, prompt: str = "", tools: str | None = None) -> TagWatch:
        format = call_format(tools)
        rule = self.reasoning.rule(self.ids(prompt), budget=None, may_think=True, tools=format, bounds_reply=True)
        return rule.new_watch()

    def constraint(self, prompt: str, answer: str) -> Constraint:
        """On a reply that reasons freely and then says `answer`."""
        grammar = guide_grammar(Guide(form=Choice((answer,))), self.sampler.writer(), self.reasoning.tags.header)
        rule = self.reasoning.rule(self.ids(prompt), budget=None, may_think=True, tools=None, bounds_reply=True)
        return Constraint(
            matcher=self.sampler.compiler.compile(grammar, "guide"),
            mask_words=self.sampler.compiler.mask_words,
            reasoning=rule,
        )

    def row(self, prompt: str, answer: str, *, known: Ids[int] = (), **fields: Any) -> RowConstraint:
        """`known`: the tokens of the reply that were sampled before the constraint is made."""
        constraint = replace(self.constraint(prompt, answer), **fields)
        seq = Sequence(
            seq_id=0,
            prompt=PromptInputs(token_ids=tuple(self.ids(prompt))),
            sampling=TokenSampling(),
            max_tokens=1000,
            stop_token_ids=self.sampler.tokenizer.eos_token_ids,
            constraint=constraint,
            output_token_ids=list(known),
        )
        return RowConstraint(constraint, seq)

    def allowed(self, row: RowConstraint) -> list[int]:
        mask = np.full(self.sampler.compiler.mask_words, 0xFFFFFFFF, dtype=np.uint32)
        row.fill(mask)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: self.sampler.tokenizer.vocab_size]
        return np.flatnonzero(bits).tolist()


@row("S2-1")
@pytest.mark.parametrize("has_tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("name", NAMES)
def test_prompt_and_reply_are_judged_by_the_same_tags(name: str, has_tokens: bool) -> None:
    model = Model(name, has_tokens=has_tokens)
    assert model.tag(f"{model.start} hm") is Tag.START
    assert model.tag(f"{model.start} hm {model.end}") is Tag.END
    watch = model.watch()
    found = [watch.feed(token_id) for token_id in model.ids(f"{model.start} hm {model.end}")]
    assert found.index(Tag.START) < found.index(Tag.END) == len(found) - 1


@row("S2-3")
def test_only_what_stands_behind_the_end_reaches_the_grammar() -> None:
    model = Model("qwen3")
    answer, stops = model.ids("yes"), sorted(model.sampler.tokenizer.eos_token_ids)
    for reasoning in ("", "a", "no no no", "yes yes"):
        row = model.row("<think>", "yes")
        for token_id in model.ids(f"{reasoning}</think>"):
            assert not set(stops) & set(model.allowed(row))
            row.feed(token_id)
        for token_id in answer:
            row.feed(token_id)
        assert model.allowed(row) == stops


@row("S2-4")
@pytest.mark.parametrize("size", [1, 2, 3, 50])
def test_an_end_of_several_tokens_is_found_over_deltas(size: int) -> None:
    model = Model("kimi_k3", sampler(("<|open|>", "<|close|>", "<|sep|>")))
    ids = model.ids("hm <|close|>thi <|close|>think <|close|>think<|sep|>")
    watch = model.watch()
    found = []
    for begin in range(0, len(ids), size):
        found += [watch.feed(token_id) for token_id in ids[begin : begin + size]]
    assert found == [None] * (len(ids) - 1) + [Tag.END]


@row("S2-5")
@pytest.mark.parametrize("name", ["seed_oss", "granite"])
def test_reasoning_that_has_ended_is_not_opened_again_for_the_grammar(name: str) -> None:
    model = Model(name, has_tokens=False)
    answer = f"{model.start} a"
    row = model.row(model.start, answer)
    for token_id in [*model.ids(f" hm {model.end}"), *model.ids(answer)]:
        row.feed(token_id)
    assert model.allowed(row) == sorted(model.sampler.tokenizer.eos_token_ids)


@row("S2-1", "S2-5")
@pytest.mark.parametrize(
    ("name", "has_tokens", "prompt", "reply", "answer"),
    [
        ("qwen3", True, "<think>", "a<think>b</think>", "yes"),  # nested: the first end is the end
        ("qwen3", True, "", "<think>a<think>b</think>", "yes"),
        ("seed_oss", False, "<seed:think>", "a<seed:think>b</seed:think>", "x <seed:think> y"),
        ("seed_oss", False, "<seed:think>a</seed:think>", "", "<seed:think> y"),
        ("granite", False, "Here is my thought process:", "hm. Here is my response:", "Here is my thought process: x"),
    ],
)
def test_the_client_gets_as_answer_what_the_grammar_bounds(
    name: str, has_tokens: bool, prompt: str, reply: str, answer: str
) -> None:
    model = Model(name, has_tokens=has_tokens)
    row, constraint = model.row(prompt, answer), model.constraint(prompt, answer)
    ids = [*model.ids(reply), *model.ids(answer)]
    for token_id in ids:
        assert token_id in model.allowed(row)
        row.feed(token_id)
    assert model.allowed(row) == sorted(model.sampler.tokenizer.eos_token_ids), "the answer is complete"
    inputs = PromptInputs(
        token_ids=tuple(model.ids(prompt)), starts_in_reasoning=model.reasoning.is_open(model.ids(prompt))
    )
    request = Request(request_id="r", messages=(Message("user", (TextPart("hi"),)),))
    output = OutputPipeline(model.sampler.tokenizer, request, inputs, ReplyFormats(name), constraint=constraint)
    events = output.feed([TokenOutput(seq_id=0, token_id=token_id) for token_id in ids])
    events += output.finish(FinishReason.STOP)
    assert "".join(event.text for event in events if isinstance(event, TextDelta)).strip() == answer


@row("S3-21")
def test_the_end_of_reasoning_can_be_barred() -> None:
    """A least number of reasoning tokens has a place: a bar on the end, which a spent budget overrules."""
    model = Model("qwen3")
    [end_id] = model.ids("</think>")
    rule = model.reasoning.rule(model.ids("<think>"), budget=3, may_think=True, tools=None, bounds_reply=True)
    row = model.row("<think>", "yes", barred=(end_id,), reasoning=rule)
    assert end_id in model.allowed(model.row("<think>", "yes"))
    for token_id in model.ids("no")[:1] * 3:
        assert end_id not in model.allowed(row)
        row.feed(token_id)
    assert model.allowed(row) == [end_id]
    row.feed(end_id)
    for token_id in model.ids("yes"):
        row.feed(token_id)
    assert model.allowed(row) == sorted(model.sampler.tokenizer.eos_token_ids)


class Untouchable:
    """A matcher that no reply may ask anything."""

    def deep_copy(self) -> "Untouchable":
        return self

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the grammar was asked: {name}")


@row("S2-7", "S2-13")
def test_reasoning_asks_the_grammar_nothing() -> None:
    """So a guided reply that reasons costs what the mask of all tokens costs, whatever its grammar is."""
    model = Model("qwen3")
    row = model.row("<think>", "yes", matcher=Untouchable())
    for token_id in model.ids("no ") * 50:
        assert len(model.allowed(row)) == model.sampler.tokenizer.vocab_size - 1
        row.feed(token_id)


STEP_S = 0.01  # a decode step of a small model on a Mac
LARGE = 151_936  # tokens


@row("S2-13", "S3-17")
@pytest.mark.parametrize("budget", [None, 10**6])
@pytest.mark.parametrize("is_guided", [True, False])
def test_a_token_of_reasoning_costs_a_hundredth_of_a_step_at_most(budget: int | None, is_guided: bool) -> None:
    """In processor time of this thread: some 3 µs for a mask over a large vocabulary, and 1 µs to count a token."""
    model = Model("qwen3")
    rule = model.reasoning.rule(model.ids("<think>"), budget=budget, may_think=True, tools=None, bounds_reply=True)
    row = model.row("<think>", "yes", reasoning=rule, matcher=Untouchable() if is_guided else None)
    mask = np.empty(LARGE // 32, dtype=np.uint32)
    [token_id] = model.ids("a")

    def seconds() -> float:
        start = time.thread_time()
        for _ in range(200):
            if row.is_bounding:
                row.fill(mask)
            row.feed(token_id)
        return (time.thread_time() - start) / 200

    assert row.is_bounding is is_guided, "a budget alone masks nothing until it is spent"
    assert min(seconds() for _ in range(5)) < STEP_S / 100


@row("S2-6", "S2-8")
@pytest.mark.parametrize("has_tokens", [True, False], ids=["tokens", "text"])
def test_the_last_tag_of_a_prompt_decides(has_tokens: bool) -> None:
    model = Model("seed_oss", has_tokens=has_tokens)
    start, end = model.start, model.end
    assert model.tag(f"{start}a{end}b") is Tag.END
    assert model.tag(f"{start}a{end}b{start}") is Tag.START
    assert model.tag("ab") is None


@row("S2-6")
def test_tags_of_earlier_turns_do_not_count() -> None:
    model = Model("qwen3")
    assert model.tag("<think></think><|im_end|>a") is None
    assert model.tag("an example: <tool_call> and <think> <|im_end|>a") is None
    assert model.tag("<think></think><|im_end|><think>") is Tag.START
    assert model.tag("<|im_end|><think></think>") is Tag.END


@row("S2-6")
@pytest.mark.parametrize(
    ("name", "prompt", "is_open"),
    [
        ("qwen3", "<|im_end|>assistant\n<think>\n", True),
        ("qwen3", "<|im_end|>assistant\n<think>\n\n</think>\n\n", False),
        ("qwen3", "say <think> twice<|im_end|>\nassistant\n", False),
        ("k2_horizon", "<ifm|think_faster>", True),
        ("kimi_k3", "<|open|>think<|sep|>", True),
        ("gemma4", "<|turn>model\n<|channel>thought\n", True),
        ("gemma4", "<|turn>model\n<|channel>thought\n<channel|>", False),
        ("openai_gptoss", "<|start|>assistant<|channel|>analysis<|message|>", True),
        ("openai_gptoss", "<|start|>assistant", False),
    ],
)
def test_prompts_that_open_the_reasoning(name: str, prompt: str, is_open: bool) -> None:
    model = Model(name)
    rule = model.reasoning.rule(model.ids(prompt), budget=None, may_think=True, tools=None, bounds_reply=True)
    assert rule.is_open is is_open


def test_a_call_ends_the_reasoning_where_its_tag_is_a_token() -> None:
    model = Model("qwen3")
    [call_id] = model.ids("<tool_call>")
    assert model.watch(tools="hermes").feed(call_id) is Tag.CALL
    assert model.watch().feed(call_id) is None
    [bracket_id] = model.ids("[")
    assert model.watch(tools="pythonic").feed(bracket_id) is None, "a list is text inside reasoning"


@row("S2-10")
def test_tags_that_are_plain_text_are_found_by_a_few_tokens_of_text() -> None:
    model = Model("granite", has_tokens=False)
    decoded: list[int] = []

    def decode(ids: Ids[int]) -> str:
        decoded.append(len(ids))
        return model.sampler.tokenizer.decode(list(ids))

    watch = TextWatch(model.reasoning.tags.starts, model.reasoning.tags.ends, model.ids, decode)
    ids = model.ids(f"Here is my thought process: {'hm. ' * 200}Here is my response: 1")
    found = [watch.feed(token_id) for token_id in ids]
    assert [tag for tag in found if tag is not None] == [Tag.START, Tag.END]
    assert found.index(Tag.END) >= len(ids) - 3
    assert len(decoded) == len(ids) and max(decoded) <= 32


def merged(*pairs: tuple[str, str]) -> RandomSampler:
    """Return a sampler whose tokenizer also merges these pairs of tokens."""
    tokenizer = json.loads(train_tokenizer().to_str())
    vocabulary, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    for left, right in pairs:
        vocabulary[left + right] = len(vocabulary)
        merges.append([left, right])
    for token in tokenizer["added_tokens"]:  # they come behind the others
        token["id"] += len(pairs)
    return RandomSampler(backend=Tokenizer.from_str(json.dumps(tokenizer)))


@pytest.mark.parametrize("answer", ['{"a"}', '{"', "{"])
def test_an_answer_that_begins_in_the_token_of_the_end_reaches_the_grammar(answer: str) -> None:
    """A tag of plain text ends in `>`, which the tokenizer merges with the marks that a JSON answer begins with."""
    one = merged((">", '{"'), (">", "{"))
    model = Model("seed_oss", one, has_tokens=False)
    row = model.row(model.start, answer)
    ids = model.ids(f" hm {model.end}{answer}")
    joint = next(text for token_id in ids if (text := model.sampler.tokenizer.decode([token_id])).startswith(">"))
    assert len(joint) > 1, "one token has the end of the tag and the beginning of the answer"
    for token_id in ids:
        assert token_id in model.allowed(row)
        row.feed(token_id)
    assert model.allowed(row) == sorted(model.sampler.tokenizer.eos_token_ids)


@pytest.mark.parametrize(("name", "has_tokens"), [("seed_oss", False), ("kimi_k3", True)])
def test_each_reply_to_a_request_is_watched_alone(name: str, has_tokens: bool) -> None:
    """Their tags have several tokens, which the replies write in turn."""
    model = Model(name, sampler(("<|open|>", "<|close|>", "<|sep|>")) if has_tokens else None, has_tokens=has_tokens)
    constraint = model.constraint(model.start, "yes")
    prompt = PromptInputs(token_ids=tuple(model.ids(model.start)))
    stops = model.sampler.tokenizer.eos_token_ids
    fields = {"sampling": TokenSampling(), "max_tokens": 1000, "stop_token_ids": stops, "constraint": constraint}
    rows = [RowConstraint(constraint, Sequence(seq_id=number, prompt=prompt, **fields)) for number in range(3)]
    ids = [*model.ids(f" hm {model.end}"), *model.ids("yes")]
    for place in range(len(ids) + 2):
        for delay, watched in enumerate(rows):
            if 0 <= place - delay < len(ids):
                assert ids[place - delay] in model.allowed(watched)
                watched.feed(ids[place - delay])
    assert [model.allowed(watched) for watched in rows] == [sorted(stops)] * 3


@row("S2-2")
@pytest.mark.parametrize("name", ["qwen3", "openai_gptoss"])
def test_cost_of_a_token_does_not_grow(name: str) -> None:
    model = Model(name)
    [token_id] = model.ids("a")

    def seconds(num_history: int) -> float:
        watch = model.watch()
        for _ in range(num_history):
            watch.feed(token_id)
        start = time.process_time()
        for _ in range(300):
            watch.feed(token_id)
        return time.process_time() - start

    short, long = (min(seconds(length) for _ in range(3)) for length in (1_000, 300_000))
    assert long < 20 * short + 0.01  # 300 times where the cost grows
