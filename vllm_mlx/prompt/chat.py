"""Conversation → ids, such that a prompt extends the prompt and reply that it continues. Any thread may call it."""

import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..core.deadline import Deadline
from ..core.messages import Message
from ..core.request import Request
from ..output.reply import FinishedReply
from ..tokens.tokenizer import Tokenizer
from .encoded import Base, Encoded, common_prefix, encode
from .reply_memory import Recalled, Remembered, ReplyMemory, TextDigest
from .splice import Splicer
from .template import ChatTemplate

CheckLength = Callable[[str, Base | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    request: Request  # its replies as they were given, not as the client sent them back
    key: bytes  # in the memory, of all the messages before the reply
    text: str
    token_ids: tuple[int, ...]
    base: Base | None = None
    marks: tuple[tuple[int, int], ...] = ()  # (characters, tokens): boundaries in the prompt, ascending
    image_starts: tuple[int, ...] = ()  # characters


class ChatPrompts:
    """A reply stands in later prompts with its own ids, wherever the template still says what they say."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        splicer: Splicer,
        memory: ReplyMemory,
        check_length: CheckLength | None = None,
    ):
        """`check_length` refuses a text that is too long before it is tokenised."""
        self._tokenizer = tokenizer
        self._template = template
        self._splicer = splicer
        self._memory = memory
        self._check_length = check_length

    def build(self, request: Request, deadline: Deadline | None = None) -> tuple[ChatPrompt, Encoded]:
        """Raises TemplateError where the template refuses the conversation, and what the deadline raises."""
        check = (deadline or Deadline(math.inf, "")).check
        recalled = self._recall(request)
        request = replace(request, messages=recalled.messages)
        check()
        rendered = self._template.rendering(request)
        check()
        text = rendered.text
        entry = recalled.longest(text)
        base = None if entry is None else self._base(entry, text, request)
        if self._check_length is not None:
            self._check_length(text, base)
        check()
        encoded = encode(self._tokenizer, text, base)
        check()
        prompt = ChatPrompt(
            request=request,
            key=recalled.key,
            text=text,
            token_ids=encoded.token_ids,
            base=encoded.base,
            image_starts=rendered.image_starts,
        )
        return prompt, encoded

    def remember(self, prompt: ChatPrompt, reply: FinishedReply, *, starts_in_reasoning: bool) -> None:
        """A reply that was cut inside a call is not what any client sends back."""
        if reply.is_complete and reply.token_ids:
            self._memory.add(_entry(prompt, reply, starts_in_reasoning), prompt.token_ids)

    def common_tokens(
        self, prompt: ChatPrompt, reply: FinishedReply, later: Request, end: str, in_reasoning: bool
    ) -> int:
        """How many ids of prompt + reply the prompt of a `later` request begins with, up to the text `end`.

        Raises TemplateError where the template refuses that request.
        """
        entry = _entry(prompt, reply, in_reasoning)
        text = self._template.render(later)
        text = text[: text.find(end)] if end in text else text
        if not text.startswith(prompt.text):
            return entry.mark(common_prefix(prompt.text, text))[1]
        encoded = encode(self._tokenizer, text, self._base(entry, text, later))
        return common_prefix((*prompt.token_ids, *reply.token_ids), encoded.token_ids)

    def _recall(self, request: Request) -> Recalled:
        """A message that the reply is to go on with stays as the client sent it."""
        assert request.messages is not None
        tools = (*request.tools, *request.unlisted_tools)
        if not request.continue_final_message:
            return self._memory.recall(request.cache_salt, request.messages, tools)
        recalled = self._memory.recall(request.cache_salt, request.messages[:-1], tools)
        return replace(recalled, messages=(*recalled.messages, request.messages[-1]))

    def _base(self, entry: Remembered, text: str, request: Request) -> Base | None:
        """Of a text that begins with the entry's prompt."""
        rest = text[entry.text_length :]
        splice = self._splicer.splice(rest, entry.reply, request, entry.tail[-8:], entry.starts_in_reasoning)
        if splice.num_tokens:
            return Base(entry, entry.text_length + splice.num_chars, entry.num_prompt_tokens + splice.num_tokens)
        return self._last_added(entry, text)

    def _last_added(self, entry: Remembered, text: str) -> Base | None:
        """Up to the prompt's last added token: what follows one is tokenised the same, whatever stands before it."""
        for index in range(len(entry.tail) - 1, -1, -1):
            added = self._tokenizer.added_token(entry.tail[index])
            if added is not None:
                position = text.rfind(added[0], entry.base_chars, entry.text_length)
                if position < 0:
                    return None
                return Base(entry, position + len(added[0]), entry.base_tokens + index + 1)
        return None


def full_message(request: Request, reply: Message) -> Message:
    """What a conversation holds of a reply: with the start that the client gave, where it gave one."""
    if not request.continue_final_message or not request.messages:
        return reply
    return replace(request.messages[-1], parts=(*request.messages[-1].parts, *reply.parts))


def _entry(prompt: ChatPrompt, reply: FinishedReply, starts_in_reasoning: bool) -> Remembered:
    base = prompt.base
    num_base = 0 if base is None else base.num_tokens
    return Remembered(
        key=prompt.key,
        text_length=len(prompt.text),
        text_digest=TextDigest(prompt.text).value(),
        base=None if base is None else base.entry,
        base_chars=0 if base is None else base.num_chars,
        base_tokens=num_base,
        tail=array("I", prompt.token_ids[num_base:]),
        marks=prompt.marks,
        reply=replace(
            reply, message=full_message(prompt.request, reply.message), token_ids=array("I", reply.token_ids)
        ),
        starts_in_reasoning=starts_in_reasoning,
    )
