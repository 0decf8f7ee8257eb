"""Replies that clients edit: the model is shown what was sent, whether or not the reply is still remembered."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest

from tests.support.checkpoints import write_tokenizer
from tests.support.rows import cases
from vllm_mlx.core.messages import Message, ReasoningPart, TextPart, ToolCallPart, ToolResultPart, ToolSpec
from vllm_mlx.core.request import Request
from vllm_mlx.formats.tokenizer import Tokenizer
from vllm_mlx.prompt.processor import PreparedRequest, RequestProcessor

from .template_variants import TEMPLATE_VARIANTS
from .turns import Echo, Session, each_part, make_processor, system, user

SCHEMA = {
    "type": "object",
    "properties": {
        "to": {"type": "string"},
        "urgent": {"type": "boolean", "default": False},
        "opts": {
            "type": "object",
            "properties": {"copies": {"type": "integer", "default": 1}, "tags": {"items": {"$ref": "#/$defs/tag"}}},
        },
    },
    "$defs": {"tag": {"properties": {"name": {"type": "string"}, "hidden": {"default": False}}}},
}
TOOLS = (ToolSpec("mail", "Sends.", SCHEMA),)
CALL = '{"name": "mail", "arguments": {"to":"bob", "opts": {"size":2.0,"tags":[{"name":"a"}]}}}'
REPLY = f"<think>\nTell bob.\n</think>\n\nI write to bob. \n<tool_call>\n{CALL}\n</tool_call><|im_end|>"
START = (system("Be kind."), user("Write to bob."))
TEMPLATES = ("keeps reasoning", "strips reasoning", "after the last question", "trims")


@dataclass(frozen=True)
class Edit:
    """`keeps`: the reply still says what the model said."""

    make: Echo
    keeps: bool = False


def on_arguments(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Echo:
    return each_part(
        lambda part: replace(part, arguments=change(part.arguments)) if isinstance(part, ToolCallPart) else part
    )


def on_options(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Echo:
    return on_arguments(lambda arguments: {**arguments, "opts": change(arguments["opts"])})


def on_tags(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Echo:
    return on_options(lambda opts: {**opts, "tags": [change(tag) for tag in opts["tags"]]})


def on(kind: type[TextPart] | type[ReasoningPart], change: Callable[[str], str]) -> Echo:
    return each_part(lambda part: replace(part, text=change(part.text)) if isinstance(part, kind) else part)


def without(kind: type[Any]) -> Echo:
    return each_part(lambda part: None if isinstance(part, kind) else part)


OTHER_ID = "under another id"
EDITS = {
    "with an argument": Edit(on_arguments(lambda given: {**given, "cc": "alice"})),
    "with a falsy argument": Edit(on_arguments(lambda given: {**given, "dry_run": False})),
    "with a declared argument of another value": Edit(on_arguments(lambda given: {"urgent": True, **given})),
    "with an argument in an object": Edit(on_options(lambda opts: {**opts, "draft": True})),
    "with an argument in a list": Edit(on_tags(lambda tag: {**tag, "hidden": True})),
    "with an element": Edit(on_options(lambda opts: {**opts, "tags": [*opts["tags"], {"name": "b"}]})),
    "without an argument": Edit(on_arguments(lambda given: {k: v for k, v in given.items() if k != "to"})),
    "without an argument in an object": Edit(on_options(lambda opts: {k: v for k, v in opts.items() if k != "size"})),
    "with another value": Edit(on_arguments(lambda given: {**given, "to": "eve"} if "to" in given else given)),
    "with another value in a list": Edit(on_tags(lambda tag: {**tag, "name": "z"})),
    "of another tool": Edit(each_part(lambda p: replace(p, name="read") if isinstance(p, ToolCallPart) else p)),
    "with another text": Edit(on(TextPart, lambda text: text.replace("bob", "eve"))),
    "with spaces inside the text": Edit(on(TextPart, lambda text: text.replace(" to", "  to"))),
    "without its text": Edit(without(TextPart)),
    "without its call": Edit(without(ToolCallPart)),
    "with another thought": Edit(on(ReasoningPart, lambda text: text + "Or not.")),
    "without its thought": Edit(without(ReasoningPart), keeps=True),
    "with its thought trimmed": Edit(on(ReasoningPart, str.strip), keeps=True),
    "with its text trimmed": Edit(on(TextPart, str.strip), keeps=True),
    "in another order": Edit(on_arguments(lambda given: dict(reversed(given.items()))), keeps=True),
    "with numbers rewritten": Edit(
        on_options(lambda opts: {k: 2 if k == "size" else v for k, v in opts.items()}), keeps=True
    ),
    "with a default": Edit(on_arguments(lambda given: {"urgent": False, **given}), keeps=True),
    "with a default in an object": Edit(on_options(lambda opts: {**opts, "copies": 1}), keeps=True),
    "with a default in a list": Edit(on_tags(lambda tag: {"hidden": False, **tag}), keeps=True),
    OTHER_ID: Edit(each_part(lambda p: replace(p, call_id="x") if isinstance(p, ToolCallPart) else p), keeps=True),
}


@pytest.fixture(scope="module")
def processor_with(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], RequestProcessor]:
    folder = tmp_path_factory.mktemp("qwen3")
    write_tokenizer(folder, "qwen3")
    return lambda variant: make_processor(Tokenizer.load(folder, chat_template=TEMPLATE_VARIANTS[variant]))


def answered(processor: RequestProcessor) -> Message:
    """What the model said, which the processor remembers."""
    return Session(processor, messages=START, tools=TOOLS).answer(REPLY).reply.message


def request(said: Message, *, salt: str = "") -> Request:
    results = tuple(
        Message("tool", (ToolResultPart(part.call_id, (TextPart("sent"),), part.name),))
        for part in said.parts
        if isinstance(part, ToolCallPart)
    )
    messages = (*START, said, *(results or (user("And now?"),)))
    return Request(request_id="r", messages=messages, tools=TOOLS, cache_salt=salt)


def text_of(prepared: PreparedRequest) -> str:
    assert prepared.chat is not None
    return prepared.chat.text


@pytest.mark.parametrize("variant", cases(TEMPLATES, ["strips reasoning", "after the last question"]))
def test_an_edited_reply_makes_the_prompt_that_it_makes_where_nothing_is_remembered(
    processor_with: Callable[[str], RequestProcessor], variant: str
) -> None:
    """A reply that still says the same stands as the model gave it, with its thought where the template keeps it."""
    processor, fresh = processor_with(variant), processor_with(variant)
    said = answered(processor)
    for edit in EDITS.values():
        sent = edit.make(said)
        prepared, unknown = processor.prepare(request(sent)), fresh.prepare(request(sent))
        if edit.keeps:
            as_given = replace(said, parts=(*said.parts[:-1], replace(said.parts[-1], call_id=call_id(sent))))
            assert text_of(prepared) == text_of(fresh.prepare(request(as_given)))
        else:
            assert prepared.prompt.token_ids == unknown.prompt.token_ids
        assert processor.prepare(request(sent, salt="other")).prompt == unknown.prompt


@pytest.mark.parametrize("variant", cases(TEMPLATES, ["strips reasoning", "after the last question"]))
def test_a_reply_that_was_written_again_and_edited_is_shown_as_it_was_sent(
    processor_with: Callable[[str], RequestProcessor], variant: str
) -> None:
    """Without a thought, too, that the client left out beside its edit."""
    processor, fresh = processor_with(variant), processor_with(variant)
    said = answered(processor)
    pairs = [(kept, edit) for kept, edit in product(EDITS.values(), EDITS.values()) if kept.keeps and not edit.keeps]
    for kept, edit in pairs[TEMPLATES.index(variant) :: len(TEMPLATES)]:
        rewritten = kept.make(said)
        sent = edit.make(rewritten)
        if sent != rewritten:
            assert processor.prepare(request(sent)).prompt.token_ids == fresh.prepare(request(sent)).prompt.token_ids


def test_an_argument_of_a_stranger_s_call_is_no_default(processor_with: Callable[[str], RequestProcessor]) -> None:
    processor, fresh = processor_with("keeps reasoning"), processor_with("keeps reasoning")
    said = answered(processor)
    sent = EDITS[OTHER_ID].make(EDITS["with a default"].make(said))
    assert processor.prepare(request(sent)).prompt.token_ids == fresh.prepare(request(sent)).prompt.token_ids


def call_id(message: Message) -> str:
    [call] = [part for part in message.parts if isinstance(part, ToolCallPart)]
    return call.call_id


def test_replies_after_an_edited_one_are_still_known(processor_with: Callable[[str], RequestProcessor]) -> None:
    processor = processor_with("keeps reasoning")
    session = Session(processor, messages=START, tools=TOOLS, echo=EDITS["with an argument"].make)
    session.answer(REPLY)
    session.give_results("sent")
    session.echo = EDITS["without its thought"].make
    turn = session.answer("<think>\nSecond thought.\n</think>\n\nDone. <|im_end|>")
    session.ask("And now?")
    assert session.prepare().prompt.token_ids[: len(turn.token_ids)] == turn.token_ids
