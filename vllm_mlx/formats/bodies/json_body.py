"""Calls as JSON: `{"name": …, "arguments": {…}}`, keys in any order, `{"name": {…}}`, or the arguments alone."""

import json
from enum import Enum, auto

from .body import Body, BodyContext, BodyStatus
from .json_scanner import JsonScanner, json_value

_WHITE = " \t\r\n"
NAME_KEYS = ("name", "tool_name")
ARGUMENT_KEYS = ("arguments", "parameters", "args")
_ID_KEYS = ("id", "tool_call_id")
_CALL_KEYS = frozenset({*NAME_KEYS, *ARGUMENT_KEYS, *_ID_KEYS, "type"})


class _State(Enum):
    START = auto()
    KEY_OR_END = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    COMMA_OR_END = auto()


class JsonBody(Body):
    """`is_bare`: no tag says that this is a call, so it must begin like one and have arguments.

    `is_keyed`: the name is the one key of the object, its value the arguments.
    """

    def __init__(self, context: BodyContext, *, is_bare: bool = False, is_keyed: bool = False):
        super().__init__(context)
        self._name: str | None = None
        self._is_bare = is_bare
        self._is_keyed = is_keyed
        self._state = _State.START
        self._scanner: JsonScanner | None = None  # reads the current key or value
        self._key = ""
        self._streams = False  # the value being read is the arguments object

    @property
    def name(self) -> str | None:  # type: ignore[override]
        is_known = not self._is_bare or self.is_whole or self._streams
        return self._name if is_known else None

    @property
    def has_begun(self) -> bool:  # type: ignore[override]
        return self.name is not None  # an object in tags that names a tool is a call

    def _read(self, text: str, position: int, final: bool) -> int:
        if self._scanner is not None:
            return self._scan(self._scanner, text, position)
        if text[position] in _WHITE:
            return position + 1
        return position + self._read_structure(text[position])

    def close(self) -> bool:
        if self._scanner is not None or self._name is None:
            return False
        if not self.is_whole:
            if self._is_bare or self._is_keyed:
                return False
            self._set_arguments("{}")
        return True

    def cut(self, rest: str) -> None:
        if self._scanner is None or self._state is not _State.VALUE or self._key not in ARGUMENT_KEYS:
            return
        if self._streams:
            self._arguments += self._scanner.take_partial()
        elif (text := self._scanner.take()).startswith('"'):
            self._arguments += json.loads(text + '"')

    def end(self) -> bool:
        is_whole = self.is_whole
        if self._scanner is not None and self._streams:
            self._arguments += self._scanner.closing()
        elif not self.is_whole:
            is_value = self._scanner is not None and self._state is _State.VALUE and self._key in ARGUMENT_KEYS
            self._set_arguments(_closed(self._scanner.take()) if self._scanner is not None and is_value else "{}")
        return is_whole

    def _read_structure(self, char: str) -> int:
        """Return the number of characters read; the first character of a value is left to its scanner."""
        match self._state, char:
            case _State.START, "{":
                self._state = _State.KEY_OR_END
            case ((_State.KEY | _State.KEY_OR_END), '"'):
                self._scanner = JsonScanner()
                return 0
            case _State.COLON, ":":
                self._state = _State.VALUE
                if self._is_keyed:
                    self._name, self._key = self._key, ARGUMENT_KEYS[0]
            case _State.VALUE, _ if char == "{" or not self._is_keyed:
                self._scanner = JsonScanner()
                self._streams = self._key in ARGUMENT_KEYS and char == "{" and not self.is_whole
                return 0
            case _State.COMMA_OR_END, "," if not self._is_keyed:
                self._state = _State.KEY
            case ((_State.KEY | _State.KEY_OR_END | _State.COMMA_OR_END), "}") if self.close():
                self.status = BodyStatus.DONE
            case _State.KEY_OR_END, "}" if not self._is_bare:
                self.status = BodyStatus.ENDED  # an empty object is not a call
            case _:
                self.status = BodyStatus.STUCK
                return 0
        return 1

    def _scan(self, scanner: JsonScanner, text: str, position: int) -> int:
        position = scanner.consume(text, position)
        if self._streams:
            self._arguments += scanner.take()
        if scanner.failed:
            self.status = BodyStatus.FAILED
        elif scanner.done:
            self._scanner = None
            if self._state is _State.VALUE:
                self._end_value(scanner)
            else:
                self._key = json.loads(scanner.take())
                self._state = _State.COLON
                is_foreign = self._is_bare and self._key not in _CALL_KEYS and self.name is None
                if is_foreign or (self._is_keyed and not self._key):
                    self.status = BodyStatus.FAILED
        return position

    def _end_value(self, scanner: JsonScanner) -> None:
        self._state = _State.COMMA_OR_END
        if self._streams:
            self._streams = False
            self.is_whole = True
            return
        value = scanner.take()
        if self._key in NAME_KEYS and self._name is None:
            name = json.loads(value).strip() if value.startswith('"') else ""
            if name:
                self._name = self._context.tool_name(name)
            else:
                self.status = BodyStatus.FAILED
        elif self._key in _ID_KEYS and value.startswith('"'):
            self.call_id = json.loads(value) or None
        elif self._key in ARGUMENT_KEYS and not self.is_whole:
            arguments = _object_in(value)
            if arguments is None:
                self.status = BodyStatus.FAILED
            else:
                self._set_arguments(arguments)

    def _set_arguments(self, arguments: str) -> None:
        self._arguments += arguments
        self.is_whole = True


class ObjectBody(Body):
    """One JSON object. If `trailer` follows the object, it ends the body; a model may omit it."""

    def __init__(self, context: BodyContext, name: str, *, call_id: str | None = None, trailer: str = ""):
        super().__init__(context)
        self.name = name
        self.call_id = call_id
        self._trailer = context.encode(trailer)
        self._scanner: JsonScanner | None = None

    @property
    def has_begun(self) -> bool:  # type: ignore[override]
        return self._scanner is not None

    def _read(self, text: str, position: int, final: bool) -> int:
        if self._scanner is not None and not self._scanner.done:
            return self._scan(self._scanner, text, position)
        if text[position] in _WHITE or (self._scanner is not None and text[position] == "}"):  # one brace too many
            return position + 1
        if self._scanner is not None:
            return self._read_trailer(text, position, final)
        if text[position] == "{":
            self._scanner = JsonScanner()
        else:
            self.status = BodyStatus.STUCK
        return position

    def _scan(self, scanner: JsonScanner, text: str, position: int) -> int:
        position = scanner.consume(text, position)
        self._arguments += scanner.take()
        if scanner.failed:
            self.status = BodyStatus.FAILED
        elif scanner.done and not self._trailer:
            self.status = BodyStatus.DONE
        return position

    def _read_trailer(self, text: str, position: int, final: bool) -> int:
        rest = text[position : position + len(self._trailer)]
        may_grow = rest != self._trailer and self._trailer.startswith(rest) and not final
        self.status = BodyStatus.WAITING if may_grow else BodyStatus.DONE
        return position + len(rest) if rest == self._trailer else position

    def close(self) -> bool:
        if self._scanner is None:
            self._arguments = "{}"
            self._scanner = JsonScanner()
            self._scanner.done = True
        return self._scanner.done

    def cut(self, rest: str) -> None:
        if self._scanner is not None and not self._scanner.done:
            self._arguments += self._scanner.take_partial()

    def end(self) -> bool:
        self._arguments += "{}" if self._scanner is None else self._scanner.closing()
        return self._scanner is not None and self._scanner.done


def _closed(value: str) -> str:
    """Return the object inside a JSON string that was cut off."""
    scanner = JsonScanner()
    text = json.loads(value + '"').lstrip() if value else ""
    if text.startswith("{"):
        scanner.consume(text)
        return "{}" if scanner.failed else scanner.take() + scanner.closing()
    return "{}"


def _object_in(value: str) -> str | None:
    """Return the object of a JSON value: null is an empty object, a string may contain one as text."""
    if value == "null":
        return "{}"
    if not value.startswith('"'):
        return None
    text = json.loads(value).strip()
    return json_value(text, is_strict=False) if text.startswith("{") else None if text else "{}"
