"""A body that is JSON or XML, by its first character: models trained on one form fall back to the other."""

from collections.abc import Iterable

from .base import BodyStatus, Schemas, ToolBody
from .json_body import JsonBody
from .xml_body import XmlBody


class JsonOrXmlBody:
    def __init__(self, schemas: Schemas, enclosing: Iterable[str] = ()):
        self._schemas = schemas
        self._enclosing = tuple(enclosing)
        self._body: ToolBody | None = None
        self._status = BodyStatus.OPEN

    @property
    def status(self) -> BodyStatus:
        return self._body.status if self._body else self._status

    @property
    def name(self) -> str | None:
        return self._body.name if self._body else None

    def consume(self, text: str, *, final: bool = False) -> int:
        if self._body is not None:
            return self._body.consume(text, final=final)
        rest = text.lstrip()
        position = len(text) - len(rest)
        match rest[:1]:
            case "":
                return position
            case "{":
                self._body = JsonBody()
            case "<":
                self._body = XmlBody(self._schemas, self._enclosing)
            case _:
                self._status = BodyStatus.STUCK
                return position
        return position + self._body.consume(rest, final=final)

    def take_arguments(self) -> str:
        return self._body.take_arguments() if self._body else ""

    def close(self) -> bool:
        return self._body is not None and self._body.close()

    def cut(self, rest: str) -> None:
        if self._body is not None:
            self._body.cut(rest)
