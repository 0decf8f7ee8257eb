"""Errors → statuses, and the envelopes of OpenAI and Anthropic."""

import json

from vllm_mlx.api.error_replies import ANTHROPIC
from vllm_mlx.core.errors import (
    ContextLengthExceeded,
)


def test_a_prompt_that_is_too_long_is_said_in_the_words_that_make_claude_code_compact() -> None:
    encoded = ANTHROPIC.error(ContextLengthExceeded(num_prompt_tokens=33000, max_model_len=32768))
    assert encoded.status == 400
    assert json.loads(encoded.body.to_json())["error"] == {
        "type": "invalid_request_error",
        "message": "prompt is too long: 33000 tokens > 32768 maximum",
    }
