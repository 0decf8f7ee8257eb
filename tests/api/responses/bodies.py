"""Short ways to decode and to write, as the route does it."""

from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

from vllm_mlx.api.error_replies import HTTPError, OpenAIEnvelope
from vllm_mlx.api.responses.decode import DecodedResponse, decode_response
from vllm_mlx.api.responses.encode import ResponseStream
from vllm_mlx.api.responses.replies import ResponseSpec
from vllm_mlx.api.responses.schema import ResponsesBody
from vllm_mlx.core.errors import VLLMMLXError
from vllm_mlx.core.events import GenerationEvent
from vllm_mlx.core.messages import Message
from vllm_mlx.core.request import Request

from ..streams import alone, fold, stream

TOOL: Any = {"type": "function", "name": "ls", "description": "List.", "parameters": {"type": "object"}}
NAMESPACE: Any = {"type": "namespace", "name": "multi", "tools": [{"type": "function", "name": "wait"}]}


def decoded(**fields: Any) -> DecodedResponse:
    body = ResponsesBody.model_validate({"input": "hi", **fields})
    return decode_response(body, spec())


def decode(**fields: Any) -> Request:
    return decoded(**fields).request


def conversation(*items: Any, **fields: Any) -> tuple[Message, ...]:
    messages = decode(input=list(items), **fields).messages
    assert messages is not None
    return messages


def refusal(**fields: Any) -> Any:
    """What the client is told, as status 400."""
    encoded = _refused(fields)
    reply: Any = encoded.body
    assert encoded.status == 400
    return reply.error


def _refused(fields: dict[str, Any]) -> HTTPError:
    errors = OpenAIEnvelope(renamed={"messages": "input"})
    try:
        decode(**fields)
    except VLLMMLXError as error:
        return errors.error(error)
    except ValidationError as error:
        return errors.validation(error.errors(), {"input": "hi", **fields})
    raise AssertionError("it was accepted")


def spec(**fields: Any) -> ResponseSpec:
    return ResponseSpec(**{"reply_id": "resp_1", "model": "tiny", "created_at": 5, **fields})


def streamed(events: Iterable[GenerationEvent], **fields: Any) -> bytes:
    return stream(ResponseStream(spec(stream=True, **fields)), alone(events))


def folded(events: Iterable[GenerationEvent], **fields: Any) -> Any:
    return fold(ResponseStream(spec(**fields)), alone(events))
