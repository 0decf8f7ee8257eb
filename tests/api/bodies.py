"""Short ways to decode and to write, as the routes do it."""

from typing import Any

from pydantic import ValidationError

from vllm_mlx.api.error_replies import OPENAI
from vllm_mlx.api.openai.decode import ReplySpec, decode_chat, decode_completion
from vllm_mlx.api.openai.schema import ChatCompletionBody, CompletionBody
from vllm_mlx.api.parameters import Decoded
from vllm_mlx.core.errors import VLLMMLXError
from vllm_mlx.core.request import Request

HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "ls", "description": "List.", "parameters": {"type": "object"}}}


def decode(**fields: Any) -> Decoded[ReplySpec]:
    body = ChatCompletionBody.model_validate({"messages": HI, **fields})
    return decode_chat(body, spec())


def chat(**fields: Any) -> Request:
    [request] = decode(**fields).requests
    return request


def decode_text(**fields: Any) -> Decoded[ReplySpec]:
    body = CompletionBody.model_validate({"prompt": "Once", **fields})
    return decode_completion(body, spec(reply_id="cmpl-1"))


def completion(**fields: Any) -> Request:
    [request] = decode_text(**fields).requests
    return request


def refusal(decoder: Any, **fields: Any) -> Any:
    """What the client is told, as status 400."""
    try:
        decoder(**fields)
    except VLLMMLXError as error:
        encoded = OPENAI.error(error)
        assert encoded.status == 400
        return encoded.body.error
    except ValidationError as error:
        body = {"messages": HI, "prompt": "Once", **fields}
        return OPENAI.validation(error.errors(), body).body.error
    raise AssertionError("it was accepted")


def spec(**fields: Any) -> ReplySpec:
    return ReplySpec(**{"reply_id": "chatcmpl-1", "model": "tiny", "created": 5, **fields})
