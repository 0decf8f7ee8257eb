"""The tags that a reply's parser looks for, and in which state of the reply each counts. Knows no call body."""

import re
from collections.abc import Iterable
from functools import lru_cache

from .codec import TokenCodec, tokens_in
from .family import Opening, Place, ReasoningFormat, ToolFormat


@lru_cache(maxsize=256)
def _tokens_in(tags: tuple[str, ...], tokens: frozenset[str]) -> frozenset[str]:
    return tokens_in(tags, tokens)


class TagVocabulary:
    """The tags of one reply. `tokens`: the tokenizer's added tokens.

    None: they are unknown until a tag arrives as a token; then all tags of its format are looked for as tokens.
    """

    def __init__(
        self,
        reasoning: ReasoningFormat | None,
        tools: tuple[ToolFormat, ...],  # a tag that several formats have belongs to the first
        tokens: frozenset[str] | None,
        *,
        has_schemas: bool,
    ):
        self._reasoning = reasoning
        self._tools = tools
        self._has_schemas = has_schemas
        self._learns = tokens is None
        tags = (*(reasoning.tags if reasoning else ()), *(tag for format in tools for tag in format.tags))
        known = _tokens_in(tags, tokens) if tokens is not None else frozenset()
        self.codec = TokenCodec(known)
        self.markers = frozenset(tags) | known
        self._encode()

    def piece(self, text: str) -> str:
        """Encode the text of an added token."""
        if self._learns and text in self.markers and text not in self.codec:
            self._learn(text)
        return self.codec.piece(text)

    def drop_fallback(self) -> None:
        if any(format.is_fallback for format in self._tools):
            self._tools = tuple(format for format in self._tools if not format.is_fallback)
            self._encode()

    def is_native(self, opening: Opening) -> bool:
        return any(opening in format.openings for format in self._tools if not format.is_fallback)

    def _learn(self, tag: str) -> None:
        reasoning = self._reasoning
        if reasoning is not None and tag in (*reasoning.opens, *reasoning.closes):
            self.codec.learn((*reasoning.opens, *reasoning.closes))
        for format in self._tools:
            if not format.is_fallback and tag in (*format.opens, *format.closes):
                self.codec.learn(text for text in (*format.opens, *format.closes) if _is_tag(text))
        self._encode()

    def _encode(self) -> None:
        encode = self.codec.encode
        reasoning = self._reasoning
        headers = reasoning.headers if reasoning else ()
        openings = [*headers, *(opening for format in self._tools for opening in format.openings)]
        self.openings: dict[str, Opening] = {}
        for opening in openings:
            if self._has_schemas or not opening.needs_tools:
                self.openings.setdefault(encode(opening.marker), opening)
        self.reasoning_opens = frozenset(map(encode, reasoning.opens if reasoning else ()))
        self.reasoning_closes = frozenset(map(encode, reasoning.closes if reasoning else ()))
        self.closes = tuple(dict.fromkeys(encode(close) for format in self._tools for close in format.closes))
        self.drops = frozenset(encode(tag) for format in self._tools for tag in format.drops)
        self.wrap = (encode(reasoning.wrap[0]), encode(reasoning.wrap[1])) if reasoning and reasoning.wrap else None
        self.enclosing = (*self.closes, *self._at(Place.ANYWHERE))
        self._set_splitters()

    def _at(self, *places: Place) -> list[str]:
        return [marker for marker, opening in self.openings.items() if opening.place in places]

    def _set_splitters(self) -> None:
        reasoning_tags = [*self.reasoning_opens, *self.reasoning_closes]
        in_text = [*reasoning_tags, *self.closes, *self.drops, *self._at(Place.ANYWHERE, Place.OUTSIDE_REASONING)]
        self.in_reasoning = MarkerSplitter([*reasoning_tags, *self._at(Place.ANYWHERE)])
        self.in_text = MarkerSplitter(in_text)
        self.at_start = MarkerSplitter([*in_text, *self._at(Place.AT_START), *(self.wrap or ())[:1]])
        self.in_wrap = MarkerSplitter([*in_text, *(self.wrap or ())[1:]])
        self.in_call = MarkerSplitter(self.enclosing)
        is_coded = self.codec.is_coded
        ends = [tag for tag in self.enclosing if is_coded(tag)]
        self.ends_call = MarkerSplitter(ends) if ends else None
        ends += [tag for tag in reasoning_tags if is_coded(tag)]
        self.ends_unnamed_call = MarkerSplitter(ends) if ends else None


def _is_tag(text: str) -> bool:
    """Whether a tokenizer may have this text as one token."""
    return re.fullmatch(r"<[^<>]+>|\[[^\[\]]+\]", text) is not None


class MarkerSplitter:
    """Finds markers in a text that still grows."""

    def __init__(self, markers: Iterable[str]):
        self._by_first: dict[str, list[str]] = {}
        for marker in sorted(set(markers), key=len, reverse=True):  # the longest of the markers that begin alike wins
            self._by_first.setdefault(marker[0], []).append(marker)
        firsts = "".join(sorted(self._by_first))
        self._trigger = re.compile(f"[{re.escape(firsts)}]" if firsts else r"(?!)")

    def cut(self, text: str, *, final: bool = False) -> tuple[int, str | None]:
        """Return (end, marker): `text[:end]` contains no marker, and `marker` begins at `end`.

        If `marker` is None, `text[end:]` may still become one. It is empty if the text is `final`.
        """
        hit = self._trigger.search(text)
        while hit is not None:
            start = hit.start()
            for marker in self._by_first[text[start]]:
                if text.startswith(marker, start):
                    return start, marker
                if not final and len(text) - start < len(marker) and marker.startswith(text[start:]):
                    return start, None
            hit = self._trigger.search(text, start + 1)
        return len(text), None
