"""`name(key=value, …)` and `name{key:value, …}`: a call as an expression, its arguments as literals."""

import re
from dataclasses import replace

from .base import Body, BodyContext, BodyStatus
from .literal_scanner import Dialect, LiteralScanner

_NAME = re.compile(r"[^\W\d][\w.-]*")
_MAX_NAME = 256
_CLOSERS = {"(": ")", "{": "}"}


class CallBody(Body):
    status = BodyStatus.OPEN

    def __init__(self, context: BodyContext, dialect: Dialect, opener: str):
        self.status = BodyStatus.OPEN
        self._dialect = replace(dialect, quotes=tuple(map(context.encode, dialect.quotes)))
        self._opener = opener
        self._scanner: LiteralScanner | None = None

    def consume(self, text: str, *, final: bool = False) -> int:
        self.status = BodyStatus.OPEN
        if self._scanner is not None:
            return self._scan(self._scanner, text, 0, final)
        start = len(text) - len(text.lstrip())
        name = _NAME.match(text, start)
        end = name.end() if name is not None else start
        if end == len(text) and end - start <= _MAX_NAME and not final:
            return start
        if name is None or not text.startswith(self._opener, end):
            self.status = BodyStatus.STUCK
            return start
        self.name = name.group()
        self._scanner = LiteralScanner(self._dialect, _CLOSERS[self._opener])
        return self._scan(self._scanner, text, end + 1, final)

    def _scan(self, scanner: LiteralScanner, text: str, start: int, final: bool) -> int:
        taken = scanner.consume(text[start:], final=final)
        if scanner.failed:
            self.status = BodyStatus.FAILED
        elif scanner.done:
            self.status = BodyStatus.DONE
        return start + taken

    def take_arguments(self) -> str:
        return self._scanner.take() if self._scanner is not None else ""

    def close(self) -> bool:
        return self._scanner is not None and self._scanner.done

    def cut(self, rest: str) -> None:
        if self._scanner is not None:
            self._scanner.add_partial(rest)

    def end(self) -> None:
        if self._scanner is not None:
            self._scanner.close()
