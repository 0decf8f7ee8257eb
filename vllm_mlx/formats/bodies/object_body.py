"""Arguments as one JSON object; the name of the call is written outside the object."""

import json

from .body import Body, BodyContext, BodyStatus
from .json_scanner import JsonScanner

_WHITE = " \t\r\n"


class ObjectBody(Body):
    """One JSON object. If `trailer` follows the object, it ends the body; a model may omit it."""

    status = BodyStatus.OPEN

    def __init__(self, context: BodyContext, name: str, *, call_id: str | None = None, trailer: str = ""):
        self.status = BodyStatus.OPEN
        self.name = name
        self.call_id = call_id
        self._trailer = context.encode(trailer)
        self._scanner: JsonScanner | None = None
        self._arguments = ""

    def consume(self, text: str, *, final: bool = False) -> int:
        self.status = BodyStatus.OPEN
        position = 0
        while position < len(text) and self.status is BodyStatus.OPEN:
            if self._scanner is not None and not self._scanner.done:
                position = self._scan(self._scanner, text, position)
            elif text[position] in _WHITE:
                position += 1
            elif self._scanner is not None:
                return self._read_trailer(text, position, final)
            elif text[position] == "{":
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
        if rest == self._trailer:
            self.status = BodyStatus.DONE
            return position + len(rest)
        if final or not self._trailer.startswith(rest):
            self.status = BodyStatus.DONE
        return position

    def take_arguments(self) -> str:
        arguments, self._arguments = self._arguments, ""
        return arguments

    def close(self) -> bool:
        if self._scanner is None:
            self._arguments = "{}"
            self._scanner = JsonScanner()
            self._scanner.done = True
        return self._scanner.done

    def cut(self, rest: str) -> None:
        if self._scanner is not None and not self._scanner.done:
            self._arguments += self._scanner.take_partial()

    def end(self) -> None:
        self._arguments += "{}" if self._scanner is None else self._scanner.closing()


class KeyedBody(Body):
    """`{"name": {…}}`: the name is the one key, its value the arguments."""

    status = BodyStatus.OPEN

    def __init__(self, context: BodyContext):
        self.status = BodyStatus.OPEN
        self._context = context
        self._key: JsonScanner | None = None
        self._key_text = ""
        self._awaits = "{"
        self._arguments: ObjectBody | None = None

    def consume(self, text: str, *, final: bool = False) -> int:
        self.status = BodyStatus.OPEN
        position = 0
        while position < len(text) and self.status is BodyStatus.OPEN:
            if self._arguments is not None and self._awaits == "":
                position += self._read_arguments(self._arguments, text[position:])
            elif self._key is not None:
                position = self._read_key(self._key, text, position)
            elif text[position] in _WHITE:
                position += 1
            elif text[position] == self._awaits:
                position += self._read_structure(text[position])
            else:
                self.status = BodyStatus.STUCK
        return position

    def _read_structure(self, char: str) -> int:
        match char:
            case "{":
                self._awaits = '"'
            case '"':
                self._key = JsonScanner()
                return 0
            case ":":
                self._awaits = ""
                self._arguments = ObjectBody(self._context, self._key_text)
                self.name = self._key_text
            case "}":
                self.status = BodyStatus.DONE
        return 1

    def _read_key(self, key: JsonScanner, text: str, position: int) -> int:
        position = key.consume(text, position)
        if key.done:
            self._key = None
            self._key_text = json.loads(key.take())
            self._awaits = ":"
            if not self._key_text:
                self.status = BodyStatus.FAILED
        return position

    def _read_arguments(self, arguments: ObjectBody, text: str) -> int:
        taken = arguments.consume(text)
        if arguments.status is BodyStatus.DONE:
            self._awaits = "}"
        elif arguments.status is not BodyStatus.OPEN:
            self.status = BodyStatus.FAILED
        return taken

    def take_arguments(self) -> str:
        return self._arguments.take_arguments() if self._arguments is not None else ""

    def close(self) -> bool:
        return self._awaits == "}"

    def cut(self, rest: str) -> None:
        if self._arguments is not None and self._awaits == "":
            self._arguments.cut(rest)

    def end(self) -> None:
        if self._arguments is not None and self._awaits == "":
            self._arguments.end()
