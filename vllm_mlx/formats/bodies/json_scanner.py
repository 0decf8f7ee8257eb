"""Reads one JSON value from a text that still grows, and returns it as valid JSON."""

import json
import re
from enum import Enum, auto

MAX_DEPTH = 200
_MAX_SCALAR = 4096  # characters of a number; readers of JSON take fewer digits
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SCALAR_PART = re.compile(r"[-+.0-9A-Za-z]+")
_SCALAR = re.compile(r"(?:-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?|true|false|null)\Z", re.ASCII)
_WHITE = re.compile(r"[ \t\r\n]+")
_HEX = frozenset("0123456789abcdefABCDEF")
_CONTROL = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\b": "\\b", "\f": "\\f"}


class _State(Enum):
    VALUE = auto()
    VALUE_OR_END = auto()
    KEY = auto()
    KEY_OR_END = auto()
    COLON = auto()
    COMMA_OR_END = auto()
    STRING = auto()
    QUOTE = auto()  # behind a quotation mark, which ends the string if a comma or a bracket follows
    ESCAPE = auto()
    UNICODE = auto()
    SCALAR = auto()


_MAY_END = (_State.VALUE_OR_END, _State.KEY_OR_END, _State.COMMA_OR_END)
_MAY_BEGIN_VALUE = (_State.VALUE, _State.VALUE_OR_END)
_MAY_BEGIN_KEY = (_State.KEY, _State.KEY_OR_END)


class JsonScanner:
    """Strings may contain raw control characters and unknown escapes, which weak models write.

    Without `is_strict`, they may also contain quotation marks, and a comma may follow the last item.
    """

    def __init__(self, *, is_strict: bool = False) -> None:
        self._is_strict = is_strict
        self.done = False
        self.failed = False
        self._state = _State.VALUE
        self._closers: list[str] = []
        self._is_key = False
        self._partial = ""  # the part of a scalar or an escape that was read, or a quotation mark and white space
        self._held: list[str] = []  # a separator and a key, which are emitted together with their value
        self._out: list[str] = []

    def take(self) -> str:
        """Return the checked text since the last call of this method."""
        text = "".join(self._out)
        self._out.clear()
        return text

    def take_partial(self) -> str:
        """Return text that was read but not yet returned, because the text was cut here."""
        partial = "".join(self._held) + self._partial
        self._held.clear()
        self._partial = ""
        return partial

    def closing(self) -> str:
        """Return the text that completes the value so far. An item that has no value yet is dropped."""
        end = ""
        if self._state is _State.SCALAR and _SCALAR.match(self._partial):
            end = self.take_partial()
        elif self._state is _State.QUOTE:
            self._partial, end = "", '"'
        elif self._state in (_State.STRING, _State.ESCAPE, _State.UNICODE) and not self._is_key:
            end = '"'
        return end + "".join(reversed(self._closers))

    def consume(self, text: str, start: int = 0, *, final: bool = False) -> int:
        """Read from `start`; return where reading stopped: at the end, after the value, or at a wrong character."""
        position = start
        while position < len(text) and not (self.done or self.failed):
            match self._state:
                case _State.STRING:
                    position = self._read_string(text, position)
                case _State.QUOTE:
                    position = self._read_behind_quote(text, position)
                case _State.ESCAPE | _State.UNICODE:
                    position = self._read_escape(text[position], position)
                case _State.SCALAR:
                    position = self._read_scalar(text, position)
                case _:
                    position = self._read_structure(text, position)
        if final and self._state is _State.SCALAR and not (self.done or self.failed):
            self._end_scalar()
        return position

    def _read_string(self, text: str, position: int) -> int:
        if plain := _PLAIN.match(text, position):
            self._write(plain.group())
            return plain.end()
        char = text[position]
        if char == '"' and self._closers and not (self._is_key or self._is_strict):
            self._partial = char
            self._state = _State.QUOTE
        elif char == '"':
            self._write(char)
            if self._is_key:
                self._state = _State.COLON
            else:
                self._end_value()
        elif char == "\\":
            self._partial = char
            self._state = _State.ESCAPE
        else:
            self._write(_escaped_control(char))
        return position + 1

    def _read_behind_quote(self, text: str, position: int) -> int:
        if white := _WHITE.match(text, position):
            self._partial += white.group()
            return white.end()
        written, self._partial = self._partial, ""
        if text[position] in ",]}":
            self._write(written)
            self._end_value()
        else:
            self._write("\\" + "".join(map(_escaped_control, written)))
            self._state = _State.STRING
        return position

    def _read_escape(self, char: str, position: int) -> int:
        if self._state is _State.ESCAPE:
            if char == "u":
                self._partial += char
                self._state = _State.UNICODE
            else:
                self._end_escape(f"\\{char}" if char in '"\\/bfnrt' else "\\\\" + _escaped_control(char))
            return position + 1
        if char not in _HEX:
            self._end_escape("\\" + self._partial)
            return position
        self._partial += char
        if len(self._partial) == len("\\u0000"):
            self._end_escape(self._partial)
        return position + 1

    def _end_escape(self, text: str) -> None:
        self._write(text)
        self._partial = ""
        self._state = _State.STRING

    def _read_scalar(self, text: str, position: int) -> int:
        if part := _SCALAR_PART.match(text, position):
            self._partial += part.group()
            self.failed = len(self._partial) > _MAX_SCALAR
            return part.end()
        self._end_scalar()
        return position

    def _end_scalar(self) -> None:
        if not _SCALAR.match(self._partial):
            self.failed = True
            return
        self._out.append(self.take_partial())
        self._end_value()

    def _end_value(self) -> None:
        self.done = not self._closers
        self._state = _State.COMMA_OR_END

    def _read_structure(self, text: str, position: int) -> int:
        if white := _WHITE.match(text, position):
            self._write(white.group())
            return white.end()
        char = text[position]
        state = self._state
        is_behind_comma = state is _State.KEY or (state is _State.VALUE and char == "]")
        if char in self._closers[-1:] and (state in _MAY_END or (is_behind_comma and not self._is_strict)):
            self._held.clear()  # the comma
            self._closers.pop()
            self._out.append(char)
            self._end_value()
        elif state in _MAY_BEGIN_VALUE:
            return self._begin_value(char, position)
        elif state in _MAY_BEGIN_KEY and char == '"':
            self._begin_string(is_key=True)
        elif state is _State.COLON and char == ":":
            self._held.append(char)
            self._state = _State.VALUE
        elif state is _State.COMMA_OR_END and char == ",":
            self._held.append(char)
            self._state = _State.KEY if self._closers[-1] == "}" else _State.VALUE
        else:
            self.failed = True
            return position
        return position + 1

    def _begin_value(self, char: str, position: int) -> int:
        if char == '"':
            self._begin_string(is_key=False)
        elif char in "{[" and len(self._closers) < MAX_DEPTH:
            self._release()
            self._out.append(char)
            self._closers.append("}" if char == "{" else "]")
            self._state = _State.KEY_OR_END if char == "{" else _State.VALUE_OR_END
        elif char in "-0123456789tfn":
            self._state = _State.SCALAR
            return position
        else:
            self.failed = True
            return position
        return position + 1

    def _begin_string(self, *, is_key: bool) -> None:
        if is_key:
            self._held.append('"')
        else:
            self._release()
            self._out.append('"')
        self._is_key = is_key
        self._state = _State.STRING

    def _write(self, text: str) -> None:
        (self._held or self._out).append(text)

    def _release(self) -> None:
        self._out += self._held
        self._held.clear()


def _escaped_control(char: str) -> str:
    return char if char >= " " else _CONTROL.get(char, f"\\u{ord(char):04x}")


def quoted(text: str) -> str:
    """Return the text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def json_value(text: str, *, is_strict: bool = True) -> str | None:
    """Return `text` as valid JSON without white space around it, or None if it is not one JSON value."""
    scanner = JsonScanner(is_strict=is_strict)
    text = text.strip()
    end = scanner.consume(text, final=True)
    return scanner.take() if scanner.done and end == len(text) else None
