"""Where prompts are worth keeping: against what whole tokenised renderings have in common."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.rows import cases, row
from vllm_mlx.core.messages import Message, ReasoningPart, TextPart, ToolCallPart, ToolChoice, ToolResultPart
from vllm_mlx.core.request import Request
from vllm_mlx.formats.tokenizer import Tokenizer
from vllm_mlx.prompt.processor import RequestProcessor
from vllm_mlx.prompt.template import ChatTemplate

from .template_variants import TEMPLATE_VARIANTS
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
def processor_with(qwen_folder: Path) -> Callable[[str], RequestProcessor]:
    return lambda template: make_processor(Tokenizer.load(qwen_folder, chat_template=template))


def ids_of(processor: RequestProcessor, request: Request) -> list[int]:
    text = ChatTemplate(processor.tokenizer).render_prompt(replace(request, add_generation_prompt=True)).text
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


def expected_points(processor: RequestProcessor, request: Request) -> set[int]:
    assert request.messages is not None
    prompt = ids_of(processor, request)

    def common(*conversations: tuple[Message, ...]) -> int:
        count = shared(prompt, *(ids_of(processor, replace(request, messages=messages)) for messages in conversations))
        while processor.tokenizer.decode(prompt[:count])[-1:].isspace():
            count -= 1
        return count

    leading = request.messages[:1] if request.messages[0].role == "system" else ()
    points = {common((*leading, user("0 or not")), (*leading, user("the")))}
    asked = max((number for number, message in enumerate(request.messages) if message.role == "user"), default=0)
    if any(message.role == "assistant" for message in request.messages[:asked]):
        before = request.messages[:asked]
        points.add(common((*before, user("0 or not")), (*before, user("the"))))
    *before, last = request.messages
    more = (
        [*before, replace(last, parts=(*last.parts, TextPart("the")))]
        if last.role == "user"
        else [*before, last, user("the")]
    )
    points.add(common(tuple(more)))
    for reply, follow in (
        (TextPart("0"), user("?")),
        (ToolCallPart("c9", "read", {}), Message("tool", (ToolResultPart("c9", (TextPart("?"),), "read"),))),
    ):
        plain = Message("assistant", (reply,))
        thought = Message("assistant", (ReasoningPart("the"), TextPart("the"), reply))
        points.add(common((*request.messages, plain, follow), (*request.messages, thought, follow)))
    apart: list[int] = []
    for point in sorted(points):
        if 0 < point < len(prompt) and (not apart or point - apart[-1] >= 8):
            apart.append(point)
    return set(apart)


PROBED = [name for name in TEMPLATE_VARIANTS if name != "strict roles"]


@row("S4-28")
@pytest.mark.parametrize("variant", cases(PROBED, ["gemma", "keeps reasoning", "tools last", "merges system"]))
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_points_are_where_whole_prompts_part(processor_with, variant: str, conversation: str) -> None:
    processor = processor_with(TEMPLATE_VARIANTS[variant])
    request = ask(*CONVERSATIONS[conversation])
    inputs = processor.prepare(request).prompt
    assert list(inputs.token_ids) == ids_of(processor, request)
    assert set(inputs.snapshot_points) == expected_points(processor, request)
    assert list(inputs.snapshot_points) == sorted(inputs.snapshot_points)


def test_a_probe_that_the_template_refuses_leaves_its_point_out(processor_with) -> None:
    """A result of a tool may follow nowhere."""
    processor = processor_with(TEMPLATE_VARIANTS["strict roles"])
    prompt = processor.prepare(ask(user("hello"), tools=())).prompt
    assert [processor.tokenizer.decode(prompt.token_ids[:point]) for point in prompt.snapshot_points] == [
        "<|im_start|>user",
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant",
    ]


def test_tools_that_may_not_be_called_are_not_asked_about(processor_with) -> None:
    processor = processor_with(TEMPLATE_VARIANTS["after the last question"])
    with_none = processor.prepare(ask(*CONVERSATIONS["in a tool loop"], tool_choice=ToolChoice("none"))).prompt
    without = processor.prepare(ask(*CONVERSATIONS["in a tool loop"], tools=())).prompt
    assert with_none == without


@pytest.mark.parametrize(("needs_points", "runs"), [(True, True), (True, False), (False, True), (False, False)])
def test_only_a_prompt_that_runs_and_needs_points_is_rendered_again(
    qwen_folder: Path, monkeypatch: pytest.MonkeyPatch, needs_points: bool, runs: bool
) -> None:
    tokenizer = Tokenizer.load(qwen_folder, chat_template=TEMPLATE_VARIANTS["after the last question"])
    processor = make_processor(tokenizer, resumes_anywhere=not needs_points)
    request, texts, render = ask(*CONVERSATIONS["long in a tool loop"]), [], Tokenizer.apply_chat_template
    expected = processor.prepare(request).prompt.token_ids  # after it, the template's shapes are known

    def rendered(*args: object, **kwargs: object) -> str:
        texts.append(render(*args, **kwargs))  # type: ignore[arg-type]
        return texts[-1]

    monkeypatch.setattr(Tokenizer, "apply_chat_template", rendered)
    prompt = processor.prepare(request, runs=runs).prompt
    assert prompt.token_ids == expected
    question = tokenizer.decode(expected).rpartition("<|im_end|>")[0]
    assert (sum(text.startswith(question) for text in texts) > 1) == (needs_points and runs)
    assert len(texts) == 1 or runs
    assert bool(prompt.snapshot_points) == (needs_points and runs)


def test_completions_have_no_points(processor_with) -> None:
    prepared = processor_with(TEMPLATE_VARIANTS["gemma"]).prepare(Request(request_id="r", prompt="hello world"))
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
