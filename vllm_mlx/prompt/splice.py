"""Finds the part of a rendered turn that the ids of a remembered reply can replace. Knows no conversation."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from ..core.messages import Message
from ..core.request import Request
from ..formats import ReplyFormats, SchemaBudget, Schemas
from ..formats.pipeline import declared_schemas, reply_parser
from ..formats.reply import FinishedReply, ReplyBuilder
from ..formats.tokenizer import Tokenizer, context_ids
from .echo import is_same
from .remembered import Boundary


class Splicer:
    """Compares replies with rendered turns. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer, formats: ReplyFormats):
        self._tokenizer = tokenizer
        self._formats = formats
        self._tags = _tags_of_replies(formats)
        self._added = tokenizer.added
        ends = (tokenizer.added_token(token_id) for token_id in tokenizer.eos_token_ids)
        self._ends = frozenset(end[0] for end in ends if end is not None)

    def splice(
        self, rest: str, reply: FinishedReply, request: Request, prompt: Sequence[int], in_reasoning: bool
    ) -> Boundary:
        """Return the end of the part of `rest`, the text after the `prompt`, that the reply's ids can replace.

        They can replace it if their text is the turn's, or if both texts are parsed as the same reply: then
        only spacing differs, or the turn lacks tags that the client did not see, and the model's own text is kept.
        `in_reasoning`: the prompt ends inside reasoning.
        """
        text, end = self._text_and_end(reply, prompt)
        if rest.startswith(text + end):
            return Boundary(len(text) + len(end), len(reply.token_ids))
        turn, turn_end = self._turn(rest, end)
        if turn_end:
            schemas = declared_schemas(request, SchemaBudget())
            read = partial(self._read, request=request, schemas=schemas, in_reasoning=in_reasoning)
            written = read(text, end)
            if is_same(written.message, reply.message):
                if written.says_the_same(read(turn, turn_end if end else "")):
                    is_end_same = end == turn_end
                    num_tokens = len(reply.token_ids) - bool(end and not is_end_same)
                    return Boundary(len(turn) + len(end) * is_end_same, num_tokens)
                unclosed = self._before_last_tag(turn)
                if not end and written.says_the_same(read(unclosed, "")):
                    return Boundary(len(unclosed), len(reply.token_ids))
        if rest.startswith(text):
            return Boundary(len(text), len(reply.token_ids) - 1)
        if turn_end and not end and text.startswith(turn.rstrip()):
            return self._start(turn, reply, prompt)
        return Boundary(0, 0)

    def _text_and_end(self, reply: FinishedReply, prompt: Sequence[int]) -> tuple[str, str]:
        """Return the reply's text, and the text of the end token if the reply ended with one."""
        ids = reply.token_ids
        added = self._tokenizer.added_token(ids[-1]) if ids else None
        if added is None or added[0] not in self._ends:
            return self._text(ids, prompt), ""
        return self._text(ids[:-1], prompt), added[0]

    def _text(self, token_ids: Sequence[int], prompt: Sequence[int]) -> str:
        context = context_ids(self._tokenizer, prompt)
        return self._tokenizer.decode([*context, *token_ids])[len(self._tokenizer.decode(context)) :]

    def _turn(self, rest: str, end: str) -> tuple[str, str]:
        """Return the turn's text, and the text of the token that ends it, empty if there is none."""
        ends = {end, *self._ends} - {""}
        found = [(position, text) for text in ends if (position := rest.find(text)) >= 0]
        found += [(message.start(), message.group()) for message in self._tags.last_message.finditer(rest)][:1]
        if not found:
            return rest, ""
        position, text = min(found)
        return rest[:position], text

    def _start(self, turn: str, reply: FinishedReply, prompt: Sequence[int]) -> Boundary:
        """Return the end of the ids that lie within the turn, which ends where a stop string cut the reply."""
        best, low, high = Boundary(0, 0), 1, len(reply.token_ids)
        while low <= high:
            middle = (low + high) // 2
            text = self._text(reply.token_ids[:middle], prompt)
            if turn.startswith(text):
                best, low = Boundary(len(text), middle), middle + 1
            else:
                high = middle - 1
        return best

    def _before_last_tag(self, turn: str) -> str:
        """Return the turn without its last tag: a reply limited to one call ends before the closing tag of the call."""
        parts = self._added.parts(turn)
        last = max((at for at, part in enumerate(parts) if part in self._added.ids), default=0)
        return "".join(parts[:last]).rstrip()

    def _read(self, text: str, end: str, request: Request, schemas: Schemas, in_reasoning: bool) -> "_Reading":
        parser = reply_parser(
            self._tokenizer, request, self._formats, starts_in_reasoning=in_reasoning, schemas=schemas
        )
        reply, parts, ids = ReplyBuilder(), self._added.parts(text), self._added.ids
        for part in parts:
            reply.feed(parser.feed(part, special=part in ids))
        if end in parser.markers:
            reply.feed(parser.feed(end, special=True))
        in_reasoning = parser.in_reasoning
        reply.feed(parser.finish(is_end=bool(end)))
        added = tuple(part for part in parts if part in ids)
        return _Reading(reply.message(), added, in_reasoning, text, self._tags)


@dataclass(frozen=True, slots=True)
class _Tags:
    """The tags of replies."""

    reasoning: tuple[str, ...]  # begin or end reasoning: a model reads them even if the reasoning is empty
    others: str  # all others, joined: they surround answers and calls
    last_message: re.Pattern[str]  # the end of a separate message that no other message of the reply follows


def _tags_of_replies(formats: ReplyFormats) -> _Tags:
    calls = None if formats.calls is None else formats.calls.reads
    format = formats.reasoning or (None if calls is None else calls.reasoning)
    of_calls = () if calls is None else calls.tags
    if format is None:
        return _Tags((), "\0".join(of_calls), re.compile(r"(?!)"))
    bounds = format.bounds
    num_pairs = len(bounds.starts)
    headers = () if format.headed else tuple(header.marker for header in format.headers)
    lead, end = bounds.header.lead, bounds.ends[0]
    return _Tags(
        tuple(tag for tag in (*bounds.starts, *bounds.ends[:num_pairs], *headers) if tag not in of_calls),
        "\0".join((*of_calls, *bounds.ends[num_pairs:], *(format.wrap or ()), *format.header_tags)),
        re.compile(f"{re.escape(end)}(?!{re.escape(lead)})" if lead else r"(?!)"),
    )


@dataclass(frozen=True, slots=True)
class _Reading:
    """A turn's text, parsed as a reply."""

    message: Message
    added: tuple[str, ...]  # the texts of its added tokens, in order
    ends_in_reasoning: bool
    text: str
    tags: _Tags

    def says_the_same(self, other: "_Reading") -> bool:
        """Return whether `other` differs in spacing alone, or lacks tags around answers and calls.

        It lacks them if the client got the reply without them: a call as text, or a text that looks like a tag.
        """
        return (
            self.ends_in_reasoning == other.ends_in_reasoning
            and all(self.text.count(tag) == other.text.count(tag) for tag in self.tags.reasoning)
            and self._lacks_only_tags(other)
            and is_same(self.message, other.message)
        )

    def _lacks_only_tags(self, other: "_Reading") -> bool:
        """Return whether the added tokens of `other` are those of this text, except tags around answers and calls."""
        position = 0
        for token in self.added:
            if other.added[position : position + 1] == (token,):
                position += 1
            elif token not in self.tags.others:
                return False
        return position == len(other.added)
