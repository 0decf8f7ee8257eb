"""Finds the change in a prompt that should have extended the last one of its conversation. Keeps recent prompts."""

import json
import threading
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from sys import getsizeof

from ..core.messages import Message, TextPart, ToolCallPart, ToolResultPart
from ..core.receipt import ChangeCause, Expectation, PromptChange
from ..core.request import Request
from ..formats.reply import FinishedReply
from .echo import calls_of, text_of
from .encoded import common_prefix
from .remembered import ChatPrompt
from .reply_memory import Recent, next_key, text_digest

MAX_PROMPTS = 256
MAX_BYTES = 32 << 20
_FIXED_BYTES = 1024  # the objects of one prompt and its entries in the dictionaries
_DIGEST_BYTES = 64  # one digest and the reference to it
_WINDOW = 64  # tokens that are compared as text, from the first that differs
_LEAST_SHARED = 0.5  # share of its messages by which an earlier prompt is known, if its reply was text alone


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Prompt:
    text: str
    token_ids: "array[int]"
    num_expected: int  # tokens that an unaltered next prompt begins with
    messages: tuple[bytes, ...]  # one digest each
    tools: bytes
    settings: bytes

    @property
    def num_bytes(self) -> int:
        digests = _DIGEST_BYTES * (len(self.messages) + 1)  # and that of its reply
        return _FIXED_BYTES + getsizeof(self.text) + getsizeof(self.token_ids) + digests


@dataclass(frozen=True, slots=True)
class ComparedPrompt:
    """A prompt, its predecessor in the conversation, and the change in between."""

    prompt: _Prompt
    last: _Prompt | None  # None: no predecessor is known
    change: PromptChange | None  # None: the prompt extends its predecessor

    @property
    def expectation(self) -> Expectation:
        num_tokens = 0 if self.last is None else self.last.num_expected
        return Expectation(num_tokens=num_tokens, change=self.change)


class PromptChanges:
    """Compares a prompt with its predecessor: the prompt whose reply it contains. Threads may share it."""

    def __init__(self, decode: Callable[[Sequence[int]], str]):
        self._decode = decode
        self._lock = threading.Lock()
        self._recent: Recent[_Prompt] = Recent(MAX_PROMPTS, MAX_BYTES)

    def compare(self, chat: ChatPrompt) -> ComparedPrompt:
        """Compare a prompt with the last one of its conversation."""
        prompt = _Prompt(
            text=chat.text,
            token_ids=array("I", chat.token_ids),
            num_expected=max((boundary.num_tokens for boundary in chat.boundaries), default=0),
            messages=tuple(next_key(b"", message) for message in _messages(chat)),
            tools=_digest([tool.to_openai() for tool in chat.request.tools]),
            settings=_settings(chat.request),
        )
        with self._lock:
            last = self._last(chat.request, prompt)
        if last is None:
            return ComparedPrompt(prompt, None, None)
        num_common = common_prefix(last.token_ids, prompt.token_ids)
        change = None if num_common >= last.num_expected else self._change(last, prompt, chat, num_common)
        return ComparedPrompt(prompt, last, change)

    def remember(self, compared: ComparedPrompt, chat: ChatPrompt, reply: FinishedReply) -> None:
        """Keep a prompt to compare later ones with. Its predecessor becomes the next to evict."""
        keys = tuple(_reply_keys(chat.request.cache_salt, reply.message))
        if not keys:
            return
        with self._lock:
            prompt = replace(compared.prompt)  # each reply to it makes an entry
            if compared.last is not None and compared.last in self._recent:
                self._recent.retire(compared.last)
            self._recent.remember(prompt, keys)
            self._recent.evict()

    def _last(self, request: Request, prompt: _Prompt) -> _Prompt | None:
        """Return the prompt whose reply is the latest known reply in the conversation."""
        assert request.messages is not None
        for message in reversed(request.messages):
            if message.role != "assistant":
                continue
            keys = _reply_keys(request.cache_salt, message)
            shares = {earlier: _shared(earlier, prompt) for key in keys for earlier in self._recent.find(key)}
            least = 0.0 if calls_of(message) else _LEAST_SHARED
            # Equal replies share a key: the longest of their prompts is the one that the conversation continues.
            best = max(reversed(shares), key=lambda earlier: (shares[earlier], len(earlier.messages)), default=None)
            if best is not None and shares[best] >= least:
                return best
        return None

    def _change(self, last: _Prompt, prompt: _Prompt, chat: ChatPrompt, num_common: int) -> PromptChange:
        # The ids of a reply may be spaced differently than the rendered text, so only text after them is compared.
        was, now = (
            self._decode(ids[num_common : num_common + _WINDOW].tolist()) for ids in (last.token_ids, prompt.token_ids)
        )
        is_text_same = common_prefix(was, now) == min(len(was), len(now))
        if is_text_same:
            num_chars = len(self._decode(chat.token_ids[:num_common]))
        else:
            num_chars = common_prefix(last.text, prompt.text)
        number = _message_at(_messages(chat), chat.text, num_chars)
        return PromptChange(
            cause=ChangeCause.TOKENS if is_text_same else _cause(last, prompt, number),
            num_common_tokens=num_common,
            num_previous_tokens=len(last.token_ids),
            previous_token_id=_at(last.token_ids, num_common),
            token_id=_at(prompt.token_ids, num_common),
            message=number,
            role=None if number is None else _messages(chat)[number].role,
        )


def _cause(last: _Prompt, prompt: _Prompt, number: int | None) -> ChangeCause:
    """Return the cause of a difference in message `number`. Templates write tools before or after the first message.

    A message that was removed looks like a changed one, since another is in its place.
    """
    end = len(last.messages) if number is None else number + 1
    is_same = prompt.messages[:end] == last.messages[:end]
    if last.tools != prompt.tools and (is_same or not number):
        return ChangeCause.TOOLS
    if not is_same:
        return ChangeCause.MESSAGE
    return ChangeCause.SETTINGS if last.settings != prompt.settings else ChangeCause.TEMPLATE


def _message_at(messages: Sequence[Message], text: str, position: int) -> int | None:
    """Return the index of the message that contains `position`, found by searching its texts in the rendered prompt."""
    cursor, found = 0, None
    for number, message in enumerate(messages):
        for words in _words(message):
            start = text.find(words, cursor)
            if start < 0:
                continue
            if start > position:
                return found
            found, cursor = number, start + len(words)
            if cursor > position:
                return found
    return found


def _words(message: Message) -> Iterator[str]:
    for part in message.parts:
        match part:
            case TextPart(text):
                yield text.strip()
            case ToolCallPart(name=name):
                yield name
            case ToolResultPart(content=content):
                yield from (item.text.strip() for item in content if isinstance(item, TextPart))
            case _:
                pass


def _reply_keys(salt: str, message: Message) -> Iterator[bytes]:
    """Yield the keys of a reply: one for each tool call id, which is unique, or else one for its text."""
    calls = calls_of(message)
    text = text_of(message)
    if calls:
        yield from (_digest([salt, "call", call.call_id]) for call in calls)
    elif text:
        yield _digest([salt, "text", text])


def _shared(earlier: _Prompt, later: _Prompt) -> float:
    """Return the share of the earlier prompt's messages that the later prompt also has, from 0 to 1."""
    return (Counter(earlier.messages) & Counter(later.messages)).total() / max(1, len(earlier.messages))


def _messages(chat: ChatPrompt) -> tuple[Message, ...]:
    assert chat.request.messages is not None
    return chat.request.messages


def _settings(request: Request) -> bytes:
    kwargs = sorted((name, repr(value)) for name, value in request.template_kwargs.items())
    return _digest([request.thinking, request.tool_choice.mode, kwargs])


def _digest(value: object) -> bytes:
    return text_digest(json.dumps(value)).digest()


def _at(token_ids: Sequence[int], index: int) -> int | None:
    return token_ids[index] if index < len(token_ids) else None
