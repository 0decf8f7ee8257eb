"""Reads lists of arguments that are written as literals, as in Python, and returns them as JSON."""

import json
import math
import re
from dataclasses import dataclass
from enum import Enum, auto

from .body import skip_white
from .json_scanner import MAX_DEPTH, json_value, quoted

_CONSTANTS = {
    "True": "true", "true": "true", "False": "false", "false": "false",
    "None": "null", "null": "null", "none": "null",
}  # fmt: skip
_WHITE = re.compile(r"\s+")
_WORD = re.compile(r"[^\s,:=(){}\[\]\"']+")
_KEY = re.compile(r"[^\s,:=(){}\[\]\"'<>]{1,256}")
_PLAIN = re.compile(r"[^\\\"'<\x00-\x1f\ud800-\udfff]+")
_NUMBER = re.compile(r"[-+]?(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?\Z", re.ASCII)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_HEX_LENGTH = {"x": 2, "u": 4, "U": 8}
_MAX_WORD = 1024
_MAX_MARGIN = 64  # characters of white space behind a quotation mark, which then ends a string
_BEHIND_STRING = ",:)]}"
_END_SET = "set}"


@dataclass(frozen=True, slots=True)
class Dialect:
    quotes: tuple[str, ...]  # longest first
    assign: str  # between a name and its value in the argument list
    has_escapes: bool = True
    has_words: bool = False  # a word that is not a literal is a string


PYTHON = Dialect(('"""', "'''", '"', "'"), "=")


class _State(Enum):
    KEY = auto()
    ASSIGN = auto()
    VALUE = auto()
    NEXT = auto()
    STRING = auto()
    WORD = auto()


class LiteralScanner:
    """Reads an argument list as JSON, from the character after its opening bracket to `closer`."""

    def __init__(self, dialect: Dialect, closer: str):
        self.done = False
        self.failed = False
        self.has_begun = False  # an argument has a value, or the list is complete
        self._dialect = dialect
        self._closers = [closer]  # closing characters of the open lists and objects
        self._state = _State.KEY
        self._is_after_assign = False
        self._held = ""  # a separator and a key, which are emitted together with their value
        self._brace: int | None = None  # where in the held text the object begins that may still be a set
        self._first = ""  # its first item, as written
        self._quote = ""
        self._is_key = False
        self._word = ""
        self._out = ["{"]

    def take(self) -> str:
        text = "".join(self._out)
        self._out.clear()
        return text

    def add_partial(self, rest: str) -> None:
        """Emit the part of the list that was read, and `rest` if it is part of a string: the reply was cut there."""
        self._release()
        if self._state is _State.WORD:
            constants = [value[: len(self._word)] for key, value in _CONSTANTS.items() if key.startswith(self._word)]
            is_string = self._dialect.has_words and not constants and self._word[:1].isalpha()
            self._out.append(quoted(self._word)[:-1] if is_string else constants[0] if constants else self._word)
        elif self._state is _State.STRING and rest.startswith(self._quote):
            self._out.append('"')
        elif self._state is _State.STRING and not (self._dialect.has_escapes and rest.startswith("\\")):
            self._out.append(quoted(rest)[1:-1])

    def close(self) -> None:
        """Close a list that has no end: it becomes one object. An item that has no value yet is dropped."""
        if self._state is _State.STRING and not self._is_key:
            self._out.append('"')
        elif self._state is _State.WORD and (value := _literal(self._word, has_words=self._dialect.has_words)):
            self._release()
            self._out.append(value)
        self._release_brace()
        while self._closers:
            self._out.append("]" if self._in_array else "}")
            self._closers.pop()
        self.done = True

    def consume(self, text: str, start: int = 0, *, final: bool = False) -> int:
        position = start
        while position < len(text) and not (self.done or self.failed):
            before = position, self._state
            match self._state:
                case _State.STRING:
                    position = self._read_string(text, position, final)
                case _State.WORD:
                    position = self._read_word(text, position)
                case _:
                    white = _WHITE.match(text, position)
                    position = white.end() if white else self._read_structure(text, position, final)
            if before == (position, self._state):
                break  # more text is needed to decide
        return position

    def _read_structure(self, text: str, position: int, final: bool) -> int:
        char = text[position]
        may_close = self._state in (_State.NEXT, _State.KEY, _State.VALUE) and not self._is_after_assign
        if self._state is _State.ASSIGN and self._brace is not None and char in ",}":
            self._begin_set(self._brace)
            return position
        if char == self._closers[-1][-1] and may_close:
            return self._close(position)
        match self._state:
            case _State.NEXT if char == ",":
                self._state = _State.VALUE if self._in_array else _State.KEY
                self._held = ", "
                return position + 1
            case _State.KEY:
                return self._read_key(text, position, final)
            case _State.ASSIGN if char == self._assign:
                self._held += ": "
                self.has_begun = True
                self._state = _State.VALUE
                self._is_after_assign = True
                return position + 1
            case _State.VALUE:
                return self._read_value(text, position, final)
        self.failed = True
        return position

    @property
    def _in_array(self) -> bool:
        return self._closers[-1] in ("]", ")", _END_SET) and len(self._closers) > 1

    @property
    def _assign(self) -> str:
        return ":" if len(self._closers) > 1 else self._dialect.assign

    def _begin_set(self, brace: int) -> None:
        """Begin a list instead of an object, because the first key has no value."""
        item = _literal(self._first, has_words=False) if self._first else None
        if self._first and item is None:
            self.failed = True
            return
        self._out += [self._held[:brace], "[", item or self._held[brace + 1 :]]
        self._held, self._brace = "", None
        self._closers[-1] = _END_SET
        self._end_value()

    def _release_brace(self) -> None:
        """Emit the beginning of an object, without a key that has no value."""
        if self._brace is not None:
            self._out.append(self._held[: self._brace + 1])
            self._held, self._brace = "", None

    def _close(self, position: int) -> int:
        self._release_brace()
        self._out.append("]" if self._in_array else "}")
        self._closers.pop()
        self._held = ""
        self.has_begun = True
        self.done = not self._closers
        self._end_value()
        return position + 1

    def _end_value(self) -> None:
        self._state = _State.NEXT
        self._is_after_assign = False

    def _release(self) -> None:
        self._out.append(self._held)
        self._held, self._brace = "", None

    def _write(self, text: str) -> None:
        """Add to the current string."""
        if self._is_key:
            self._held += text
        else:
            self._out.append(text)

    def _read_key(self, text: str, position: int, final: bool) -> int:
        quote = self._quote_at(text, position, final)
        if quote is None:
            return position
        if quote and len(self._closers) + bool(self._dialect.has_words) > 1:
            return self._begin_string(quote, position, is_key=True)
        key = _KEY.match(text, position)
        if key is None:
            self.failed = True
            return position
        if key.end() == len(text) and not final:
            return position
        self._first = key.group()
        self._held += quoted(self._first)
        self._state = _State.ASSIGN
        return key.end()

    def _read_value(self, text: str, position: int, final: bool) -> int:
        quote = self._quote_at(text, position, final)
        if quote is None:
            return position
        if quote:
            return self._begin_string(quote, position, is_key=False)
        char = text[position]
        if char in "[{(" and (char != "(" or not self._dialect.has_words):
            if len(self._closers) >= MAX_DEPTH:
                self.failed = True
                return position
            if char == "{":
                self._brace, self._first = len(self._held), ""
                self._held += char
            else:
                self._release()
                self._out.append("[")
            self._closers.append({"[": "]", "{": "}", "(": ")"}[char])
            self._state = _State.KEY if char == "{" else _State.VALUE
            self._is_after_assign = False
            return position + 1
        if _WORD.match(text, position) is None:
            self.failed = True
            return position
        self._state = _State.WORD
        self._word = ""
        return position

    def _quote_at(self, text: str, position: int, final: bool) -> str | None:
        """Return the quote that begins here, or "" without one, or None if more text is needed to decide."""
        for quote in self._dialect.quotes:
            if text.startswith(quote, position):
                return quote
            if not final and quote.startswith(text[position:]):
                return None
        return ""

    # Strings

    def _begin_string(self, quote: str, position: int, *, is_key: bool) -> int:
        if not is_key:
            self._release()
        self._quote = quote
        self._is_key = is_key
        self._state = _State.STRING
        self._write('"')
        return position + len(quote)

    def _read_string(self, text: str, position: int, final: bool) -> int:
        if plain := _PLAIN.match(text, position):
            self._write(plain.group())
            return plain.end()
        ends = self._ends_string(text, position, final)
        if ends is None:
            return position
        if ends:
            self._write('"')
            if self._is_key:
                self._state = _State.ASSIGN
            else:
                self._end_value()
            return position + len(self._quote)
        if not final and self._quote.startswith(text[position:]):
            return position
        if text[position] == "\\" and self._dialect.has_escapes:
            return self._read_escape(text, position, final)
        self._write(quoted(text[position])[1:-1])
        return position + 1

    def _ends_string(self, text: str, position: int, final: bool) -> bool | None:
        """Return whether a quotation mark here ends the string: punctuation follows it. None if more text is needed."""
        if not text.startswith(self._quote, position):
            return False
        end = position + len(self._quote)
        behind = skip_white(text, end)
        if len(self._quote) > 1 or behind - end > _MAX_MARGIN or "\ud800" <= self._quote <= "\udfff":
            return True
        if behind == len(text):
            return True if final else None
        return text[behind] in _BEHIND_STRING

    def _read_escape(self, text: str, position: int, final: bool) -> int:
        if position + 1 == len(text):
            return position
        char = text[position + 1]
        length = _HEX_LENGTH.get(char, 0)
        digits = text[position + 2 : position + 2 + length]
        if length and all(digit in "0123456789abcdefABCDEF" for digit in digits):
            if len(digits) < length:
                return position
            code = int(digits, 16)
            if code <= 0x10FFFF:
                self._write(f"\\u{code:04x}" if length == 4 else json.dumps(chr(code))[1:-1])
                return position + 2 + length
        written = _ESCAPES.get(char, char if char in "\\\"'" else "\\" + char)
        self._write(quoted(written)[1:-1])
        return position + 2

    # Words: numbers, constants and, in some dialects, strings without quotes

    def _read_word(self, text: str, position: int) -> int:
        if part := _WORD.match(text, position):
            self._word += part.group()
            self.failed = len(self._word) > _MAX_WORD
            return part.end()
        if self._dialect.has_words and text[position] not in ",]}":
            self._word += text[position]
            self.failed = len(self._word) > _MAX_WORD
            return position + 1
        value = _literal(self._word, has_words=self._dialect.has_words)
        if value is None:
            self.failed = True
        else:
            self._release()
            self._out.append(value)
            self._end_value()
        return position


def python_value(text: str) -> str | None:
    """Return the JSON of one value that is written as in Python, or None."""
    scanner = LiteralScanner(PYTHON, ")")
    written = f"v={text})"
    is_whole = scanner.consume(written, final=True) == len(written) and scanner.done
    return scanner.take()[len('{"v": ') : -1] if is_whole else None


def _literal(word: str, *, has_words: bool) -> str | None:
    word = word.strip()
    if word in _CONSTANTS:
        return _CONSTANTS[word]
    if _NUMBER.match(word):
        plain = word.lstrip("+").replace("_", "")
        if (value := json_value(plain)) is not None:
            return value
        number = float(plain)
        if math.isfinite(number):
            return json.dumps(int(number) if number.is_integer() and abs(number) < 2**53 else number)
    return quoted(word) if has_words else None
