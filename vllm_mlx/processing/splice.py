"""How much of a rendered turn a reply's own ids can stand for. Knows the text behind one prompt, no conversation."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..core.messages import Message
from ..core.request import Request
from .detokenizer import context_ids
from .echo import is_same
from .output import reply_parser
from .reply import Reply, ReplyBuilder
from .tokenizer import Tokenizer


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
        texts = sorted(tokenizer.marker_tokens, key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, texts)) or r"(?!)")
        ends = (tokenizer.added_token(token_id) for token_id in tokenizer.eos_token_ids)
        self._ends = frozenset(end[0] for end in ends if end is not None)

    def splice(self, rest: str, reply: Reply, request: Request, prompt: Sequence[int], in_reasoning: bool) -> Splice:
        """`rest`: what a rendering says behind `prompt`, to which the reply was given; `in_reasoning`: where that ends.

        The ids may stand for the turn when it says what they say, or when both read as the same reply: then only its
        spacing differs, and the model's own is kept.
        """
        text, end = self._text_and_end(reply, prompt)
        if rest.startswith(text + end):
            return Splice(len(reply.token_ids), len(text) + len(end))
        turn, turn_end = self._turn(rest, end)
        if turn_end:
            written = self._read(text, end, request, in_reasoning)
            rendered = self._read(turn, turn_end if end else "", request, in_reasoning)
            if _are_same(written, rendered) and is_same(written[0], reply.message):
                if end == turn_end:
                    return Splice(len(reply.token_ids), len(turn) + len(end))
                return Splice(len(reply.token_ids) - bool(end), len(turn))
        if rest.startswith(text):
            return Splice(len(reply.token_ids) - 1, len(text))
        if turn_end and not end and text.startswith(turn.rstrip()):
            return self._start(turn, reply, prompt)
        return NOTHING

    def _text_and_end(self, reply: Reply, prompt: Sequence[int]) -> tuple[str, str]:
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

    def _start(self, turn: str, reply: Reply, prompt: Sequence[int]) -> Splice:
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

    def _read(self, text: str, end: str, request: Request, in_reasoning: bool) -> tuple[Message, bool]:
        parser = reply_parser(self._tokenizer, request, self._reasoning, self._tools, starts_in_reasoning=in_reasoning)
        reply = ReplyBuilder()
        position = 0
        for added in self._added.finditer(text):
            reply.feed(parser.feed(text[position : added.start()]))
            reply.feed(parser.feed(added.group(), special=True))
            position = added.end()
        reply.feed(parser.feed(text[position:]))
        if end in parser.markers:
            reply.feed(parser.feed(end, special=True))
        is_thinking = parser.in_reasoning
        reply.feed(parser.finish())
        return reply.message(), is_thinking


def _are_same(one: tuple[Message, bool], other: tuple[Message, bool]) -> bool:
    return one[1] == other[1] and is_same(one[0], other[0])
