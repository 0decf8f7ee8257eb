"""How much of a rendered turn a reply's own ids can stand for. Knows the text behind one prompt, no conversation."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from ..core.messages import Message
from ..core.request import Request
from ..formats import SchemaBudget, Schemas, reasoning_markers
from ..output.pipeline import declared_schemas, reply_parser
from ..output.reply import FinishedReply, ReplyBuilder
from ..tokens.detokenizer import context_ids
from ..tokens.tokenizer import Tokenizer
from .echo import is_same


@dataclass(frozen=True, slots=True)
class Splice:
    num_tokens: int  # of the reply
    num_chars: int  # of the text that follows the prompt


NOTHING = Splice(0, 0)


class Splicer:
    """`reasoning`, `tools`: names of the formats that replies are read in."""

    def __init__(self, tokenizer: Tokenizer, *, reasoning: str | None = None, tools: str | None = None):
        self._tokenizer = tokenizer
        self._reasoning = reasoning
        self._tools = tools
        self._thought = () if reasoning is None else reasoning_markers(reasoning)
        texts = sorted(tokenizer.marker_tokens, key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, texts)) or r"(?!)")
        ends = (tokenizer.added_token(token_id) for token_id in tokenizer.eos_token_ids)
        self._ends = frozenset(end[0] for end in ends if end is not None)

    def splice(
        self, rest: str, reply: FinishedReply, request: Request, prompt: Sequence[int], in_reasoning: bool
    ) -> Splice:
        """`rest`: what a rendering says behind `prompt`, to which the reply was given; `in_reasoning`: where that ends.

        The ids may stand for the turn when it says what they say, or when both read as the same reply: then only its
        spacing differs, and the model's own is kept.
        """
        text, end = self._text_and_end(reply, prompt)
        if rest.startswith(text + end):
            return Splice(len(reply.token_ids), len(text) + len(end))
        turn, turn_end = self._turn(rest, end)
        if turn_end:
            schemas = declared_schemas(request, SchemaBudget())
            read = partial(self._read, request=request, schemas=schemas, in_reasoning=in_reasoning)
            written = read(text, end)
            if is_same(written.message, reply.message):
                if written.says_the_same(read(turn, turn_end if end else "")):
                    is_end_same = end == turn_end
                    num_tokens = len(reply.token_ids) - bool(end and not is_end_same)
                    return Splice(num_tokens, len(turn) + len(end) * is_end_same)
                unclosed = self._before_last_tag(turn)
                if not end and written.says_the_same(read(unclosed, "")):
                    return Splice(len(reply.token_ids), len(unclosed))
        if rest.startswith(text):
            return Splice(len(reply.token_ids) - 1, len(text))
        if turn_end and not end and text.startswith(turn.rstrip()):
            return self._start(turn, reply, prompt)
        return NOTHING

    def _text_and_end(self, reply: FinishedReply, prompt: Sequence[int]) -> tuple[str, str]:
        """What the reply's ids say, and the text of the added token that ended it, if one did."""
        ids = reply.token_ids
        added = self._tokenizer.added_token(ids[-1]) if ids else None
        if added is None or added[0] not in self._ends:
            return self._text(ids, prompt), ""
        return self._text(ids[:-1], prompt), added[0]

    def _text(self, token_ids: Sequence[int], prompt: Sequence[int]) -> str:
        context = context_ids(self._tokenizer, prompt)
        return self._tokenizer.decode([*context, *token_ids])[len(self._tokenizer.decode(context)) :]

    def _turn(self, rest: str, end: str) -> tuple[str, str]:
        """The turn's text and the text of the token that ends it; empty where none does."""
        found = [(position, text) for text in {end, *self._ends} if text and (position := rest.find(text)) >= 0]
        if not found:
            return rest, ""
        position, text = min(found)
        return rest[:position], text

    def _start(self, turn: str, reply: FinishedReply, prompt: Sequence[int]) -> Splice:
        """A stop string cut the reply: the tokens that lie wholly before the cut."""
        best, low, high = NOTHING, 1, len(reply.token_ids)
        while low <= high:
            middle = (low + high) // 2
            text = self._text(reply.token_ids[:middle], prompt)
            if turn.startswith(text):
                best, low = Splice(middle, len(text)), middle + 1
            else:
                high = middle - 1
        return best

    def _before_last_tag(self, turn: str) -> str:
        """A reply that may hold one call ends with the call's last character, before the tag that closes it."""
        return turn[: max((added.start() for added in self._added.finditer(turn)), default=0)].rstrip()

    def _read(self, text: str, end: str, request: Request, schemas: Schemas, in_reasoning: bool) -> "_Reading":
        parser = reply_parser(
            self._tokenizer,
            request,
            self._reasoning,
            self._tools,
            starts_in_reasoning=in_reasoning,
            schemas=schemas,
        )
        reply = ReplyBuilder()
        position = 0
        added_texts = []
        for added in self._added.finditer(text):
            added_texts.append(added.group())
            reply.feed(parser.feed(text[position : added.start()]))
            reply.feed(parser.feed(added.group(), special=True))
            position = added.end()
        reply.feed(parser.feed(text[position:]))
        if end in parser.markers:
            reply.feed(parser.feed(end, special=True))
        in_reasoning = parser.in_reasoning
        reply.feed(parser.finish())
        return _Reading(reply.message(), tuple(added_texts), tuple(map(text.count, self._thought)), in_reasoning)


@dataclass(frozen=True, slots=True)
class _Reading:
    """A turn's text, as a reply."""

    message: Message
    added: tuple[str, ...]  # added tokens, in order
    num_thoughts: tuple[int, ...]  # tags that open, and that close one
    ends_in_reasoning: bool

    def says_the_same(self, other: "_Reading") -> bool:
        """A thought of nothing at all is no spacing: with its tags or without, a model reads something else."""
        return (
            self.ends_in_reasoning == other.ends_in_reasoning
            and self.added == other.added
            and self.num_thoughts == other.num_thoughts
            and is_same(self.message, other.message)
        )
