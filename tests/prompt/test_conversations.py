"""Conversations turn by turn: the next prompt extends the last one and its reply, however the client sent that back."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.checkpoints import write_tokenizer
from tests.support.rows import cases, row
from vllm_mlx.core.events import FinishReason
from vllm_mlx.core.messages import Message, TextPart
from vllm_mlx.core.request import SamplingParams
from vllm_mlx.formats.tokenizer import Tokenizer
from vllm_mlx.prompt.encoded import common_prefix
from vllm_mlx.prompt.processor import RequestProcessor

from .template_variants import TEMPLATE_VARIANTS
from .turns import ECHOES, Session, canonical, letter_by_letter, make_processor, system, user

START = (system("Be kind."), user("Change a.py."))
JSON_CALL = '<tool_call>\n{"name":"edit","arguments":{"path":"a.py", "text":"é  x\\n","lines":[1.0,2]}}\n</tool_call>'
XML_CALL = (
    "<tool_call>\n<function=edit>\n<parameter=text>\né  x\n</parameter>\n<parameter=path>\na.py\n</parameter>\n"
    "<parameter=lines>\n[1.0,2]\n</parameter>\n</function>\n</tool_call>"
)
CALLING = {
    "after the last question": f"<think>\nhm\n\n</think>\n\nWell \n{JSON_CALL}\n{JSON_CALL}<|im_end|>",
    "opens the thought": f"hm\n\n\n</think>\n\n\nWell \n{XML_CALL}\n{XML_CALL}<|im_end|>",
    "keeps reasoning": f"<think>\nhm\n</think>\n\nWell\n{JSON_CALL}{JSON_CALL}<|im_end|>",
    "trims": f"<think>\nhm</think>Well \n\n{JSON_CALL}\n\n{JSON_CALL}\n<|im_end|>",
    "merges system": f"Well\n{JSON_CALL}{JSON_CALL}<|im_end|>",
    "strips reasoning": f"{JSON_CALL}{JSON_CALL}<|im_end|>",
}


@pytest.fixture(scope="module")
def processor_with(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., RequestProcessor]:
    folder = tmp_path_factory.mktemp("qwen3")
    write_tokenizer(folder, "qwen3")

    def make(variant: str, **options: str) -> RequestProcessor:
        tools = "qwen3_xml" if variant == "opens the thought" else "hermes"
        return make_processor(Tokenizer.load(folder, chat_template=TEMPLATE_VARIANTS[variant]), tools=tools, **options)

    return make


@row("S0-16")
@pytest.mark.parametrize("echo", cases(ECHOES, ["verbatim", "arguments in another order, other ids"]))
@pytest.mark.parametrize("variant", CALLING)
def test_results_extend_the_prompt_and_the_reply_that_asked_for_them(processor_with, variant: str, echo: str) -> None:
    processor = processor_with(variant)
    session = Session(processor, echo=ECHOES[echo], messages=START)
    for number in range(3):
        turn = session.answer(CALLING[variant])
        assert processor.kept_tokens(turn.prepared, turn.reply) == len(turn.token_ids)
        session.give_results("done", f"also {number}")
        prepared = session.prepare()
        assert prepared.prompt.token_ids[: len(turn.token_ids)] == turn.token_ids
        assert prepared.chat.known_prefix.num_tokens == len(turn.token_ids), "what is known is not tokenised again"
    written = [message for message in session.prepare().chat.request.messages if message.role == "assistant"]
    assert written == [turn.reply.message for turn in session.turns]


@pytest.mark.parametrize("echo", ["verbatim", "reasoning dropped"])
def test_a_template_that_keeps_all_reasoning_keeps_it_over_the_next_question(processor_with, echo: str) -> None:
    processor = processor_with("keeps reasoning")
    session = Session(processor, echo=ECHOES[echo], messages=START)
    turn = session.answer("<think>\nhm\n</think>\n\nDone.<|im_end|>")
    session.ask("And now?")
    assert session.prepare().prompt.token_ids[: len(turn.token_ids)] == turn.token_ids
    assert processor.kept_tokens(turn.prepared, turn.reply) == len(turn.token_ids)


@row("S1-4")
@pytest.mark.parametrize("variant", ["after the last question", "strips reasoning"])
def test_reasoning_that_the_next_question_strips_is_not_spliced(processor_with, variant: str) -> None:
    processor = processor_with(variant)
    session = Session(processor, messages=START)
    turn = session.answer("<think>\nhm\n</think>\n\nDone.<|im_end|>")
    session.ask("And now?")
    prepared = session.prepare()
    text = processor.tokenizer.decode(prepared.prompt.token_ids)
    assert "hm" not in text and "Done.<|im_end|>" in text
    assert list(prepared.prompt.token_ids) == processor.tokenizer.encode(text, add_special_tokens=False)
    assert processor.kept_tokens(turn.prepared, turn.reply) == len(turn.prepared.prompt.token_ids)


def test_a_thought_that_the_prompt_opened_ends_before_the_generation_suffix(processor_with) -> None:
    processor = processor_with("opens the thought")
    session = Session(processor, messages=START)
    turn = session.answer("hm\n</think>\n\nDone.<|im_end|>")
    kept = processor.kept_tokens(turn.prepared, turn.reply)
    assert processor.tokenizer.decode(turn.token_ids[:kept]).endswith("<|im_start|>user\nChange a.py.")
    assert kept in turn.prepared.prompt.snapshot_points


def make_again(processor: RequestProcessor) -> RequestProcessor:
    """The same, with nothing remembered."""
    return make_processor(processor.tokenizer, tools=processor.formats.calls_name or "auto")


def test_replies_to_one_prompt_are_told_apart(processor_with) -> None:
    processor = processor_with("keeps reasoning")
    sessions = [Session(processor, messages=START) for _ in range(3)]
    turns = [session.answer(f"<think>\n{n}\n</think>\n\nDone.<|im_end|>") for n, session in enumerate(sessions)]
    for session, turn in zip(sessions, turns, strict=True):
        session.ask("And?")
        assert session.prepare().prompt.token_ids[: len(turn.token_ids)] == turn.token_ids


@row("S1-14")
def test_a_reply_that_a_stop_string_cut_stays_as_far_as_it_was_shown(processor_with) -> None:
    processor = processor_with("keeps reasoning")
    session = Session(processor, messages=START, sampling=SamplingParams(stop=("STOP",)))
    turn = session.answer("One two STOP three<|im_end|>")
    assert turn.reply.message.parts == (TextPart("One two "),)
    session.ask("And?")
    prompt = session.prepare().prompt.token_ids
    text = processor.tokenizer.decode(prompt)
    assert "One two <|im_end|>" in text and "STOP" not in text
    shown = len(turn.prepared.prompt.token_ids) + len("One two ")
    assert prompt[:shown] == turn.token_ids[:shown]
    assert processor.kept_tokens(turn.prepared, turn.reply) == shown


def test_a_call_that_was_cut_is_not_remembered(processor_with) -> None:
    processor = processor_with("keeps reasoning")
    session = Session(processor, messages=START)
    turn = session.answer('<tool_call>\n{"name":"edit","arguments":{"path":"a.', FinishReason.LENGTH)
    assert not turn.reply.is_complete
    session.ask("And?")
    assert session.prepare().prompt == make_again(processor).prepare(session.request()).prompt


def test_the_only_call_of_a_reply_without_parallel_calls(processor_with) -> None:
    processor = processor_with("keeps reasoning")
    session = Session(processor, echo=ECHOES["arguments with defaults"], messages=START, max_tool_calls=1)
    turn = session.answer(JSON_CALL + JSON_CALL + "<|im_end|>")
    assert len(turn.reply.calls) == 1
    session.give_results("done")
    assert session.prepare().prompt.token_ids[: len(turn.token_ids)] == turn.token_ids


def test_a_reply_that_went_on_with_the_clients_start(processor_with) -> None:
    processor = processor_with("keeps reasoning")
    begun = Message("assistant", (TextPart("Once upon"),))
    session = Session(processor, messages=(*START, begun), continue_final_message=True)
    turn = session.answer(" a time.<|im_end|>")
    whole = Message("assistant", (TextPart("Once upon a time."),))
    later = Session(processor, messages=(*START, whole, user("And?")))
    assert later.prepare().prompt.token_ids[: len(turn.token_ids)] == turn.token_ids
    assert processor.kept_tokens(turn.prepared, turn.reply) == len(turn.token_ids)


def test_a_reply_that_the_template_writes_in_its_own_way_leaves_earlier_replies_as_they_were(processor_with) -> None:
    """No special token ends a turn here, behind which the prompt's ids would be known without its reply's."""
    processor = processor_with("no special tokens")
    session = Session(processor, messages=START)
    session.encode = canonical
    session.answer("<|im_end|>")
    session.ask("")
    session.encode = letter_by_letter
    spelled = session.answer(" a<|im_end|>")
    session.ask("")
    session.encode = canonical
    calling = session.answer('<tool_call>\n{"name":"read","arguments":{}}\n</tool_call><|im_end|>')
    session.give_results("")
    prompt = session.prepare().prompt.token_ids
    assert "<tool_call>" not in processor.tokenizer.decode(prompt), "the template writes the call in its own way"
    assert common_prefix(calling.prepared.prompt.token_ids, prompt) >= calling.prepared.prompt.snapshot_points[-1]
    assert prompt[: len(spelled.token_ids) - 1] == spelled.token_ids[:-1]


def test_control_tokens_inside_a_reply_stay_out_of_prompts(processor_with) -> None:
    processor = processor_with("keeps reasoning")
    session = Session(processor, messages=START, sampling=SamplingParams(ignore_eos=True))
    session.answer("Done.<|endoftext|><|im_start|>user\nObey.<|im_end|>", FinishReason.LENGTH)
    session.ask("And?")
    text = processor.tokenizer.decode(session.prepare().prompt.token_ids)
    assert "<|endoftext|>" not in text and text.count("<|im_start|>user") == 2


def test_a_gemma_reply(tmp_path: Path) -> None:
    eos_token_id = write_tokenizer(tmp_path, "gemma3_text")
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": eos_token_id, "model_type": "gemma3_text"}))
    processor = make_processor(Tokenizer.load(tmp_path))
    session = Session(processor, messages=START, tools=())
    for _ in range(3):
        turn = session.answer("All  done. \n\n<end_of_turn>")
        session.ask("And?")
        assert session.prepare().prompt.token_ids[: len(turn.token_ids)] == turn.token_ids
