"""Distinguishes a token of the tokenizer from the same characters written as text. Knows no format."""

import json
import re
from collections.abc import Iterable

# Lone surrogates: decoded text contains none, and every scanner reads them as ordinary characters.
_FIRST = 0xDC80
_MAX_TOKENS = 0xDFFF - _FIRST
_CODED = re.compile(f"[{chr(_FIRST)}-\udfff]")


class TokenCodec:
    """Represents each known token by one private character, so that tags with tokens never match plain text.

    `encode` returns a tag as the parser will meet it, `piece` a token as it is fed, `decode` the text that was written.
    """

    def __init__(self, tokens: Iterable[str] = ()):
        self._char_of: dict[str, str] = {}
        self._text_of: dict[str, str] = {}
        self._pattern: re.Pattern[str] | None = None
        self.learn(sorted(tokens))

    def __contains__(self, token: str) -> bool:
        return token in self._char_of

    def learn(self, tokens: Iterable[str]) -> None:
        for token in tokens:
            if token not in self._char_of and len(self._char_of) < _MAX_TOKENS:
                char = chr(_FIRST + len(self._char_of))
                self._char_of[token] = char
                self._text_of[char] = token
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


def is_private(char: str) -> bool:
    """Whether this character stands for a token."""
    return chr(_FIRST) <= char <= chr(_FIRST + _MAX_TOKENS)


def tokens_in(tags: Iterable[str], tokens: Iterable[str]) -> frozenset[str]:
    """Return the tokens that tags are written with, but for plain words and white space, which identify no tag."""
    written = "\n\n".join(tags)
    return frozenset(token for token in tokens if len(token) > 2 and token in written and not _is_words(token))


def _is_words(token: str) -> bool:
    return not token.strip() or token.strip().isalnum()
