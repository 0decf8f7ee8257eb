"""What stays of a reply, by policy and by what the template makes of it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.rows import row
from vllm_mlx.core.errors import ConfigError
from vllm_mlx.core.messages import Message, TextPart
from vllm_mlx.core.request import Request
from vllm_mlx.formats.reply import FinishedReply
from vllm_mlx.formats.tokenizer import Tokenizer
from vllm_mlx.prompt.encoded import common_prefix
from vllm_mlx.prompt.processor import RequestProcessor, _absent
from vllm_mlx.runner.checkpoint import DEMO_PATH

from .template_variants import TEMPLATE_VARIANTS
from .turns import Session, Turn, make_processor, system, user

THOUGHT = "<think>\nhm\n</think>\n\nDone.<|im_end|>"
DONE = Message("assistant", (TextPart("Done."),))
START = (system("Be kind."), user("Go."))


@pytest.fixture(scope="module")
def processor_with(qwen_folder: Path) -> Callable[..., RequestProcessor]:
    return lambda variant, **options: make_processor(
        Tokenizer.load(qwen_folder, chat_template=TEMPLATE_VARIANTS[variant]), **options
    )


def kept(processor: RequestProcessor, turn: Turn) -> int:
    """Counted from the end of the prompt."""
    return processor.kept_tokens(turn.prepared, turn.reply) - len(turn.prepared.prompt.token_ids)


@pytest.mark.parametrize(
    ("policy", "text", "expected"),
    [("keep", THOUGHT, None), ("drop", THOUGHT, 0), ("drop", "Done.<|im_end|>", None), ("auto", THOUGHT, 0)],
)
def test_policies_where_the_next_question_strips(processor_with, policy: str, text: str, expected: int | None) -> None:
    processor = processor_with("strips reasoning", cache_reasoning=policy)
    turn = Session(processor, messages=START).answer(text)
    assert kept(processor, turn) == (len(turn.reply.token_ids) if expected is None else expected)


def test_a_request_may_ask_for_another_policy(processor_with) -> None:
    processor = processor_with("strips reasoning")
    turn = Session(processor, messages=START).answer(THOUGHT)
    total = len(turn.token_ids)
    assert processor.kept_tokens(turn.prepared, turn.reply, "keep") == total
    chat = turn.prepared.chat
    assert chat is not None
    keeping = replace(turn.prepared, chat=replace(chat, request=replace(chat.request, keeps_reasoning=True)))
    assert processor.kept_tokens(keeping, turn.reply) == total
    assert processor.kept_tokens(turn.prepared, turn.reply, "drop") == total - len(turn.reply.token_ids)


@row("S1-5")
@pytest.mark.parametrize("policy", ["keep", "auto", "drop"])
def test_a_request_decides_whether_its_reasoning_stays_cached(processor_with, policy: str) -> None:
    processor = processor_with("strips reasoning", cache_reasoning=policy)
    for is_kept in (True, False):
        turn = Session(processor, messages=START, keeps_reasoning=is_kept).answer(THOUGHT)
        assert kept(processor, turn) == (len(turn.reply.token_ids) if is_kept else 0)


@row("S1-7")
@pytest.mark.parametrize("variant", ["strips reasoning", "after the last question", "keeps reasoning"])
@pytest.mark.parametrize("policy", ["auto", "drop", "keep"])
def test_a_reply_without_reasoning_is_kept_whole(processor_with, policy: str, variant: str) -> None:
    processor = processor_with(variant, cache_reasoning=policy)
    call = '<tool_call>\n{"name": "read", "arguments": {}}\n</tool_call><|im_end|>'
    for keeps_reasoning in (None, True, False):
        for text in ("Done.<|im_end|>", "It is done, for\n\nall I know.<|im_end|>", call):
            turn = Session(processor, messages=START, keeps_reasoning=keeps_reasoning).answer(text)
            assert kept(processor, turn) == len(turn.reply.token_ids)


def test_an_unknown_policy_is_refused(processor_with) -> None:
    with pytest.raises(ConfigError, match="cache_reasoning"):
        processor_with("keeps reasoning", cache_reasoning="some")


@row("S1-12")
def test_a_tool_loop_keeps_what_a_question_strips(processor_with) -> None:
    processor = processor_with("after the last question")
    call = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "read", "arguments": {}}\n</tool_call><|im_end|>'
    session = Session(processor, messages=START)
    calling = session.answer(call)
    session.give_results("text")
    final = session.answer(THOUGHT)
    assert kept(processor, calling) == len(calling.reply.token_ids)
    assert processor.kept_tokens(final.prepared, final.reply) <= len(calling.prepared.prompt.token_ids)
    assert processor.kept_tokens(final.prepared, final.reply) >= len(calling.prepared.prompt.token_ids) - 2


@pytest.mark.parametrize("thinking", ["off", "on"])
def test_what_is_kept_is_what_the_next_prompt_has_in_common_with_the_demo_s(thinking: str) -> None:
    """With thinking off, too, a prompt ends in a thought, an empty one, which the next question takes out again."""
    processor = make_processor(Tokenizer.load(DEMO_PATH), tools="qwen3_xml")
    session = Session(processor, messages=START, thinking=thinking)
    thought = "" if thinking == "off" else "hm\n</think>\n\n"
    call = "<tool_call>\n<function=read>\n<parameter=path>\na.py\n</parameter>\n</function>\n</tool_call><|im_end|>"
    calling = session.answer(thought + call)
    session.give_results("text")
    final = session.answer(f"{thought}Done.<|im_end|>")
    session.ask("And now?")
    following = session.prepare().prompt.token_ids
    assert final.prepared.prompt.token_ids[: len(calling.token_ids)] == calling.token_ids
    assert kept(processor, calling) == len(calling.reply.token_ids)
    common = common_prefix(final.token_ids, following)
    assert processor.tokenizer.decode(following[:common]).endswith("Go.<|im_end|>\n<|im_start|>assistant\n")
    assert common - 8 <= processor.kept_tokens(final.prepared, final.reply) <= common


def test_the_sentinel_may_stand_in_the_conversation(processor_with) -> None:
    processor = processor_with("keeps reasoning")
    text = "sentinel0 sentinel1 sentinel3"
    turn = Session(processor, messages=(user(text),)).answer(f"{text} sentinel2<|im_end|>")
    assert kept(processor, turn) == len(turn.reply.token_ids)


def test_a_reply_that_writes_the_next_turn_itself_is_kept_up_to_its_start(processor_with) -> None:
    processor = processor_with("keeps reasoning")
    prepared = Session(processor, messages=START).prepare()
    ids = processor.tokenizer.encode("Done.<|im_end|>\n<|im_start|>user\nsentinel0 says", add_special_tokens=False)
    reply = FinishedReply(message=DONE, token_ids=tuple(ids))
    num_kept = processor.kept_tokens(prepared, reply) - len(prepared.prompt.token_ids)
    assert processor.tokenizer.decode(ids[:num_kept]) == "Done.<|im_end|>\n<|im_start|>user\n"


def test_a_template_that_refuses_every_next_turn_keeps_what_the_caller_floors(qwen_folder: Path) -> None:
    template = (
        "{% if messages | length > 1 %}{{ raise_exception('one') }}{% endif %}{{ tools and messages[0].content }}"
    )
    processor = make_processor(Tokenizer.load(qwen_folder, chat_template=template))
    session = Session(processor, messages=(user("hi"),))
    turn = session.answer('<tool_call>\n{"name": "read", "arguments": {}}\n</tool_call><|im_end|>')
    assert turn.reply.calls
    assert processor.kept_tokens(turn.prepared, turn.reply) == 0


def test_completions_keep_everything(processor_with) -> None:
    processor = processor_with("keeps reasoning")
    prepared = processor.prepare(Request(request_id="r", prompt="hello"))
    reply = FinishedReply(message=DONE, token_ids=(1, 2, 3))
    assert processor.kept_tokens(prepared, reply) == len(prepared.prompt.token_ids) + 3
    processor.remember(prepared, reply)
    assert len(processor.replies) == 0


class Watched(str):
    """A text that counts how often it is searched."""

    num_searches = 0

    def __contains__(self, text: object) -> bool:
        self.num_searches += 1
        return super().__contains__(text)  # type: ignore[operator]


@pytest.mark.parametrize(
    "texts",
    [
        ("",),
        ("sentinel", "sentinel0"),
        (" ".join(f"sentinel{number}" for number in range(16_000)), "sentinel000 sentinel0001"),
        ("sentinelsentinel00sentinel",),
    ],
)
def test_a_sentinel_is_found_at_once_and_stands_nowhere(texts: tuple[str, ...]) -> None:
    watched = tuple(map(Watched, texts))
    sentinel = _absent(*watched)
    assert all(sentinel not in text for text in texts)
    assert sum(text.num_searches for text in watched) <= len(texts)
