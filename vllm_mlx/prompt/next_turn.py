"""How much of a prompt and its reply the next prompt can begin with. Asks the template by rendering; keeps nothing."""

import re
from collections.abc import Iterator

from ..core.config import CacheReasoning
from ..core.errors import TemplateError
from ..core.messages import Message, ReasoningPart, ToolCallPart
from ..core.request import Request
from ..output.reply import FinishedReply
from .chat import ChatPrompt, ChatPrompts, full_message
from .points import result_message, user_message, with_messages

_SENTINEL = re.compile("sentinel(0*)")


def kept_tokens(prompts: ChatPrompts, prompt: ChatPrompt, reply: FinishedReply, policy: CacheReasoning) -> int:
    """The length of the longest start of prompt + reply that a next prompt can begin with; it may end in the prompt."""
    num_prompt = len(prompt.token_ids)
    match policy:
        case "keep":
            return num_prompt + len(reply.token_ids)
        case "drop":
            return num_prompt if reply.has_reasoning else num_prompt + len(reply.token_ids)
        case _:
            return _reproduced_tokens(prompts, prompt, reply)


def _reproduced_tokens(prompts: ChatPrompts, prompt: ChatPrompt, reply: FinishedReply) -> int:
    """Render what can follow the reply, at most twice, and compare the ids up to the text that follows."""
    sentinel = _absent(prompt.text, repr(reply.message))
    longest = 0
    for request in _next_requests(prompt.request, full_message(prompt.request, reply.message), sentinel):
        try:
            longest = max(longest, prompts.common_tokens(prompt, reply, request, sentinel))
        except TemplateError:
            continue
    return longest


def _next_requests(request: Request, reply: Message, text: str) -> Iterator[Request]:
    """The requests that can follow: with the reply's reasoning, then without it.

    `text` is the result of every tool call in the reply, or the next question where it has none.
    """
    assert request.messages is not None
    calls = [part for part in reply.parts if isinstance(part, ToolCallPart)]
    following = tuple(result_message(call, text) for call in calls) or (user_message(text),)
    before = request.messages[:-1] if request.continue_final_message else request.messages
    yield with_messages(request, (*before, reply, *following))
    if any(isinstance(part, ReasoningPart) for part in reply.parts):
        parts = tuple(part for part in reply.parts if not isinstance(part, ReasoningPart))
        yield with_messages(request, (*before, Message("assistant", parts), *following))


def _absent(*texts: str) -> str:
    """A text that occurs in none of these: its word, with one more zero than follow the word anywhere in them."""
    runs = (found.group(1) for text in texts for found in _SENTINEL.finditer(text))
    return "sentinel" + "0" * (max(map(len, runs), default=0) + 1)
