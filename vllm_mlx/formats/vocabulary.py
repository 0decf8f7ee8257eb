"""Knows the tags that a reply's parser looks for, and in which state of the reply each counts."""

import json
import re
from collections.abc import Iterable
from functools import cached_property, lru_cache

from .bodies.message_header import without_header
from .family import Opening, Place, ReasoningFormat, ToolFormat

# Lone surrogates: decoded text contains none, and every scanner reads them as ordinary characters.
_FIRST = 0xDC80
_MAX_TOKENS = 0xDFFF - _FIRST
_CODED = re.compile(f"[{chr(_FIRST)}-\udfff]")
# Tags that are also common in the XML and HTML that a model writes for its user.
_COMMON = frozenset({"<invoke", "</invoke>", "<parameter", "</parameter>", "<function", "</function>", "<param"})
_COMMON |= {"</param>", "<function name=", "<tools>", "</tools>"}
# Signs that begin a tag, and those that complete it. A tag without such an end may have a name behind it.
_BEGINS, _ENDS = tuple("<[]|｜⟦⟧⟨⟩⟪⟫【】〈〉《》「」『』〔〕«»"), tuple(">]⟧⟩⟫】〉》」』〕»")
_CLOSERS = frozenset("}])")  # a model may write one too many behind a call
# The rest of a tag after its beginning: a name, and the end of the tag.
_HEAD = r"""(?:\s+[a-z]+=)?["']?([A-Za-z0-9_.:-]+)["']?(?:\s+[a-z]+=["']?\w*["']?)*\s*>"""
_BEHIND_TAG = re.compile(_HEAD)
_PART_OF_HEAD = re.compile(r"""[\sA-Za-z0-9_.:="'-]{0,64}""")


class TokenCodec:
    """Represents each known token by one private character, so that tags with tokens never match plain text.

    `encode` returns a tag in the form in which the parser finds it, `piece` a token in the form in which it is fed,
    and `decode` the text that was written.
    """

    def __init__(self, tokens: frozenset[str]):
        self.tokens = tokens
        self._char_of = {token: chr(_FIRST + at) for at, token in enumerate(sorted(tokens)[:_MAX_TOKENS])}
        self._text_of = {char: token for token, char in self._char_of.items()}
        longest_first = sorted(self._char_of, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def encode(self, tag: str) -> str:
        return self._pattern.sub(lambda match: self._char_of[match.group()], tag) if self._pattern else tag

    def piece(self, token: str) -> str:
        return self._char_of.get(token, token)

    def decode(self, text: str) -> str:
        if not self._char_of or text.isascii():
            return text
        return _CODED.sub(lambda match: self._text_of.get(match.group(), match.group()), text)

    def decode_json(self, text: str) -> str:
        """Decode JSON text, where a token can only be part of a string."""
        if not self._char_of or text.isascii():
            return text
        return _CODED.sub(lambda match: json.dumps(self._text_of.get(match.group(), match.group()))[1:-1], text)

    def num_chars(self, text: str) -> int:
        return len(text) if text.isascii() else len(self.decode(text))

    def is_coded(self, tag: str) -> bool:
        return _CODED.search(tag) is not None


class TagVocabulary:
    """The tags of replies in given formats, as the codec encodes them. Immutable, so that replies share it."""

    def __init__(
        self,
        reasoning: ReasoningFormat | None,
        tools: tuple[ToolFormat, ...],  # a tag that several formats have belongs to the first
        codec: TokenCodec,
        *,
        has_schemas: bool,
    ):
        self._reasoning = reasoning
        self._tools = tools
        self._has_schemas = has_schemas
        self.codec = codec
        self.may_call = bool(tools)
        self.markers = codec.tokens.union(_tags(reasoning, tools))
        self.openings: dict[str, Opening] = {}
        for opening in _openings(reasoning, tools):
            if has_schemas or not opening.needs_tools:
                self.openings.setdefault(codec.encode(opening.marker), opening)
        self.reasoning_opens = frozenset(map(codec.encode, reasoning.opens if reasoning else ()))
        self.reasoning_closes = frozenset(map(codec.encode, reasoning.closes if reasoning else ()))
        self.closes = tuple(dict.fromkeys(codec.encode(close) for format in tools for close in format.closes))
        self.drops = frozenset(codec.encode(tag) for format in tools for tag in format.drops)
        self.wrap = tuple(map(codec.encode, reasoning.wrap)) if reasoning and reasoning.wrap else ()
        self.enclosing = (*self.closes, *self._at(Place.ANYWHERE))
        native = tuple(format for format in tools if not format.is_fallback)
        own = [tag for tag in (*_inner(reasoning), *(tag for format in native for tag in format.tags)) if _is_tag(tag)]
        openings = _openings(reasoning, native)
        self.native = frozenset(codec.encode(opening.marker) for opening in openings)
        self.tagged = frozenset(codec.encode(one.marker) for one in openings if one.place is Place.ANYWHERE)
        """The tags of the model's own format that begin a call or a message wherever they occur."""
        self._headers = frozenset(codec.encode(header.marker) for header in (reasoning.headers if reasoning else ()))
        self._has_messages = reasoning is not None and bool(reasoning.header_tags)
        self.strays = frozenset(map(codec.encode, (tag for tag in own if tag not in _COMMON))) - self.openings.keys()
        """Tags of the model's own format that are dropped wherever they occur, unless the model quotes them."""
        self._inside = _CLOSERS.union(map(codec.encode, own)) - self.openings.keys()
        longest_first = sorted(map(codec.encode, own), key=len, reverse=True)
        tails = (re.escape(tag) + ("" if tag.endswith(_ENDS) else rf"(?:{_HEAD}|\s*>?)") for tag in longest_first)
        self._own = re.compile("|".join(tails) or r"(?!)")
        self._set_splitters()

    @cached_property
    def without_fallback(self) -> "TagVocabulary":
        native = tuple(format for format in self._tools if not format.is_fallback)
        return TagVocabulary(self._reasoning, native, self.codec, has_schemas=self._has_schemas)

    def is_dropped(self, marker: str, *, follows_call: bool) -> bool:
        """Return whether this tag of the model's own format is dropped here, unless the model quotes it."""
        return marker in self.strays or (follows_call and marker in self._inside)

    def without_own(self, text: str) -> str:
        """Return the text without the tags of the model's own calls. The names inside of tags stay."""
        return self._own.sub(lambda tag: "".join(name for name in tag.groups() if name), text)

    def end_of(self, marker: str, text: str, *, may_grow: bool = False) -> int | None:
        """Return the end of a tag that `marker` begins, as `text` does; None if the text `may_grow` to a longer tag."""
        if marker.endswith(_ENDS):
            return len(marker)
        if may_grow and _PART_OF_HEAD.fullmatch(text, len(marker)):
            return None
        head = _BEHIND_TAG.match(text, len(marker))
        return len(marker) if head is None else head.end()

    def shown(self, text: str, marker: str) -> str:
        """Return the part that is shown of `text`, which `marker` began and which is not a call.

        It has no tags of the model's own format. It is empty if only punctuation is left, or the header of a message
        that never came.
        """
        if marker in self._headers:
            text = without_header(text, self.codec.encode) if self._has_messages else ""
        rest = self.without_own(text)
        return rest if rest.strip(" \t\r\n[]{},;") else ""

    def _at(self, *places: Place) -> list[str]:
        return [marker for marker, opening in self.openings.items() if opening.place in places]

    def _set_splitters(self) -> None:
        reasoning_tags = [*self.reasoning_opens, *self.reasoning_closes]
        in_text = [*reasoning_tags, *self.closes, *self.drops, *self._at(Place.ANYWHERE, Place.OUTSIDE_REASONING)]
        in_text += self.strays
        self.in_reasoning = MarkerSplitter([*reasoning_tags, *self._at(Place.ANYWHERE)])
        self.in_text = MarkerSplitter(in_text)
        at_start = [*in_text, *self._at(Place.AT_START), *self.wrap[:1]]
        self.at_start = MarkerSplitter(at_start)
        self.behind_call = MarkerSplitter([*at_start, *self._inside])
        self.in_wrap = MarkerSplitter([*in_text, *self.wrap[1:]])
        self.in_call = MarkerSplitter(self.enclosing)
        is_coded = self.codec.is_coded
        ends = [tag for tag in self.enclosing if is_coded(tag)]
        self.ends_call = MarkerSplitter(ends) if ends else None
        ends += [tag for tag in reasoning_tags if is_coded(tag)]
        self.ends_unnamed_call = MarkerSplitter(ends) if ends else None


@lru_cache(maxsize=256)
def tag_vocabulary(
    reasoning: ReasoningFormat | None, tools: tuple[ToolFormat, ...], tokens: frozenset[str], *, has_schemas: bool
) -> TagVocabulary:
    """Return the vocabulary for a tokenizer with these added tokens."""
    written = "\n\n".join(_tags(reasoning, tools))
    known = frozenset(token for token in tokens if len(token) > 2 and token in written and not _is_words(token))
    return TagVocabulary(reasoning, tools, TokenCodec(known), has_schemas=has_schemas)


def _tags(reasoning: ReasoningFormat | None, tools: tuple[ToolFormat, ...]) -> tuple[str, ...]:
    return (*(reasoning.tags if reasoning else ()), *(tag for format in tools for tag in format.tags))


def _openings(reasoning: ReasoningFormat | None, tools: tuple[ToolFormat, ...]) -> tuple[Opening, ...]:
    return (*(reasoning.headers if reasoning else ()), *(opening for format in tools for opening in format.openings))


def _inner(reasoning: ReasoningFormat | None) -> tuple[str, ...]:
    """Return the tags inside headers and those around an answer."""
    return (*reasoning.header_tags, *(reasoning.wrap or ())) if reasoning else ()


def _is_tag(text: str) -> bool:
    """Return whether the text is a tag rather than punctuation that a format shares with every text."""
    return len(text) > 3 and text.startswith(_BEGINS)


def _is_words(token: str) -> bool:
    """Return whether the token is plain words or white space, which do not identify a tag."""
    return not token.strip() or token.strip().isalnum()


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
