"""Errors → statuses and OpenAI's envelope."""

import pytest

from vllm_mlx.api.openai.errors import encode_error, encode_status
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
    encoded = encode_error(error)
    assert encoded.status == status
    assert encoded.body.model_dump() == {
        "error": {"message": error.message, "type": type_, "param": param, "code": code}
    }
    assert encoded.retry_after_s == (2.5 if isinstance(error, Overloaded) else None)


def test_null_members_of_an_envelope_are_sent() -> None:
    assert encode_status(418, "Tea.").to_json() == (
        '{"error":{"message":"Tea.","type":"invalid_request_error","param":null,"code":null}}'
    )


def test_our_own_faults_are_server_errors() -> None:
    assert encode_status(500, "x").error.type == "server_error"
