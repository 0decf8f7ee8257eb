"""Every field of OpenAI's and Anthropic's requests has an answer that was decided, and no other is kept."""

from typing import Any

import pytest

from scripts._check_drift.__main__ import FREE, HONOURED, PROTOCOLS, REFUSED_WHOLE, answers, differences, load, versions
from tests.api.anthropic.bodies import decode as decode_messages
from vllm_mlx.core.errors import VLLMMLXError

_, KEPT = load()


def numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


@pytest.fixture(scope="module")
def found() -> Any:
    kept = load()[0]
    if any(numbers(installed) < numbers(kept[name]) for name, installed in versions().items()):
        pytest.skip(f"the installed packages are older than {kept}")
    return answers()


def test_every_field_has_the_answer_that_was_kept(found: Any) -> None:
    lines = differences(KEPT, found)
    assert not lines, "\n".join([*lines, "Decide what is done with each, then run `scripts/check-drift --write`."])


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_new_field_and_one_that_is_gone_are_found(protocol: str) -> None:
    for name, answer in (("messages", HONOURED), ("surprise", "unknown: refused")):
        other = {each: dict(KEPT[each]) for each in KEPT}
        other[protocol][f"Some.{name}"] = answer
        assert differences(KEPT, other) == [f"new      {protocol}: Some.{name}: {answer}"]
        assert differences(other, KEPT) == [f"gone     {protocol}: Some.{name}"]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_comparison_reaches_nested_types(protocol: str) -> None:
    """A comparison that stopped early would have nothing to say."""
    reached = {
        "chat completions": {"FunctionDefinition.strict", "ImageURL.detail", "ChatCompletionToolMessageParam.role"},
        "completions": {"ChatCompletionStreamOptionsParam.include_usage"},
        "responses": {"ResponseInputImageParam.image_url", "Reasoning.effort", "NamespaceToolParam.tools"},
        "messages": {"Base64ImageSourceParam.data", "ToolResultBlockParam.is_error", "OutputConfigParam.effort"},
        "messages, beta": {"BetaToolChangeToolDefinitionParam.definition", "BetaThinkingConfigEnabledParam.display"},
        "count_tokens": {"ToolParam.input_schema"},
        "embeddings": {"EmbeddingCreateParams.dimensions"},
    }
    for key in reached[protocol]:
        assert KEPT[protocol][key] in (HONOURED, FREE), key


def test_the_openai_bodies_have_no_field_without_a_rule() -> None:
    for protocol in ("chat completions", "completions", "embeddings", "responses"):
        params = PROTOCOLS[protocol][0].__name__
        unknown = [key for key, answer in KEPT[protocol].items() if key.startswith(params) and "unknown" in answer]
        assert unknown == []


HI: Any = {"role": "user", "content": "hi"}
FILE: Any = {"source": {"type": "file", "file_id": "f"}}
WHOLE: Any = {
    "FileImageSource": (decode_messages, {"messages": [HI | {"content": [FILE | {"type": "image"}]}]}),
    "FileDocumentSource": (decode_messages, {"messages": [HI | {"content": [FILE | {"type": "document"}]}]}),
    "MCPServer": (decode_messages, {"mcp_servers": [{"type": "url", "url": "http://x", "name": "x"}]}),
    "Toolset2026": (decode_messages, {"tools": [{"type": "browser_toolset_20260801", "configs": {}}]}),
}


@pytest.mark.parametrize("kind", WHOLE)
def test_what_is_refused_whole_is_refused(kind: str) -> None:
    decoder, fields = WHOLE[kind]
    with pytest.raises(VLLMMLXError):
        decoder(**fields)


def test_every_type_that_is_refused_whole_has_an_example() -> None:
    assert all(any(kind in name for kind in WHOLE) for name in REFUSED_WHOLE)
