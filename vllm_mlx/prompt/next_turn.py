"""What a next turn will contain of a prompt and its reply. Asks the template by rendering; keeps nothing."""

import re

from ..core.config import CacheReasoning
from ..core.errors import TemplateError
from ..output.reply import FinishedReply
from .chat import ChatPrompt, ChatPrompts, full_message
from .points import after_reply

_SENTINEL = re.compile("sentinel(0*)")


class NextTurn:
    def __init__(self, prompts: ChatPrompts):
        self._prompts = prompts

    def kept_tokens(
        self, prompt: ChatPrompt, reply: FinishedReply, policy: CacheReasoning, *, starts_in_reasoning: bool
    ) -> int:
        """Of prompt + reply, the longest run that a next prompt can begin with; it may end inside the prompt."""
        num_prompt = len(prompt.token_ids)
        if policy == "keep":
            return num_prompt + len(reply.token_ids)
        if policy == "drop" and reply.has_reasoning:
            return num_prompt
        if policy == "drop":
            return num_prompt + len(reply.token_ids)
        return self._reproduced(prompt, reply, starts_in_reasoning)

    def _reproduced(self, prompt: ChatPrompt, reply: FinishedReply, starts_in_reasoning: bool) -> int:
        sentinel = _absent(prompt.text, repr(reply.message))
        longest = 0
        message = full_message(prompt.request, reply.message)
        for request in after_reply(prompt.request, message, sentinel):
            try:
                num_tokens = self._prompts.common_tokens(prompt, reply, request, sentinel, starts_in_reasoning)
            except TemplateError:
                continue
            longest = max(longest, num_tokens)
        return longest


def _absent(*texts: str) -> str:
    """A text that occurs in none of these: one more zero than stand behind its word anywhere in them."""
    runs = (found.group(1) for text in texts for found in _SENTINEL.finditer(text))
    return "sentinel" + "0" * (max(map(len, runs), default=0) + 1)
