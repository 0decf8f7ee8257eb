"""`<invoke name="f"><key>value</key></invoke>`: arguments are elements, perhaps nested. All tags have a prefix."""

import re
from collections.abc import Mapping
from typing import Any

from .arguments import ArgumentsWriter, decode, joined
from .body import Body, BodyContext, BodyStatus, begins_object, skip_white
from .json_scanner import quoted
from .tool_schema import ANY_ARGUMENTS, STRING, Types

_INVOKE = re.compile(r"<invoke\s+name\s*=\s*[\"']?([^\"'<>]{1,256}?)[\"']?\s*>")
_TAG = re.compile(r"<(/?)([^<>\s\"'=]{1,256})>")
_MAX_TAG = 600
_MAX_DEPTH = 100
_ITEM = "item"


class _Element:
    """An argument, or a part of one, while it is read."""

    def __init__(self, name: str, schema: Mapping[str, Any], types: Types):
        self.name = name
        self.schema = schema
        self._types = types
        self.chunks: list[str] = []
        self.is_blank = True  # only white space so far
        self.parts: list[tuple[str, str]] = []  # (name, JSON) of the elements inside
        self.lists: set[str] = set()  # the names of those that are declared as lists

    def to_json(self) -> str:
        if not self.parts:
            text = "".join(self.chunks)
            value = decode(text, self._types)
            return quoted(text) if value is None else value
        if all(name == _ITEM for name, _ in self.parts):
            return f"[{', '.join(value for _, value in self.parts)}]"
        values: dict[str, list[str]] = {}
        for name, value in self.parts:
            values[name] = [*values.get(name, ()), value] if name in self.lists else [value]
        return "{" + ", ".join(f"{quoted(name)}: {joined(each)}" for name, each in values.items()) + "}"


class NestedXmlBody(Body):
    """Text is streamed if the schema says that it is a string; other arguments are emitted when they are complete."""

    def __init__(self, context: BodyContext, prefix: str):
        super().__init__(context)
        self._prefix = context.encode(prefix)
        self._writer = ArgumentsWriter(None)
        self._schema = ANY_ARGUMENTS
        self._elements: list[_Element] = []
        self._streams = False
        self.has_begun = False
        self._is_object = False  # the arguments are one object

    def _read(self, text: str, position: int, final: bool) -> int:
        if not self._elements:
            if self._is_object and not self._writer.object.done:
                return self._read_object(text, position)
            start = skip_white(text, position)
            if self._is_object and text.startswith("}", start):
                return start + 1  # one brace too many
            is_object = self.name is not None and not self.has_begun and begins_object(text, start)
            if is_object:
                return self._read_object(text, start)
            if is_object is None and not final:
                self.status = BodyStatus.WAITING
                return start
            return self._read_tag(text, start, final)
        tag = text.find(self._prefix, position)
        if tag == position:
            return self._read_tag(text, position, final)
        end = tag if tag >= 0 else len(text) if final else _safe_end(text, position, self._prefix)
        self._add_text(text[position:end])
        if end == position:
            self.status = BodyStatus.WAITING
        return end

    def _read_object(self, text: str, position: int) -> int:
        """Read one object of all arguments, which replaces the elements."""
        self.has_begun = self._is_object = True
        position = self._writer.read_object(text, position)
        if self._writer.object.failed:
            self.status = BodyStatus.FAILED
        return position

    def _read_tag(self, text: str, start: int, final: bool) -> int:
        begin = start + len(self._prefix)
        is_prefixed = text.startswith(self._prefix, start)
        if is_prefixed and self.name is None and (invoke := _INVOKE.match(text, begin)):
            self.name = invoke.group(1).strip()
            self._schema = self._context.schemas.get(self.name, ANY_ARGUMENTS)
            self._writer = ArgumentsWriter(self._schema)
            return invoke.end()
        if is_prefixed and self.name is not None and (tag := _TAG.match(text, begin)):
            if self._take_tag(tag.group(2), is_end=bool(tag.group(1))):
                return tag.end()
        elif not final and len(text) - start < _MAX_TAG:
            may_grow = self._prefix.startswith(text[start:]) or (is_prefixed and ">" not in text[begin:])
            if may_grow and (begin >= len(text) or text[begin] == "<"):
                self.status = BodyStatus.WAITING
                return start
        if self._elements:
            self._add_text(text[start : start + 1])
            return start + 1
        self.status = BodyStatus.STUCK
        return start

    def _take_tag(self, name: str, *, is_end: bool) -> bool:
        """Return whether the tag is right here, and act on it."""
        open_name = self._elements[-1].name if self._elements else "invoke"
        if is_end and name == open_name:
            self._end_element()
            return True
        if is_end or self._streams or len(self._elements) >= _MAX_DEPTH or (self._elements and name == "tool_call"):
            return False
        if self._elements and not self._elements[-1].is_blank:
            return False
        self.has_begun = True
        schema = self._schema.child(name, self._elements[-1].schema if self._elements else None)
        types = self._schema.of(schema) if schema else None
        if self._elements and types is not None and "array" in types:
            self._elements[-1].lists.add(name)
        self._elements.append(_Element(name, schema, types))
        if len(self._elements) == 1 and self._schema.types(name) == STRING:
            self._streams = True
            self._writer.begin(name)
        return True

    def _end_element(self) -> None:
        if not self._elements:
            self.close()
            self.status = BodyStatus.DONE
            return
        element = self._elements.pop()
        if self._streams:
            self._writer.end()
            self._streams = False
        elif self._elements:
            self._elements[-1].parts.append((element.name, element.to_json()))
        else:
            self._writer.add(element.name, element.to_json())

    def _add_text(self, text: str) -> None:
        if self._streams:
            self._writer.feed(text)
        else:
            self._elements[-1].chunks.append(text)
            self._elements[-1].is_blank &= not text.strip()

    @property
    def reads_tags(self) -> bool:
        return self.name is None

    def take_arguments(self) -> str:
        return self._writer.take()

    def close(self) -> bool:
        if self.name is None:
            return False
        while self._elements:
            self._end_element()
        self._writer.close()
        self.has_begun = True
        return True

    def cut(self, rest: str) -> None:
        if self._streams:
            self._writer.feed(rest)
            self._writer.cut()
        while self._elements and not self._streams:
            self._end_element()

    def end(self) -> bool:
        is_whole = not self._elements and (self._writer.object.done or not self._is_object)
        self.close()
        return is_whole


def _safe_end(text: str, start: int, prefix: str) -> int:
    """Return the end of the text that cannot be the beginning of a prefix."""
    for length in range(min(len(prefix) - 1, len(text) - start), 0, -1):
        if prefix.startswith(text[len(text) - length :]):
            return len(text) - length
    return len(text)
