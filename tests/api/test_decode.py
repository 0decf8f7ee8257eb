"""Request bodies → Requests and reply specs."""

from typing import Any

import pytest

from tests.support.rows import row
from vllm_mlx.api.openai.schema import BODY_FIELDS, ChatCompletionBody
from vllm_mlx.api.parameters import GenerationFields, decode_sampling
from vllm_mlx.core.errors import InvalidParameter
from vllm_mlx.core.messages import Message, TextPart, ToolChoice
from vllm_mlx.core.request import RESERVED_TEMPLATE_KWARGS, Request, SamplingParams

from .bodies import HI, TOOL, chat, decode, decode_text, refusal, spec


def test_a_bare_chat() -> None:
    decoded = decode()
    assert decoded.requests == (
        Request(
            request_id="chatcmpl-1",
            messages=(Message("user", (TextPart("hi"),)),),
            tool_choice=ToolChoice("none"),
        ),
    )
    assert decoded.reply == spec()


def test_null_is_a_field_left_out() -> None:
    fields = {*ChatCompletionBody.model_fields, *BODY_FIELDS} - {"messages", "model"}
    assert decode(**dict.fromkeys(fields)) == decode()


@pytest.mark.parametrize("body", [{"max_tokens": 5}, {"max_completion_tokens": 5}])
def test_either_name_limits_the_reply(body: dict[str, int]) -> None:
    assert chat(**body).sampling.max_tokens == 5
    assert chat().sampling.max_tokens is None


@row("S3-14")
@pytest.mark.parametrize(
    ("fields", "thinking", "kwargs"),
    [
        ({}, "auto", {}),
        ({"reasoning_effort": "none"}, "off", {"reasoning_effort": "none"}),
        ({"reasoning_effort": "minimal"}, "on", {"reasoning_effort": "minimal"}),
        ({"reasoning_effort": "max"}, "on", {"reasoning_effort": "max"}),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "off", {"enable_thinking": False}),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "on", {"enable_thinking": True}),
        (
            {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}},
            "off",
            {"reasoning_effort": "high", "enable_thinking": False},
        ),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True, "reasoning_effort": "x"}},
            "on",
            {"reasoning_effort": "x", "enable_thinking": True},
        ),
    ],
)
def test_thinking(fields: dict[str, Any], thinking: str, kwargs: dict[str, Any]) -> None:
    request = chat(**fields)
    assert (request.thinking, request.template_kwargs) == (thinking, kwargs)


def test_the_number_of_arguments_for_the_template_is_bounded() -> None:
    kwargs = {f"k{number}": number for number in range(16)}
    assert chat(chat_template_kwargs=kwargs).template_kwargs == kwargs
    with pytest.raises(InvalidParameter, match="`chat_template_kwargs` has 17 entries, at most 16") as caught:
        chat(chat_template_kwargs={**kwargs, "one more": 1})
    assert caught.value.param == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("fields", "mode"),
    [
        ({}, "separate"),
        ({"include_reasoning": True}, "separate"),
        ({"include_reasoning": False}, "hidden"),
        ({"separate_reasoning": False}, "inline"),
        ({"separate_reasoning": False, "include_reasoning": False}, "hidden"),
    ],
)
def test_what_the_client_sees_of_the_reasoning(fields: dict[str, Any], mode: str) -> None:
    assert decode(**fields).reply.reasoning == mode


@row("S2-14")
@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "json_object"}}, {"guided_regex": "a"}])
def test_hiding_the_reasoning_is_nothing_that_the_engine_knows(fields: dict[str, Any]) -> None:
    assert chat(**fields, include_reasoning=False) == chat(**fields)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Once", ["Once"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [(1, 2)]),
        ([[1], [2, 3]], [(1,), (2, 3)]),
    ],
)
def test_prompts(prompt: Any, expected: list[Any]) -> None:
    decoded = decode_text(prompt=prompt, n=2, echo=True)
    assert [request.prompt for request in decoded.requests] == expected
    assert len({request.request_id for request in decoded.requests}) == len(expected)
    assert all(request.echo and request.messages is None for request in decoded.requests)
    assert decoded.reply.num_choices == 2 * len(expected)


NAMED = {"type": "function", "function": {"name": "ls"}}
OTHER = {"type": "function", "function": {"name": "rm"}}
PART = "messages[0].content[0]"
VIDEO = {"type": "video_url", "video_url": "http://v"}


@row("S3-3")
@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": []}, "messages", "`messages` must not be empty."),
        ({"max_tokens": 5.0}, "max_tokens", "`max_tokens` must be an integer."),
        ({"max_tokens": True}, "max_tokens", "`max_tokens` must be an integer."),
        ({"max_tokens": 0}, "max_tokens", "`max_tokens` must be greater than or equal to 1."),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "`max_completion_tokens` must be greater than"),
        ({"temperature": "1"}, "temperature", "`temperature` must be a number."),
        ({"temperature": True}, "temperature", "`temperature` must be a number."),
        ({"temperature": 2.5}, "temperature", "`temperature` must be at most 2, got 2.5."),
        ({"temperature": float("nan")}, "temperature", "`temperature` must be a finite number."),
        ({"top_k": -2}, "top_k", "`top_k` must be"),
        ({"n": 0}, "n", "`n` must be at least 1, got 0."),
        ({"stream": 1}, "stream", "`stream` must be true or false."),
        ({"stop": 5}, "stop", "`stop` must be a string or a list."),
        ({"stop": ["a", 5]}, "stop[1]", "`stop[1]` must be a string."),
        ({"stop": [""]}, "stop", "empty string"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "token ids, got 'a'"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "token ids, got '-1'"),
        ({"logit_bias": {"1": 101}}, "logit_bias[1]", "at most 100"),
        ({"logit_bias": {"1": "x"}}, "logit_bias.1", "must be a number"),
        ({"top_logprobs": 3}, "top_logprobs", "when using `top_logprobs`, `logprobs` must be set to true."),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        ({"logprobs": 1}, "logprobs", "`logprobs` must be true or false."),
        ({"stream_options": {}}, "stream_options", "Stream options can only be defined when `stream=True`."),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "When using `tool_choice`, `tools` must be set."),
        ({"tool_choice": "auto"}, "tool_choice", "When using `tool_choice`, `tools` must be set."),
        ({"tool_choice": NAMED}, "tool_choice", "When using `tool_choice`, `tools` must be set."),
        ({"cache_salt": "x" * 1025}, "cache_salt", "`cache_salt` must have at most 1024 characters."),
        ({"messages": [{"role": "user", "content": [{**VIDEO, "fps": 0}]}]}, f"{PART}.fps", "must be greater than 0."),
        (
            {"messages": [{"role": "user", "content": [{**VIDEO, "video_url": {"url": 1}}]}]},
            f"{PART}.video_url.url",
            "str",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "video_url"}]}]}, f"{PART}.video_url", "is required"),
        ({"tools": [{**TOOL, "function": {"name": ""}}]}, "tools[0].function.name", "must not be empty"),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice", "Invalid value for `tool_choice`: any!"),
        ({"tools": [TOOL], "tool_choice": OTHER}, "tool_choice", "does not match any of the specified `tools`"),
        ({"tool_choice": "required"}, "tool_choice", "When using `tool_choice`, `tools` must be set."),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is required"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "exactly one of"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least one option"),
        ({"structured_outputs": {"tree": 1}}, "structured_outputs.tree", "Unknown parameter"),
        ({"guided_json": "{"}, "guided_json", "is not valid JSON"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex", "not both"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "does not go with `guided_regex`"),
        ({"thinking_token_budget": -2}, "thinking_token_budget", "non-negative integer or -1 for unlimited."),
        ({"thinking_token_budget": True}, "thinking_token_budget", "non-negative integer or -1 for unlimited."),
        ({"thinking_token_budget": 1.5}, "thinking_token_budget", "non-negative integer or -1 for unlimited."),
        (
            {"chat_template_kwargs": {"thinking_token_budget": "5"}},
            "chat_template_kwargs.thinking_token_budget",
            "non-negative integer",
        ),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type", "`tools[0].type` must be 'function'."),
        ({"tools": [{**TOOL, "mood": 1}]}, "tools[0].mood", "Unknown parameter"),
        ({"reasoning_effort": "huge"}, "reasoning_effort", "'none', 'minimal', 'low'"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "Set either",
        ),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools", "use the request field"),
        (
            {"chat_template_kwargs": {"force_nonempty_content": 1}},
            "chat_template_kwargs.force_nonempty_content",
            "true or false",
        ),
        ({"chat_template_kwargs": {"enable_thinking": "yes"}}, "chat_template_kwargs.enable_thinking", "true or false"),
    ],
)
def test_a_wrong_chat_is_refused_by_name(fields: dict[str, Any], param: str, words: str) -> None:
    error = refusal(decode, **{"messages": HI, **fields})
    assert (error.param, error.type) == (param, "invalid_request_error")
    assert words in error.message


@pytest.mark.parametrize("name", sorted(RESERVED_TEMPLATE_KWARGS))
def test_template_arguments_of_the_server_are_refused(name: str) -> None:
    error = refusal(decode, messages=HI, chat_template_kwargs={name: "x"})
    assert (error.param, error.type) == (f"chat_template_kwargs.{name}", "invalid_request_error")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"n": 2, "best_of": 1}, "best_of"),
        ({"max_tokens": 0, "logprobs": 1}, "max_tokens"),
        ({"max_tokens": -5, "echo": True}, "max_tokens"),
        ({"max_tokens": False, "echo": True}, "max_tokens"),
        ({"suffix": "x", "echo": True}, "echo"),
        ({"suffix": ["x"]}, "suffix"),
        ({"messages": HI}, "messages"),
    ],
)
def test_a_wrong_completion_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert refusal(decode_text, **fields).param == param


def test_a_body_s_field_with_the_name_of_a_sampling_parameter_is_that_parameter() -> None:
    class NewBody(GenerationFields):
        stop_token_ids: tuple[int, ...] | None = None

    assert decode_sampling(NewBody(stop_token_ids=(1, 2), temperature=0.5)) == SamplingParams(
        stop_token_ids=(1, 2), temperature=0.5
    )
    assert decode_sampling(NewBody(stop_token_ids=(1, 2)), stop_token_ids=(3,)) == SamplingParams(stop_token_ids=(3,))
    assert decode_sampling(NewBody.model_validate({"min_p": 0.5})) == SamplingParams()  # it declares no such field
