"""Errors in Anthropic's envelope."""

import json

import pytest

from vllm_mlx.api.anthropic.errors import AnthropicErrors, encode_error
from vllm_mlx.core.errors import (
    ContextLengthExceeded,
    EngineDead,
    GenerationError,
    GrammarLimit,
    InvalidParameter,
    ModelNotFound,
    Overloaded,
    TemplateError,
    VLLMMLXError,
)


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
def test_errors(error: VLLMMLXError, status: int, kind: str) -> None:
    encoded = encode_error(error)
    assert encoded.status == status and encoded.code
    assert json.loads(encoded.body.to_json()) == {"type": "error", "error": {"type": kind, "message": "No."}}
    assert encoded.retry_after_s == (2 if isinstance(error, Overloaded) else None)


def test_a_prompt_that_is_too_long_is_said_in_the_words_that_make_claude_code_compact() -> None:
    encoded = encode_error(ContextLengthExceeded(num_prompt_tokens=33000, max_model_len=32768))
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
    encoded = AnthropicErrors().status(status, "No.")
    assert encoded.status == status
    assert json.loads(encoded.body.to_json())["error"] == {"type": kind, "message": "No."}
