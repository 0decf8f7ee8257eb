"""Documents from the socket to the model: the same prompt as their text, and no conversation that cannot go on."""

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from ..media.pdf_samples import encrypted, pdf, show
from .watched import engine_served

HELLO = base64.b64encode(pdf(show("Hello"), show("World"))).decode()
LOCKED = base64.b64encode(encrypted()).decode()
TEXT = "[PDF of 2 pages]\n\n[Page 1]\nHello\n\n[Page 2]\nWorld\n"
ASK: Any = {"type": "text", "text": "What does it say?"}
MODEL, SETTINGS = "qwen3", {"max_model_len": 1024}


def block(data: str, **fields: Any) -> Any:
    return {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": data}, **fields}


def user(*content: Any) -> Any:
    return {"role": "user", "content": list(content)}


def called(*results: Any) -> list[Any]:
    """A turn in which the model has called a tool, and these are what came back."""
    call = {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {}}
    return [user(ASK), {"role": "assistant", "content": [call]}, user(*results)]


def result(*content: Any) -> Any:
    return {"type": "tool_result", "tool_use_id": "toolu_1", "content": list(content)}


def count(claude: anthropic.Anthropic, *messages: Any) -> int:
    return claude.messages.count_tokens(model="tiny", messages=list(messages)).input_tokens


def test_the_prompt_is_that_of_the_text(claude: anthropic.Anthropic, gpt: openai.OpenAI) -> None:
    text = {"type": "text", "text": TEXT}
    expected = count(claude, user(text, ASK))
    assert count(claude, user(block(HELLO), ASK)) == expected
    assert count(claude, *called(result(block(HELLO)))) == count(claude, *called(result(text)))
    titled = {"type": "text", "text": "T\nC\n"}
    assert count(claude, user(block(HELLO, title="T", context="C"), ASK)) == count(claude, user(titled, text, ASK))
    content: Any = [{"type": "input_file", "file_data": HELLO}, {"type": "input_text", "text": ASK["text"]}]
    response = gpt.responses.create(model="tiny", input=[{"role": "user", "content": content}], max_output_tokens=1)
    file: Any = {"type": "file", "file": {"file_data": f"data:application/pdf;base64,{HELLO}"}}
    chat = gpt.chat.completions.create(model="tiny", messages=[user(file, ASK)], max_tokens=1)
    assert response.usage is not None and chat.usage is not None
    assert response.usage.input_tokens == chat.usage.prompt_tokens == expected


def test_the_next_turn_begins_with_the_cached_document(claude: anthropic.Anthropic) -> None:
    fields: Any = {"model": "tiny", "max_tokens": 8, "extra_body": {"temperature": 0, "cache_salt": "turns"}}
    first = claude.messages.create(messages=[user(block(HELLO), ASK)], **fields)
    said: Any = {"role": "assistant", "content": [each.model_dump() for each in first.content]}
    second = claude.messages.create(messages=[user(block(HELLO), ASK), said, user(ASK)], **fields)
    assert (second.usage.cache_read_input_tokens or 0) >= first.usage.input_tokens - 8 > 16


def refused(post: Callable[[], Any]) -> Any:
    with pytest.raises((anthropic.BadRequestError, openai.BadRequestError)) as caught:
        post()
    return caught.value


def test_a_document_that_was_just_sent_and_cannot_be_read_is_refused_by_its_place(
    claude: anthropic.Anthropic, gpt: openai.OpenAI
) -> None:
    error = refused(lambda: count(claude, user(ASK, block(LOCKED))))
    assert error.body["error"]["type"] == "invalid_request_error"
    assert error.body["error"]["message"] == (
        "Document 1 of this request (`messages[0].content[1].source`, data:application/pdf;base64,…): it is encrypted: "
        "The PDF specified is password protected. Send it without a password."
    )
    file: Any = [{"type": "input_file", "file_data": LOCKED}]
    error = refused(lambda: gpt.responses.create(model="tiny", input=[{"role": "user", "content": file}]))
    assert (error.code, error.param) == ("invalid_document", "input[0].content[0].file_data")


def test_a_conversation_goes_on_with_a_document_that_cannot_be_read(claude: anthropic.Anthropic) -> None:
    reason = "it is encrypted: The PDF specified is password protected. Send it without a password."
    line = {"type": "text", "text": f"[This document could not be read: {reason}]"}
    earlier = [{"role": "assistant", "content": "I cannot."}, user(ASK)]
    ways = {
        "a tool returned it": lambda part: called(result(part)),
        "it came beside the result of a tool": lambda part: called(result({"type": "text", "text": "read"}), part),
        "it was sent before the last reply": lambda part: [user(part), *earlier],
    }
    for name, messages in ways.items():
        assert count(claude, *messages(block(LOCKED))) == count(claude, *messages(line)), name


EMPTY: dict[str, Any] = {
    "base64": {"type": "base64", "media_type": "text/plain", "data": ""},
    "text": {"type": "text", "media_type": "text/plain", "data": ""},
    "content": {"type": "content", "content": ""},
    "no blocks": {"type": "content", "content": []},
}


@pytest.mark.parametrize("name", EMPTY)
def test_an_empty_document_has_one_answer_in_every_form(claude: anthropic.Anthropic, name: str) -> None:
    document: Any = {"type": "document", "source": EMPTY[name], "title": "T"}
    message = refused(lambda: count(claude, user(ASK, document))).body["error"]["message"]
    assert "`messages[0].content[1].source`" in message and message.endswith("it is empty.")
    words = [{"type": "text", "text": text} for text in ("T\n", "[This document could not be read: it is empty.]")]
    assert count(claude, *called(result(document))) == count(claude, *called(result(*words)))


def test_images_in_documents_of_blocks_need_a_model_that_sees(claude: anthropic.Anthropic) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    both = {"type": "document", "source": {"type": "content", "content": [image]}}
    assert "takes no images" in refused(lambda: count(claude, user(both, block(LOCKED)))).body["error"]["message"]


def test_a_model_that_sees_gets_images_and_text(checkpoint: Callable[..., Path]) -> None:
    with engine_served(checkpoint("vision:qwen3_vl"), max_model_len=1024) as running, running.http() as http:
        page = pdf(show("Hello"), box="0 0 112 112")
        shown = _prompt_tokens(http, {"type": "file", "file": {"file_data": base64.b64encode(page).decode()}})
        text = _prompt_tokens(http, {"type": "text", "text": "[PDF of 1 page]\n\n[Page 1]\nHello\n"})
        assert shown > text + 8 and http.get("/v1/status").json()["images"]["entry_count"] == 1


def _prompt_tokens(http: httpx.Client, part: Any) -> int:
    body = {"messages": [user(part, ASK)], "max_tokens": 1}
    return http.post("/v1/chat/completions", json=body).json()["usage"]["prompt_tokens"]
