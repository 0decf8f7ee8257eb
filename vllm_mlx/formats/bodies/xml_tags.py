"""The tags of calls with a tag for each argument, and the contents of their heads."""

import html
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

MAX_HEAD = 256
_HEAD = re.compile(rf"[^<>\n\ud800-\udfff]{{0,{MAX_HEAD}}}")
_ATTRIBUTE = re.compile(r"(?<![\w-])([\w-]+)\s*=\s*(?:\"([^\"]*)\"|'([^']*)'|([^\s\"'>]+))")
_NAMES = ("name", "tool", "key")


@dataclass(frozen=True, slots=True)
class Head:
    """The contents of a tag of a call or argument. `is_string` is None if it does not say whether the value is text."""

    name: str
    is_string: bool | None = None


@dataclass(frozen=True, slots=True)
class XmlTags:
    """`function` and `parameter` begin a tag; its head ends with `head_end`.

    Without `function`, the name of the call is written before; without `end_function`, the enclosing tag ends the call.
    """

    parameter: str
    end_parameter: str
    function: str = ""
    end_function: str = ""
    head_end: str = ">"
    value: str = ""  # between the head of an argument and its value
    type: str = ""  # before `value`, may hold the type of the argument
    end_type: str = ""
    object: str = ""  # begins one JSON object of all arguments, instead of `parameter`
    end_object: str = ""
    has_attributes: bool = False  # a head is name="…"; otherwise it is the name alone
    trims_breaks: bool = False  # one line break at either end of a value is layout, not text
    has_cdata: bool = False

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(text for field in fields(self) if isinstance(text := getattr(self, field.name), str) and text)

    def encoded(self, encode: Callable[[str], str]) -> "XmlTags":
        return _encoded(self, encode)

    def head_at(self, text: str, start: int, end_tag: str) -> tuple[int, Head | None]:
        """Return (end, head) of the head that `end_tag` ends at `end`. If head is None, reading stopped at `end`."""
        match = _HEAD.match(text, start)
        end = match.end() if match else start
        written = text[start:end]
        if not text.startswith(end_tag, end):
            return end, None
        if not self.has_attributes:
            name = written.strip()
            return end, Head(name) if name else None
        values = {key: quoted or single or bare for key, quoted, single, bare in _ATTRIBUTE.findall(written)}
        name = next((values[key] for key in _NAMES if values.get(key)), "")
        return end, Head(html.unescape(name).strip(), _is_string(values)) if name.strip() else None


@lru_cache(maxsize=256)
def _encoded(tags: XmlTags, encode: Callable[[str], str]) -> XmlTags:
    values = {field.name: getattr(tags, field.name) for field in fields(tags)}
    coded: dict[str, Any] = {name: encode(text) for name, text in values.items() if isinstance(text, str)}
    return replace(tags, **coded)


def _is_string(values: dict[str, str]) -> bool | None:
    if "string" in values:
        return values["string"] == "true"
    return values["type"] == "string" if "type" in values else None
