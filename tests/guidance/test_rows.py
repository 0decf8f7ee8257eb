"""Reasoning of every family, then a guided answer: the parser reads the reasoning back, and the answer is valid."""

import json
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.support.checkpoints import train_tokenizer
from tests.support.named_formats import reasoning_format
from tests.support.rows import row
from vllm_mlx.core.config import EngineConfig, ReasoningStrings
from vllm_mlx.core.errors import InvalidParameter, Unsupported
from vllm_mlx.core.events import FinishReason, ReasoningDelta, TextDelta
from vllm_mlx.core.messages import Message, TextPart, ToolChoice, ToolSpec
from vllm_mlx.core.request import Choice, Guide, JsonSchema, Request
from vllm_mlx.core.sequence import PromptInputs
from vllm_mlx.core.step import TokenOutput
from vllm_mlx.formats.pipeline import OutputPipeline
from vllm_mlx.prompt.reply_formats import reply_formats

from ..formats.support import REASONING_FORMATS
from .guided_sampler import GuidedSampler
from .random_sampler import RandomSampler, sampler
from .schemas import closed, text, validate, whole
from .test_calls import text_or_tokens

SCHEMA = closed(name=text(8), age=whole())
GUIDE = Guide(form=JsonSchema(SCHEMA))
TOOL = ToolSpec("save", None, SCHEMA)
SHOWN = {"minimax_m2_append_think", "minimax-append-think"}  # reasoning are content there
NAMES = sorted({id(format): name for name, format in REASONING_FORMATS.items() if name not in SHOWN}.values())


def guided(
    reasoning: str | None, tools: str | None = "hermes", *, has_tokens: bool = True, **config: Any
) -> GuidedSampler:
    tags = REASONING_FORMATS[reasoning].tags if reasoning is not None else ()
    tokens = [tag for tag in tags if tag[0] in "<[" and tag[-1] in ">]"] if has_tokens else []
    return GuidedSampler(
        sampler((*dict.fromkeys([*tokens, "<tool_call>", "</tool_call>"]),)), reasoning, tools, **config
    )


@row("S0-9")
@pytest.mark.parametrize(("name", "has_tokens"), text_or_tokens(NAMES))
def test_open_reasoning_takes_its_budget_and_the_answer_follows(name: str, has_tokens: bool) -> None:
    one = guided(name, has_tokens=has_tokens)
    opened = reasoning_format(name).bounds.starts[0]
    for budget in (0, 12):
        ids = one.reply(opened, guide=GUIDE, thinking_token_budget=budget)
        assert ids is not None
        reply = one.read(opened, ids)
        validate(json.loads(reply.text), SCHEMA)
        assert reply.text.strip() not in reply.reasoning


@row("S0-9")
@pytest.mark.parametrize("name", NAMES)
def test_a_call_follows_a_spent_budget(name: str) -> None:
    one = guided(name)
    opened = reasoning_format(name).bounds.starts[0]
    ids = one.reply(opened, tools=[TOOL], choice=ToolChoice("required", "save"), thinking_token_budget=6)
    assert ids is not None
    [(tool, arguments)] = one.read(opened, ids, [TOOL]).calls
    assert tool == "save"
    validate(arguments, SCHEMA)


@pytest.mark.parametrize("name", ["qwen3", "openai_gptoss", "gemma4", "mistral", "cohere_command3", "seed_oss"])
def test_a_reply_may_open_the_reasoning_itself(name: str) -> None:
    one = guided(name)
    opened = reasoning_format(name).bounds.starts[0]
    ids = one.reply("", guide=GUIDE, thinking_token_budget=9, opens=opened)
    assert ids is not None
    reply = one.read("", ids)
    validate(json.loads(reply.text), SCHEMA)
    assert reply.reasoning or len(ids) < 30


@pytest.mark.parametrize("name", ["qwen3", "openai_gptoss", "gemma4", "mistral"])
def test_without_reasoning_the_grammar_holds_from_the_first_token(name: str) -> None:
    one = guided(name)
    for seed in range(3):
        ids = one.reply("", guide=GUIDE, thinking="off", seed=seed)
        assert ids is not None
        reply = one.read("", ids)
        assert not reply.reasoning
        validate(json.loads(reply.text), SCHEMA)


def test_harmony_calls_behind_reasoning() -> None:
    one = guided("openai_gptoss", "openai")
    start = "<|channel|>analysis<|message|>"
    for opens, budget in ((start, 5), ("", None)):
        ids = one.reply("", tools=[TOOL], choice=ToolChoice("required"), opens=opens, thinking_token_budget=budget)
        assert ids is not None
        [(tool, arguments)] = one.read("", ids, [TOOL]).calls
        assert tool == "save"
        validate(arguments, SCHEMA)


@row("S2-9")
def test_no_call_begins_in_reasoning_that_only_an_answer_may_follow() -> None:
    """Any token may come, so that one which is not masked does come in some of these replies."""
    one = guided("qwen3")
    end, call = (one.sampler.tokenizer.token_id(tag) for tag in ("</think>", "<tool_call>"))
    fields = {"tools": [TOOL], "choice": ToolChoice("none"), "guide": GUIDE, "thinking_token_budget": 400}
    replies = [one.reply("<think>", seed=seed, **fields) for seed in range(20)]
    assert all(ids is not None and ids.count(end) == 1 and call not in ids for ids in replies)


def test_tags_of_calls_and_the_end_are_barred_from_reasoning_that_an_answer_must_follow() -> None:
    one = guided("qwen3")
    for seed in range(4):
        ids = one.reply("<think>", tools=[TOOL], guide=GUIDE, thinking_token_budget=60, seed=seed)
        assert ids is not None
        reply = one.read("<think>", ids, [TOOL])
        assert [name for name, _ in reply.calls] in ([], ["save"] * len(reply.calls))
        if not reply.calls:
            validate(json.loads(reply.text), SCHEMA)


def test_a_form_or_calls_where_tools_may_be_called() -> None:
    one = guided("qwen3")
    strict = ToolSpec("save", None, SCHEMA, strict=True)
    seen = set()
    for seed in range(12):
        ids = one.reply("", tools=[strict], guide=GUIDE, thinking="off", seed=seed)
        assert ids is not None
        reply = one.read("", ids, [strict])
        for value in [arguments for _, arguments in reply.calls] or [json.loads(reply.text)]:
            validate(value, SCHEMA)
        seen.add(bool(reply.calls))
    assert seen == {True, False}


@row("S2-12")
def test_enabled_in_reasoning_the_grammar_bounds_the_reasoning() -> None:
    one = guided("qwen3")
    inside = Guide(form=Choice(("yes", "no")), in_reasoning=True)
    ids = one.reply("<think>", guide=inside)
    assert ids is not None and one.sampler.text(ids) in ("yes", "no")
    with pytest.raises(InvalidParameter, match="enable_in_reasoning"):
        one.reply("<think>", guide=inside, thinking_token_budget=4)


def test_tool_grammar() -> None:
    loose = ToolSpec("save", None, SCHEMA)
    with pytest.raises(Unsupported, match="--tool-grammar"):
        guided("qwen3", tool_grammar="off").reply("", tools=[loose], choice=ToolChoice("required"))
    with pytest.raises(Unsupported, match="--tool-call-parser"):
        guided("qwen3", None).reply("", tools=[loose], choice=ToolChoice("required"))
    with pytest.raises(AssertionError):  # nothing to bound
        guided("qwen3", tool_grammar="off").reply("", tools=[loose])
    ids = guided("qwen3", tool_grammar="strict").reply("", tools=[loose], thinking="off", opens="<tool_call>")
    assert ids is not None
    [(_, arguments), *_] = guided("qwen3").read("", ids, [loose]).calls
    validate(arguments, SCHEMA)


@row("S3-19")
def test_a_default_budget_bounds_only_those_who_think() -> None:
    one = guided("qwen3", default_thinking_token_budget=3)
    end = one.sampler.tokenizer.token_id("</think>")
    ids = one.reply("<think>", guide=GUIDE)
    assert ids is not None and ids.index(end) <= 3
    for seed in range(3):
        off = [model.reply("", guide=GUIDE, thinking="off", seed=seed) for model in (one, guided("qwen3"))]
        assert off[0] == off[1] is not None
    plain = guided(None, default_thinking_token_budget=3)
    assert plain.reply("", guide=Guide(form=Choice(("a", "b")))) is not None


@pytest.mark.parametrize("has_tokens", [True, False], ids=["tokens", "text"])
def test_strings_of_the_user_without_a_reasoning_format(has_tokens: bool) -> None:
    """The phrase is forced where the budget is spent. The model may write the end itself, without the phrase."""
    start, end = ("<muse>", "</muse>") if has_tokens else ("[muse]", "\nEnough.")
    phrase = "Enough.</muse>" if has_tokens else end
    one = GuidedSampler(
        sampler((start, end) if has_tokens else ()), None, None, reasoning_config=ReasoningStrings(start, phrase)
    )
    for opens, num_reasoning in (("", 4), ("hm", 4), (f"hm{end}", 0)):
        ids = one.reply(start, guide=Guide(form=Choice(("a", "b"))), thinking_token_budget=4, opens=opens)
        assert ids is not None
        before = num_reasoning or len(one.ids(opens))
        forced = one.ids(phrase) if num_reasoning else []
        assert ids[before : before + len(forced)] == forced
        assert one.sampler.text(ids[before + len(forced) :]).strip() in ("a", "b")


def test_the_phrase_of_the_user_is_reasoning_for_the_client_without_a_reasoning_format() -> None:
    other = train_tokenizer().to_str().replace("think>", "muse>")  # no format that is known has these tags
    one = RandomSampler(backend=Tokenizer.from_str(other))
    config = EngineConfig(model="m", reasoning_config=ReasoningStrings("<muse>", "Enough.\n</muse>\n"))
    found = reply_formats(config, one.tokenizer)
    ids = one.tokenizer.encode("hm. Enough.\n</muse>\na", add_special_tokens=False)
    prompt = PromptInputs(token_ids=(1,), starts_in_reasoning=True)
    request = Request(request_id="r", messages=(Message("user", (TextPart("hi"),)),))
    output = OutputPipeline(one.tokenizer, request, prompt, found.replies)
    events = output.feed([TokenOutput(seq_id=0, token_id=token_id) for token_id in ids])
    events += output.finish(FinishReason.STOP)
    told = {
        kind: "".join(event.text for event in events if isinstance(event, kind)) for kind in (ReasoningDelta, TextDelta)
    }
    assert told == {ReasoningDelta: "hm. Enough.", TextDelta: "a"} and found.reasoning_name == "reasoning_config"
