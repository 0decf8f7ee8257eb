"""Short ways to decode and to write, as the route does it."""

from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

from vllm_mlx.api.anthropic.decode import MessageSpec, ThinkingPolicy, decode_messages_request
from vllm_mlx.api.anthropic.encode import MessageStream, message_fold
from vllm_mlx.api.anthropic.schema import MessagesBody
from vllm_mlx.api.error_replies import ANTHROPIC
from vllm_mlx.api.parameters import Decoded
from vllm_mlx.core.errors import VLLMMLXError
from vllm_mlx.core.events import GenerationEvent
from vllm_mlx.core.messages import Message
from vllm_mlx.core.request import Request

from ..streams import alone, fold, stream

HI: Any = [{"role": "user", "content": "hi"}]
TOOL: Any = {"name": "ls", "description": "List.", "input_schema": {"type": "object"}}


def body(fields: dict[str, Any]) -> dict[str, Any]:
    return {"model": "tiny", "max_tokens": 100, "messages": HI, **fields}


def decoded(*, messages_thinking: ThinkingPolicy = "asked", **fields: Any) -> Decoded[MessageSpec]:
    wire = MessagesBody.model_validate(body(fields))
    return decode_messages_request(wire, spec(), messages_thinking=messages_thinking)


def decode(**fields: Any) -> Request:
    return decoded(**fields).request


def conversation(*wire: Any, **fields: Any) -> tuple[Message, ...]:
    messages = decode(messages=list(wire), **fields).messages
    assert messages is not None
    return messages


def refusal(**fields: Any) -> str:
    """What the client is told, as status 400."""
    try:
        decode(**fields)
    except VLLMMLXError as error:
        encoded = ANTHROPIC.error(error)
    except ValidationError as error:
        encoded = ANTHROPIC.validation(error.errors(), body(fields))
    else:
        raise AssertionError("it was accepted")
    reply: Any = encoded.body
    assert encoded.status == 400 and reply.error.type == "invalid_request_error"
    message: str = reply.error.message
    return message


def spec(**fields: Any) -> MessageSpec:
    return MessageSpec(**{"reply_id": "msg_1", "model": "tiny", **fields})


def streamed(events: Iterable[GenerationEvent], **fields: Any) -> bytes:
    return stream(MessageStream(spec(stream=True, **fields), prompt_tokens=20), alone(events))


def folded(events: Iterable[GenerationEvent], **fields: Any) -> Any:
    return fold(message_fold(spec(**fields)), alone(events))
