"""`name(key=value, …)` and `name{key:value, …}`: a call as an expression, its arguments as literals."""

import re
from dataclasses import replace

from .body import Body, BodyContext, BodyStatus, skip_white
from .literal_scanner import Dialect, LiteralScanner

_CALL_NAME = re.compile(r"[^\W\d][\w.-]*")
_MAX_NAME = 256
_BRACKETS = {"(": ")", "{": "}"}


class ExpressionBody(Body):
    def __init__(self, context: BodyContext, dialect: Dialect, opener: str):
        super().__init__(context)
        self._dialect = replace(dialect, quotes=tuple(map(context.encode, dialect.quotes)))
        self._opener = opener
        self._declared = tuple(context.schemas)
        self._scanner: LiteralScanner | None = None

    def _read(self, text: str, position: int, final: bool) -> int:
        if self._scanner is not None:
            return self._scan(self._scanner, text, position, final)
        start = skip_white(text, position)
        end = self._name_end(text, start)
        if end is not None:
            self.name = text[start:end].rstrip()
            self._scanner = LiteralScanner(self._dialect, _BRACKETS[self._opener])
            return end + 1
        self.status = BodyStatus.WAITING if not final and self._may_be_name(text, start) else BodyStatus.STUCK
        return start

    def _name_end(self, text: str, start: int) -> int | None:
        """Return the end of the name that the opener follows. A declared name may have any characters."""
        word = _CALL_NAME.match(text, start)
        if word is not None and text.startswith(self._opener, end := skip_white(text, word.end())):
            return end
        found = (name for name in self._declared if name and text.startswith(name + self._opener, start))
        return next((start + len(name) for name in found), None)

    def _may_be_name(self, text: str, start: int) -> bool:
        word = _CALL_NAME.match(text, start)
        end = start if word is None else skip_white(text, word.end())
        is_word = end == len(text) and end - start <= _MAX_NAME
        return is_word or any((name + self._opener).startswith(text[start:]) for name in self._declared)

    def _scan(self, scanner: LiteralScanner, text: str, position: int, final: bool) -> int:
        end = scanner.consume(text, position, final=final)
        if scanner.failed:
            self.status = BodyStatus.FAILED
        else:
            self.status = BodyStatus.DONE if scanner.done else BodyStatus.WAITING
        return end

    @property
    def has_begun(self) -> bool:  # type: ignore[override]
        return self._scanner is not None and self._scanner.has_begun

    def take_arguments(self) -> str:
        return self._scanner.take() if self._scanner is not None else ""

    def close(self) -> bool:
        return self._scanner is not None and self._scanner.done

    def cut(self, rest: str) -> None:
        if self._scanner is not None:
            self._scanner.add_partial(rest)

    def end(self) -> bool:
        is_whole = self.close()
        if self._scanner is not None and not is_whole:
            self._scanner.close()
        return is_whole
