"""Errors → statuses, and the envelopes of OpenAI and Anthropic."""

import json

import pytest

from vllm_mlx.api.error_replies import ANTHROPIC, OPENAI
from vllm_mlx.core.errors import (
    ContextLengthExceeded,
    EngineDead,
    GenerationError,
    GrammarLimit,
    InvalidParameter,
    ModelNotFound,
    Overloaded,
    TemplateError,
    Unsupported,
    VLLMMLXError,
)


@pytest.mark.parametrize(
    ("error", "status", "type_", "param", "code"),
    [
        (InvalidParameter("x", param="n"), 400, "invalid_request_error", "n", "invalid_value"),
        (Unsupported("x", param="audio"), 400, "invalid_request_error", "audio", "unsupported_parameter"),
        (TemplateError("x"), 400, "invalid_request_error", None, "template_error"),
        (
            ContextLengthExceeded(num_prompt_tokens=9, max_model_len=8),
            400,
            "invalid_request_error",
            "messages",
            "context_length_exceeded",
        ),
        (ModelNotFound("x"), 404, "invalid_request_error", "model", "model_not_found"),
        (Overloaded("x", retry_after_s=2.5), 503, "overloaded_error", None, "overloaded"),
        (GenerationError("x"), 500, "server_error", None, "generation_failed"),
        (GrammarLimit("x", param="tools"), 400, "invalid_request_error", "tools", "grammar_limit"),
        (EngineDead("x"), 503, "server_error", None, "engine_dead"),
        (VLLMMLXError("x"), 500, "server_error", None, "generation_failed"),
    ],
)
def test_statuses(error: VLLMMLXError, status: int, type_: str, param: str | None, code: str) -> None:
    encoded = OPENAI.error(error)
    assert encoded.status == status
    assert encoded.body.model_dump() == {
        "error": {"message": error.message, "type": type_, "param": param, "code": code}
    }
    assert encoded.retry_after_s == (2.5 if isinstance(error, Overloaded) else None)


def test_null_members_of_an_envelope_are_sent() -> None:
    assert OPENAI.status(418, "Tea.").body.to_json() == (
        '{"error":{"message":"Tea.","type":"invalid_request_error","param":null,"code":null}}'
    )


def test_our_own_faults_are_server_errors() -> None:
    assert OPENAI.status(500, "x").body.error.type == "server_error"


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (InvalidParameter("No."), 400, "invalid_request_error"),
        (TemplateError("No."), 400, "invalid_request_error"),
        (ModelNotFound("No."), 404, "not_found_error"),
        (Overloaded("No.", retry_after_s=2), 503, "overloaded_error"),
        (EngineDead("No."), 503, "api_error"),
        (GenerationError("No."), 500, "api_error"),
        (GrammarLimit("No.", param="tools"), 400, "invalid_request_error"),
    ],
)
def test_errors_in_the_envelope_of_anthropic(error: VLLMMLXError, status: int, kind: str) -> None:
    encoded = ANTHROPIC.error(error)
    assert encoded.status == status and encoded.code
    assert json.loads(encoded.body.to_json()) == {"type": "error", "error": {"type": kind, "message": "No."}}
    assert encoded.retry_after_s == (2 if isinstance(error, Overloaded) else None)


def test_a_prompt_that_is_too_long_is_said_in_the_words_that_make_claude_code_compact() -> None:
    encoded = ANTHROPIC.error(ContextLengthExceeded(num_prompt_tokens=33000, max_model_len=32768))
    assert encoded.status == 400
    assert json.loads(encoded.body.to_json())["error"] == {
        "type": "invalid_request_error",
        "message": "prompt is too long: 33000 tokens > 32768 maximum",
    }


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
    ],
)
def test_what_http_itself_found(status: int, kind: str) -> None:
    encoded = ANTHROPIC.status(status, "No.")
    assert encoded.status == status
    assert json.loads(encoded.body.to_json())["error"] == {"type": kind, "message": "No."}
