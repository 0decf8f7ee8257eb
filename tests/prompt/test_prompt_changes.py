"""What altered a prompt that should have extended the last one, and in which message that shows."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.rows import cases
from vllm_mlx.core.messages import Message, TextPart, ToolResultPart
from vllm_mlx.core.receipt import ChangeCause, PromptChange
from vllm_mlx.core.request import Request
from vllm_mlx.formats.tokenizer import Tokenizer
from vllm_mlx.prompt import prompt_changes
from vllm_mlx.prompt.processor import PreparedRequest, RequestProcessor

from .template_variants import TEMPLATE_VARIANTS
from .turns import ECHOES, TOOLS, Session, make_processor, system, user

CALL = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "read", "arguments": {"path": "a"}}\n</tool_call><|im_end|>'
START = (system("Be kind. Version 41."), user("Read a file."))


@pytest.fixture(scope="module", params=[False, True], ids=["points", "resumes anywhere"])
def processor_with(qwen_folder: Path, request: pytest.FixtureRequest) -> Callable[..., RequestProcessor]:
    return lambda variant: make_processor(
        Tokenizer.load(qwen_folder, chat_template=TEMPLATE_VARIANTS[variant]), resumes_anywhere=request.param
    )


def in_a_loop(processor: RequestProcessor, **options: Any) -> Session:
    """A call has been answered: the next request is due."""
    session = Session(processor, messages=START, **options)
    session.answer(CALL)
    session.give_results("its content")
    return session


def change_of(prepared: PreparedRequest) -> PromptChange | None:
    assert prepared.compared is not None
    return prepared.compared.change


def changed(prepared: PreparedRequest) -> PromptChange:
    change = change_of(prepared)
    assert change is not None
    return change


def with_message(request: Request, number: int, message: Message) -> Request:
    assert request.messages is not None
    return replace(request, messages=(*request.messages[:number], message, *request.messages[number + 1 :]))


@pytest.mark.parametrize("echo", cases(ECHOES, ["verbatim", "arguments in another order, other ids"]))
@pytest.mark.parametrize("variant", ["keeps reasoning", "after the last question", "opens the thought"])
def test_a_prompt_that_goes_on_was_not_altered(processor_with, variant: str, echo: str) -> None:
    if echo == "arguments in another order, other ids":
        pytest.skip("nothing says that it is the same conversation")
    session = in_a_loop(processor_with(variant), echo=ECHOES[echo])
    for _ in range(3):
        prepared = session.prepare()
        assert change_of(prepared) is None and prepared.compared.last is not None
        session.answer(CALL)
        session.give_results("more")


@pytest.mark.parametrize("variant", TEMPLATE_VARIANTS)
def test_a_generation_prompt_that_later_prompts_leave_out_is_not_expected(processor_with, variant: str) -> None:
    session = Session(processor_with(variant), messages=(user("Say a word."),), tools=())
    turn = session.answer("hm\n</think>\n\nDone.<|im_end|>")
    session.ask("Another.")
    compared = session.prepare().compared
    assert compared.change is None and compared.last is not None
    said = session.processor.tokenizer.decode(turn.token_ids[: compared.expectation.num_tokens])
    assert "Say a word." in said and turn.prepared.chat.text.startswith(said)


def test_the_first_prompt_has_nothing_to_extend(processor_with) -> None:
    processor = processor_with("keeps reasoning")
    in_a_loop(processor)
    other = Session(processor, messages=(system("Be kind. Version 42."), user("Read another.")))
    assert other.prepare().compared.last is None


def test_a_message_that_the_client_altered(processor_with) -> None:
    processor = processor_with("keeps reasoning")
    session = in_a_loop(processor)
    last = session.turns[-1].prepared
    prepared = processor.prepare(with_message(session.request(), 0, system("Be kind. Version 57.")))
    change = changed(prepared)
    assert (change.cause, change.message, change.role) == (ChangeCause.MESSAGE, 0, "system")
    first, second = last.prompt.token_ids, prepared.prompt.token_ids
    place = change.num_common_tokens
    assert first[:place] == second[:place] and first[place] != second[place]
    assert (change.previous_token_id, change.token_id) == (first[place], second[place])
    assert change.num_previous_tokens == len(first)


def test_one_in_the_middle(processor_with) -> None:
    processor = processor_with("keeps reasoning")
    session = in_a_loop(processor)
    session.answer(CALL)
    session.give_results("more")
    result = session.messages[3].parts[0]
    assert isinstance(result, ToolResultPart)
    shorter = Message("tool", (replace(result, content=(TextPart("[old result cleared]"),)),))
    change = changed(processor.prepare(with_message(session.request(), 3, shorter)))
    assert (change.cause, change.message, change.role) == (ChangeCause.MESSAGE, 3, "tool")


def test_a_message_put_in_between(processor_with) -> None:
    processor = processor_with("keeps reasoning")
    session = in_a_loop(processor)
    session.messages.insert(1, user("The date is new."))
    change = changed(session.prepare())
    assert (change.cause, change.message) == (ChangeCause.MESSAGE, 1)


def test_a_conversation_that_goes_back_a_turn(processor_with) -> None:
    session = in_a_loop(processor_with("keeps reasoning"))
    before = session.request()
    session.answer(CALL)
    session.give_results("more")
    assert change_of(session.prepare()) is None
    assert change_of(session.processor.prepare(before)) is None
    change = changed(session.processor.prepare(with_message(before, 0, system("Be rude."))))
    assert (change.cause, change.message) == (ChangeCause.MESSAGE, 0)


def test_other_tools(processor_with) -> None:
    session = in_a_loop(processor_with("keeps reasoning"))
    change = changed(session.processor.prepare(replace(session.request(), tools=TOOLS[::-1])))
    assert (change.cause, change.message) == (ChangeCause.TOOLS, None)


def test_other_settings_of_the_template(qwen_folder: Path) -> None:
    template = "{{ effort }}" + TEMPLATE_VARIANTS["keeps reasoning"]
    processor = make_processor(Tokenizer.load(qwen_folder, chat_template=template))
    session = in_a_loop(processor, template_kwargs={"effort": "low"})
    assert change_of(session.prepare()) is None
    prepared = processor.prepare(replace(session.request(), template_kwargs={"effort": "high"}))
    assert changed(prepared).cause is ChangeCause.SETTINGS


def test_what_the_template_shows_otherwise(processor_with) -> None:
    """The reasoning of a tool loop goes when the next question comes."""
    session = in_a_loop(processor_with("after the last question"))
    session.answer("<think>\nhm\n</think>\n\nIt says so.<|im_end|>")
    session.ask("And the other one?")
    change = changed(session.prepare())
    assert (change.cause, change.message) == (ChangeCause.TEMPLATE, 2) or change.message == 1


def test_a_reply_of_text_is_known_by_its_words_and_what_stands_around_it(processor_with) -> None:
    processor = processor_with("keeps reasoning")
    for number in range(3):
        session = Session(processor, messages=(system("Be kind."), user(f"Question {number}, please.")))
        session.answer("Done.<|im_end|>")
        session.ask("More.")
        assert change_of(session.prepare()) is None
        prepared = processor.prepare(with_message(session.request(), 0, system("Be rude.")))
        assert (changed(prepared).cause, changed(prepared).message) == (ChangeCause.MESSAGE, 0)
    foreign = Session(processor, messages=(system("Be quick."), user("Hi."), session.messages[2], user("What?")))
    assert foreign.prepare().compared.last is None


@pytest.mark.parametrize("step", [0, 1])
def test_of_equal_replies_the_latest_is_continued(processor_with, step: int) -> None:
    processor = processor_with("keeps reasoning")
    session = Session(processor, messages=(system("Be kind."), user("Question 0.")))
    expected = []
    for number in range(1, 6):
        session.answer("ok<|im_end|>")
        session.ask(f"Question {step * number}.")
        compared = session.prepare().compared
        assert compared.last.token_ids.tolist() == list(session.turns[-1].prepared.prompt.token_ids)
        expected.append(compared.expectation.num_tokens)
    assert expected == sorted(set(expected))
    back = Session(processor, messages=[*session.messages[:5], user("Another one.")])
    assert back.prepare().compared.last.token_ids.tolist() == list(session.turns[1].prepared.prompt.token_ids)


def test_salts_are_kept_apart(processor_with) -> None:
    session = in_a_loop(processor_with("keeps reasoning"))
    assert session.processor.prepare(replace(session.request(), cache_salt="x")).compared.last is None


def test_what_is_held_is_bounded(processor_with, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_changes, "MAX_PROMPTS", 3)
    processor = processor_with("keeps reasoning")
    sessions = [in_a_loop(processor) for _ in range(5)]
    assert [each.prepare().compared.last is not None for each in sessions] == [False, False, True, True, True]
    processor._changes._recent.max_bytes = 10
    in_a_loop(processor)
    assert [each.prepare().compared.last for each in sessions] == [None] * 5


def test_the_earlier_prompts_of_a_conversation_go_first(processor_with, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_changes, "MAX_PROMPTS", 2)
    processor = processor_with("keeps reasoning")
    other, session = in_a_loop(processor), in_a_loop(processor)
    for _ in range(5):
        session.answer(CALL)
        session.give_results("more")
    assert other.prepare().compared.last is not None


@pytest.mark.parametrize("char", ["a", "é", "東", "🙂"])
def test_the_text_of_a_prompt_counts_in_bytes(processor_with, char: str) -> None:
    processor = processor_with("keeps reasoning")
    session = Session(processor, messages=(user(char * 20_000),))
    session.answer("Done.<|im_end|>")
    recent = processor._changes._recent
    [prompt] = recent
    assert recent.used_bytes >= sys.getsizeof(prompt.text) + sys.getsizeof(prompt.token_ids)
