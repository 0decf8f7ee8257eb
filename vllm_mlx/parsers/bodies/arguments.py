"""Writes a JSON object from arguments that arrive as text, one after the other."""

import json
from collections.abc import Mapping
from typing import Any

from .schema import STRING, Types, argument_types, decode, may_be_value


class ArgumentsWriter:
    """Strings leave as they arrive; a value that may be of another type leaves when it is complete."""

    def __init__(self, parameters: Mapping[str, Any] | None):
        self._parameters = parameters if parameters is not None else {}
        self._seen: set[str] = set()
        self._out: list[str] = []
        self._types: Types = STRING
        self._held: str | None = None  # of a value whose type is not known yet; None: it is a string

    def take(self) -> str:
        text = "".join(self._out)
        self._out.clear()
        return text

    def expects(self, name: str) -> bool | None:
        """Whether the schema declares an argument that has not come yet; None: it declares none at all."""
        properties = self._parameters.get("properties")
        return name in properties and name not in self._seen if isinstance(properties, Mapping) else None

    def begin(self, name: str) -> None:
        self._out.append(f"{', ' if self._seen else '{'}{_quoted(name)}: ")
        self._seen.add(name)
        self._types = argument_types(self._parameters, name)
        self._held = ""
        self._release()

    def feed(self, text: str) -> None:
        if self._held is None:
            self._out.append(_quoted(text)[1:-1])
        else:
            self._held += text
            self._release()

    def end(self) -> None:
        if self._held is not None:
            value = decode(self._held, self._types)
            self._out.append(_quoted(self._held) if value is None else value)
        else:
            self._out.append('"')

    def cut(self) -> None:
        """The reply ends inside a value: give what there is of it, unclosed."""
        if self._held:
            is_string = self._types is not None and "string" in self._types
            self._out.append(_quoted(self._held)[:-1] if is_string else self._held.lstrip())

    def close(self) -> None:
        self._out.append("}" if self._seen else "{}")

    def _release(self) -> None:
        if self._held is not None and not may_be_value(self._held, self._types):
            self._out.append(_quoted(self._held)[:-1])
            self._held = None


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
