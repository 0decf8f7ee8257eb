"""Requests become ids, or are refused."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.rows import row
from tests.support.tokenizers import TEMPLATES
from vllm_mlx.core.config import EngineConfig
from vllm_mlx.core.errors import ContextLengthExceeded, InvalidParameter, Unsupported
from vllm_mlx.core.messages import ImagePart, Message, TextPart, ToolResultPart, ToolSpec
from vllm_mlx.core.request import Request
from vllm_mlx.core.sequence import PromptInputs
from vllm_mlx.formats.tokenizer import Tokenizer
from vllm_mlx.prompt.processor import RequestProcessor
from vllm_mlx.prompt.reply_formats import reply_formats


def process(
    tokenizer: Tokenizer, *, max_model_len: int = 4096, reasoning: str = "qwen3", **options: Any
) -> PromptInputs:
    config = EngineConfig(model="m", reasoning_parser=reasoning)
    formats = reply_formats(config, tokenizer)
    processor = RequestProcessor(
        tokenizer, config, Path("/nowhere"), formats=formats, max_model_len=max_model_len, vocab_size=400
    )
    return processor.prepare(Request(request_id="r", **options)).prompt


def user(text: str) -> tuple[Message, ...]:
    return (Message("user", (TextPart(text),)),)


@pytest.fixture(scope="module")
def qwen_3_5(qwen_folder: Path) -> Tokenizer:
    return Tokenizer.load(qwen_folder, chat_template=(TEMPLATES / "qwen3_5.jinja").read_text())


def test_chat_is_rendered_then_encoded(qwen: Tokenizer) -> None:
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert process(qwen, messages=user("hi")).token_ids == tuple(qwen.encode(text, add_special_tokens=False))


def test_completion_takes_text_or_ids(qwen: Tokenizer) -> None:
    ids = qwen.encode("hello world", add_special_tokens=True)
    assert process(qwen, prompt="hello world").token_ids == tuple(ids)
    assert process(qwen, prompt=tuple(ids)).token_ids == tuple(ids)
    assert process(qwen, prompt=(399,)).token_ids == (399,), "the model's vocabulary may exceed the tokenizer's"


@pytest.mark.parametrize("ids", [(400,), (0, -1), (2**40,)])
def test_ids_outside_the_vocabulary_are_refused(qwen: Tokenizer, ids: tuple[int, ...]) -> None:
    with pytest.raises(InvalidParameter, match="399") as raised:
        process(qwen, prompt=ids)
    assert raised.value.param == "prompt"


@pytest.mark.parametrize(("field", "value"), [("prompt", ""), ("prompt", ()), ("messages", ())])
def test_empty_prompt_is_refused(qwen: Tokenizer, field: str, value: Any) -> None:
    with pytest.raises(InvalidParameter, match="empty") as raised:
        process(qwen, **{field: value})
    assert raised.value.param == field


def test_prompt_must_leave_room_for_one_token(qwen: Tokenizer) -> None:
    assert len(process(qwen, prompt=(5,) * 9, max_model_len=10).token_ids) == 9
    with pytest.raises(ContextLengthExceeded, match="maximum context length is 10 tokens"):
        process(qwen, prompt=(5,) * 10, max_model_len=10)


def test_images_are_refused_wherever_they_are(qwen: Tokenizer) -> None:
    for part in (ImagePart("data:,"), ToolResultPart("c", (ImagePart("data:,"),))):
        with pytest.raises(Unsupported):
            process(qwen, messages=(Message("user", (part,)),))


@row("S0-5")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"messages": user("hi")}, True),
        ({"messages": user("hi"), "thinking": "off"}, False),
        ({"messages": user("what does </think> mean?")}, True),
        ({"messages": user("what does <think> mean?"), "thinking": "off"}, False),
        ({"messages": user("hi"), "add_generation_prompt": False}, False),
        (
            {
                "messages": (*user("a"), Message("assistant", (TextPart("<think>\nx"),))),
                "continue_final_message": True,
            },
            True,
        ),
        ({"messages": user("hi"), "tools": (ToolSpec("f", "Write <think> or <tool_call>.", None),)}, True),
        ({"prompt": "a<think>"}, False),
    ],
)
def test_reasoning_opened_by_the_prompt(qwen_3_5: Tokenizer, options: dict[str, Any], expected: bool) -> None:
    assert process(qwen_3_5, **options).starts_in_reasoning is expected


def test_a_template_that_opens_no_thought(qwen: Tokenizer) -> None:
    assert not process(qwen, messages=user("what does <think> mean?")).starts_in_reasoning


def test_without_a_reasoning_format_nothing_is_a_thought(qwen_3_5: Tokenizer) -> None:
    assert not process(qwen_3_5, messages=user("hi"), reasoning="none").starts_in_reasoning


def test_markers_that_are_no_tokens_are_found_in_the_text(llama_folder: Path) -> None:
    def starts(template: str) -> bool:
        tokenizer = Tokenizer.load(llama_folder, chat_template="{# a template of a constant #}" + template)
        return process(tokenizer, messages=user("hello")).starts_in_reasoning

    assert starts("</s>hello<think>\n")
    assert not starts("</s>hello<think>\n\n</think>")
    assert not starts("<think></s>hello")


@pytest.mark.parametrize(
    ("reasoning", "tag", "end"),
    [
        ("k2_horizon", "<ifm|think_faster>", "</ifm|think_faster>"),
        ("kimi_k3", "<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    ],
)
def test_every_tag_of_a_format_opens_reasoning(llama_folder: Path, reasoning: str, tag: str, end: str) -> None:
    def starts(template: str) -> bool:
        tokenizer = Tokenizer.load(llama_folder, chat_template="{# a template of a constant #}" + template)
        return process(tokenizer, messages=user("hello"), reasoning=reasoning).starts_in_reasoning

    assert starts(f"</s>hello{tag}")
    assert not starts(f"</s>hello{tag}hm{end}")
    assert not starts(f"{tag}</s>hello")
