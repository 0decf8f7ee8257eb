"""The demo's chat template keeps what a client sends, in its place."""

import pytest
from transformers import AutoTokenizer

from vllm_mlx.runner.checkpoint import DEMO_PATH

MARK = "<|vision_start|><|image_pad|><|vision_end|>"
CALL = {"type": "function", "function": {"name": "Read", "arguments": {"path": "a.txt", "limit": 3}}}


@pytest.fixture(scope="module")
def render():
    tokenizer = AutoTokenizer.from_pretrained(DEMO_PATH)

    def render(messages: list[dict], **options) -> str:
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)

    return render


def user(content: object) -> dict:
    return {"role": "user", "content": content}


def test_generation_prompt_opens_the_reasoning(render) -> None:
    assert render([user("Hi")], add_generation_prompt=True).endswith("<|im_start|>assistant\n<think>\n")


def test_generation_prompt_closes_the_reasoning_where_thinking_is_off(render) -> None:
    prompt = render([user("Hi")], add_generation_prompt=True, enable_thinking=False)
    assert prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_only_reasoning_after_the_last_question_is_kept(render) -> None:
    early = {"role": "assistant", "content": "one", "reasoning_content": "early"}
    late = {"role": "assistant", "content": "", "reasoning_content": "late", "tool_calls": [CALL]}
    prompt = render([user("a"), early, user("b"), late, {"role": "tool", "content": "x"}])
    assert "early" not in prompt
    assert "<think>\nlate\n</think>\n\n<tool_call>\n<function=Read>" in prompt


def test_arguments_are_written_raw_or_as_json(render) -> None:
    prompt = render([user("a"), {"role": "assistant", "content": "", "tool_calls": [CALL]}])
    assert "<parameter=path>\na.txt\n</parameter>\n<parameter=limit>\n3\n</parameter>\n</function>" in prompt


def test_neighbouring_tool_results_share_a_turn(render) -> None:
    two = {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]}
    results = [{"role": "tool", "content": "x"}, {"role": "tool", "content": "y"}]
    shared = "<|im_start|>user\n<tool_response>\nx\n</tool_response>\n<tool_response>\ny\n</tool_response><|im_end|>\n"
    assert render([user("a"), two, *results]).endswith(shared)


def test_system_messages_stay_where_they_are(render) -> None:
    prompt = render([{"role": "system", "content": "one"}, user("a"), {"role": "system", "content": "two"}])
    turns = ["system\none", "user\na", "system\ntwo"]
    assert prompt == "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in turns)


def test_tools_stand_before_the_system_text(render) -> None:
    schema = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
    tool = {"type": "function", "function": {"name": "Read", "description": "Reads.", "parameters": schema}}
    prompt = render([{"role": "system", "content": "Be brief."}, user("a")], tools=[tool])
    assert prompt.startswith("<|im_start|>system\n# Tools\n<tools>\n<function=Read>\n<parameter=path>\n</function>\n")
    assert prompt.count("<|im_start|>system") == 1
    assert "\n\nBe brief.<|im_end|>" in prompt


@pytest.mark.parametrize("kind", ["image", "image_url", "input_image"])
def test_a_picture_stands_where_it_was_put(render, kind: str) -> None:
    prompt = render([user([{"type": "text", "text": "a"}, {"type": kind}, {"type": "text", "text": "b"}])])
    assert prompt == f"<|im_start|>user\na{MARK}b<|im_end|>\n"


def test_several_pictures_of_a_message_are_numbered(render) -> None:
    two = user([{"type": "image"}, {"type": "text", "text": "a"}, {"type": "image"}])
    turns = f"Picture 1: {MARK}a\nPicture 2: {MARK}", f"b{MARK}"
    prompt = render([two, user([{"type": "text", "text": "b"}, {"type": "image"}])])
    assert prompt == "".join(f"<|im_start|>user\n{turn}<|im_end|>\n" for turn in turns)
