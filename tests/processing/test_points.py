"""Where prompts are worth keeping: against what whole tokenised renderings have in common."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from vllm_mlx.core.messages import Message, ReasoningPart, TextPart, ToolCallPart, ToolChoice, ToolResultPart
from vllm_mlx.core.request import Request
from vllm_mlx.processing.processor import Processor
from vllm_mlx.processing.template import ChatTemplate
from vllm_mlx.processing.tokenizer import Tokenizer

from .conftest import TEMPLATES
from .habits import HABITS
from .turns import TOOLS, make_processor, system, user

CALL = ToolCallPart("c1", "read", {"path": "a.py"})
CALLING = Message("assistant", (ReasoningPart("Look."), CALL))
RESULT = Message("tool", (ToolResultPart("c1", (TextPart("def main():\n    return 1 + 2\n"),), "read"),))
CONVERSATIONS: dict[str, tuple[Message, ...]] = {
    "system and question": (system("You are terse.\nVery."), user("What is in a.py?")),
    "question alone": (user("What is in a.py?"),),
    "a question that begins as the dummy does": (system("You are terse."), user("0 or not")),
    "another that does": (system("You are terse."), user("the")),
    "second question": (user("What?"), Message("assistant", (TextPart("This."),)), user("And?")),
    "in a tool loop": (system("Be kind."), user("Read it."), CALLING, RESULT),
    "long in a tool loop": (user("Read it."), CALLING, RESULT, CALLING, RESULT),
    "system in between": (system("Be kind."), user("Hello."), system("A task has ended."), user("Go on.")),
    "long texts": (system("the quick brown fox " * 300), user("hello world " * 300)),
}


@pytest.fixture(scope="module")
def processor_with(qwen_folder: Path) -> Callable[[str], Processor]:
    return lambda template: make_processor(Tokenizer.load(qwen_folder, chat_template=template))


def ids_of(processor: Processor, request: Request) -> list[int]:
    text = ChatTemplate(processor.tokenizer).render(replace(request, add_generation_prompt=True))
    return processor.tokenizer.encode(text, add_special_tokens=False)


def shared(*prompts: Iterable[int]) -> int:
    """By comparing element after element."""
    count = 0
    for ids in zip(*prompts, strict=False):
        if len(set(ids)) > 1:
            break
        count += 1
    return count


def ask(*messages: Message, **options: object) -> Request:
    return Request(request_id="r", messages=messages, **{"tools": TOOLS, **options})  # type: ignore[arg-type]


def expected_points(processor: Processor, request: Request) -> set[int]:
    assert request.messages is not None
    prompt = ids_of(processor, request)

    def common(*conversations: tuple[Message, ...]) -> int:
        count = shared(prompt, *(ids_of(processor, replace(request, messages=messages)) for messages in conversations))
        while processor.tokenizer.decode(prompt[:count])[-1:].isspace():
            count -= 1
        return count

    leading = request.messages[:1] if request.messages[0].role == "system" else ()
    everywhere = tuple(message for message in request.messages if message.role == "system")
    points = {common((*systems, user("0 or not")), (*systems, user("the"))) for systems in (leading, everywhere)}
    for reply, follow in (
        (TextPart("0"), user("?")),
        (ToolCallPart("c9", "read", {}), Message("tool", (ToolResultPart("c9", (TextPart("?"),), "read"),))),
    ):
        plain = Message("assistant", (reply,))
        thought = Message("assistant", (ReasoningPart("the"), TextPart("the"), reply))
        points.add(common((*request.messages, plain, follow), (*request.messages, thought, follow)))
    return {point for point in points if 0 < point < len(prompt)}


@pytest.mark.parametrize("habit", [name for name in HABITS if name != "strict roles"])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_points_are_where_whole_prompts_part(processor_with, habit: str, conversation: str) -> None:
    processor = processor_with(HABITS[habit])
    request = ask(*CONVERSATIONS[conversation])
    inputs = processor.prepare(request).prompt
    assert list(inputs.token_ids) == ids_of(processor, request)
    assert set(inputs.snapshot_points) == expected_points(processor, request)
    assert list(inputs.snapshot_points) == sorted(inputs.snapshot_points)


def test_the_first_point_ends_tools_and_system(processor_with) -> None:
    processor = processor_with(HABITS["after the last question"])
    prompt = processor.prepare(ask(system("Be kind."), user("hello"))).prompt
    text = processor.tokenizer.decode(prompt.token_ids[: prompt.snapshot_points[0]])
    assert text.startswith("<|im_start|>system\nBe kind.\n\n# Tools")
    assert text.endswith("</tool_call><|im_end|>\n<|im_start|>user")


def test_merged_system_messages_are_one_system_prompt(processor_with) -> None:
    processor = processor_with(HABITS["merges system"])
    prompt = processor.prepare(ask(*CONVERSATIONS["system in between"], tools=())).prompt
    texts = [processor.tokenizer.decode(prompt.token_ids[:point]) for point in prompt.snapshot_points]
    assert "<|im_start|>system\nBe kind.\nA task has ended.\n<|im_end|>\n<|im_start|>user" in texts


def test_the_generation_suffix_is_left_out(processor_with) -> None:
    processor = processor_with((TEMPLATES / "qwen3_5.jinja").read_text())
    prompt = processor.prepare(ask(user("hello"), tools=())).prompt
    text = processor.tokenizer.decode(prompt.token_ids[: prompt.snapshot_points[-1]])
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant"


def test_where_the_next_question_strips_reasoning_is_a_point(processor_with) -> None:
    processor = processor_with(HABITS["after the last question"])
    prompt = processor.prepare(ask(*CONVERSATIONS["in a tool loop"])).prompt
    texts = [processor.tokenizer.decode(prompt.token_ids[:point]) for point in prompt.snapshot_points]
    assert [text.endswith("Read it.<|im_end|>\n<|im_start|>assistant") for text in texts] == [False, True, False]
    assert texts[-1].endswith("</tool_response><|im_end|>\n<|im_start|>assistant")


def test_a_probe_that_the_template_refuses_leaves_its_point_out(processor_with) -> None:
    """A result of a tool may follow nowhere."""
    processor = processor_with(HABITS["strict roles"])
    prompt = processor.prepare(ask(user("hello"))).prompt
    assert [processor.tokenizer.decode(prompt.token_ids[:point]) for point in prompt.snapshot_points] == [
        "<|im_start|>user",
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant",
    ]


def test_tools_that_may_not_be_called_are_not_asked_about(processor_with) -> None:
    processor = processor_with(HABITS["after the last question"])
    with_none = processor.prepare(ask(*CONVERSATIONS["in a tool loop"], tool_choice=ToolChoice("none"))).prompt
    without = processor.prepare(ask(*CONVERSATIONS["in a tool loop"], tools=())).prompt
    assert with_none == without


def test_completions_have_no_points(processor_with) -> None:
    prepared = processor_with(HABITS["gemma"]).prepare(Request(request_id="r", prompt="hello world"))
    assert prepared.prompt.snapshot_points == ()
    assert prepared.chat is None


def test_a_tokenizer_that_puts_a_space_before_every_text(llama_folder: Path) -> None:
    template = (
        "{%- for m in messages -%}{{- m.content + ('</s>' if m.role == 'assistant' else '\\nx') -}}{%- endfor -%}"
    )
    processor = make_processor(Tokenizer.load(llama_folder, chat_template=template))
    for messages in CONVERSATIONS.values():
        request = ask(*messages, tools=())
        points = processor.prepare(request).prompt.snapshot_points
        assert set(points) <= expected_points(processor, request) | {0}
