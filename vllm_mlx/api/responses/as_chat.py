"""Decodes bodies in the form of Responses that come to chat completions. They are answered as chat completions.

Cursor sends them to any server whose address its user sets, and reads the answer as a chat completion.
"""

from dataclasses import replace
from typing import Annotated, Any

from pydantic import Discriminator, Tag

from ...core.errors import InvalidParameter
from ..openai.decode import ReplySpec, reasoning_mode, usage_fields
from ..openai.schema import ChatCompletionBody, StreamOptions
from ..parameters import Decoded
from ..wire import ExtraFields, Refused
from .decode import decode_response
from .schema import BODY_FIELDS, ResponsesBody

_NAMED_OTHERWISE = {
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}


def _refusal(name: str) -> Refused:
    if name == "messages":
        return Refused("It is empty: leave it out.", beside="input")
    if name in _NAMED_OTHERWISE:
        return Refused(f"Its name is `{_NAMED_OTHERWISE[name]}` there.", beside="input")
    return Refused("It belongs to a body with `messages`.", beside="input")


_CHAT_FIELDS = [name for name in ChatCompletionBody.model_fields if name not in ResponsesBody.model_fields]
_EXTRAS: ExtraFields = {**BODY_FIELDS, **{name: _refusal(name) for name in _CHAT_FIELDS}}


class ResponsesAsChatBody(ResponsesBody):
    extras = _EXTRAS
    stream_options: StreamOptions | None = None


def _form_of(body: Any) -> str:
    """Return the form of a body. With messages it is a chat, which refuses `input`. A null counts as absent."""
    if isinstance(body, dict):
        has_input = body.get("input") is not None and not body.get("messages")
        return "form of responses" if has_input else "form of chat"
    return "form of responses" if isinstance(body, ResponsesAsChatBody) else "form of chat"


AnyChatBody = Annotated[
    Annotated[ChatCompletionBody, Tag("form of chat")] | Annotated[ResponsesAsChatBody, Tag("form of responses")],
    Discriminator(_form_of),
]


def decode_responses_as_chat(
    body: ResponsesAsChatBody,
    *,
    reply_id: str,
    model: str,
    created: int,
    separate_reasoning: bool = True,
    searches: bool = False,
) -> Decoded[ReplySpec]:
    """Decode like `decode_chat`. Nothing is stored, so what needs a stored response is refused."""
    for name in ("store", "background", "previous_response_id"):
        if getattr(body, name):
            raise InvalidParameter(
                f"`{name}` needs stored responses: send this body to /v1/responses, or send the complete input "
                f"without `{name}`.",
                param=name,
            )
    mode = reasoning_mode(separate_reasoning)
    stateless = body.model_copy(update={"store": False})
    found = decode_response(stateless, reply_id=reply_id, model=model, created_at=created, searches=searches)
    reply = ReplySpec(
        reply_id=reply_id,
        model=model,
        created=created,
        stream=bool(body.stream),
        **usage_fields(body.stream_options, bool(body.stream)),
        logprobs=found.request.sampling.logprobs is not None,
        reasoning=mode,
        custom_tools=found.reply.tools.custom,
        search=None if found.reply.search is None else replace(found.reply.search, is_shown=False),
        left_out=found.reply.left_out,
    )
    request = replace(found.request, fills_content=False) if mode == "inline" else found.request
    return Decoded(requests=(request,), reply=reply)
