"""Writes a JSON object from arguments that arrive as text, one after another."""

import json
import re

from .json_scanner import JsonScanner, json_value, quoted
from .literal_scanner import python_value
from .tool_schema import ANY_ARGUMENTS, STRING, ToolSchema, Types

_MAX_SCALAR = 64  # characters; a longer number, or more white space, is text
_INTEGER_VALUED = re.compile(r"(-?\d+)(?:\.0+)?\Z", re.ASCII)
_MAYBE_SCALAR = re.compile(
    r"(?:[-+.\deE]*|t(?:r(?:ue?)?)?|f(?:a(?:l(?:se?)?)?)?|n(?:u(?:ll?)?)?|T(?:r(?:ue?)?)?|F(?:a(?:l(?:se?)?)?)?)\Z",
    re.ASCII,
)


# A model may write all arguments as one object in one argument of such a name.
_WRAPPERS = frozenset({"arguments", "input"})


class ArgumentsWriter:
    """Emits a string while it arrives, and a value that may have another type when it is complete."""

    def __init__(self, schema: ToolSchema | None):
        """Begin without arguments; `schema`: the tool's, if it is declared."""
        self._schema = ANY_ARGUMENTS if schema is None else schema
        self._may_wrap = False  # the value may be the object of all arguments; no part of it was emitted
        self._wrapped = ""  # such an object, until another argument follows it
        self._is_json = False  # the model says that the value is JSON
        self.object = JsonScanner()  # reads the object of all arguments, if the model writes one
        self._seen: set[str] = set()
        self._listed: list[str] = []  # the values of a declared list, which may be written one after another
        self._lead = "{"  # text before the next argument
        self._out: list[str] = []
        self._name = ""
        self._types: Types = STRING
        self._held: list[str] | None = None  # parts of a value whose type is not known yet; None for a string
        self._is_compound = False  # the held text begins an object or a list

    @property
    def is_empty(self) -> bool:
        """Return whether no argument has been written yet."""
        return self._lead == "{"

    def take(self) -> str:
        text = "".join(self._out)
        self._out.clear()
        return text

    def expects(self, name: str) -> bool | None:
        """Return whether the schema declares this argument, not yet seen; None if it declares no arguments."""
        is_declared = self._schema.declares(name)
        return is_declared if is_declared is None else is_declared and name not in self._seen

    def begin(self, name: str, *, is_string: bool | None = None) -> None:
        """`is_string`: whether the model calls the value a string, which counts if the schema does not decide it."""
        if self._listed and name == self._name:
            self._held = []  # a further item of the list
            return
        self._release_list()
        is_wrapper = name in _WRAPPERS and self._schema.declares(name) is not True
        self._may_wrap = is_wrapper and self.is_empty and not self._wrapped
        if not self._may_wrap:
            self._begin(name)
        self._name = name
        types = self._schema.types(name)
        self._types = STRING if is_string and (types is None or "string" in types) else types
        self._is_json = is_string is False
        self._held = []
        self._is_compound = types is not None and "array" in types and "string" not in types  # it is not streamed
        if not self._is_compound:
            self._release()

    def add(self, name: str, value: str) -> None:
        """Add a complete argument, whose value is JSON text."""
        if not (self._listed and name == self._name):
            self._release_list()
            self._begin(name)
        self._name = name
        self._end_value(value, self._schema.types(name))

    def _end_value(self, value: str, types: Types) -> None:
        if types is not None and "array" in types:
            self._listed.append(value)
        else:
            self._out.append(value)

    def _release_list(self) -> None:
        """Emit the values of a list: one as it is, several as the items of one list."""
        self._out.append(joined(self._listed))
        self._listed = []

    def read_object(self, text: str, position: int) -> int:
        """Read on in an object of all arguments, which no argument came before; return where reading stopped."""
        position = self.object.consume(text, position)
        members = self.object.take()
        self._add_members(members[:-1] if self.object.done else members)
        return position

    def _add_members(self, text: str) -> None:
        """Add the next part of that object, without its closing brace."""
        self._out.append(text)
        if text.strip():
            self._lead = "" if self._lead == "{" and text.strip() == "{" else ", "

    def _begin(self, name: str) -> None:
        if self._wrapped:
            self._out.append(self._wrapped_argument())
        self._out.append(f"{self._lead}{quoted(name)}: ")
        self._lead = ", "
        self._seen.add(name)

    def feed(self, text: str) -> None:
        if self._held is None:
            self._out.append(quoted(text)[1:-1])
        else:
            self._held.append(text)
            if not self._is_compound:
                self._release()

    def _wrapped_argument(self) -> str:
        """Return the beginning of the arguments, in which the wrapped object is one argument like the others."""
        wrapped, self._wrapped = self._wrapped, ""
        self._lead = ", "
        self._seen.add(self._name)
        return f"{{{quoted(self._name)}: {wrapped}"

    def end(self) -> None:
        held = "".join(self._held or ())
        if self._may_wrap:
            self._may_wrap = False
            value = decode(held, None)
            if value is not None and value.startswith("{"):
                self._wrapped, self._held = value, []
                return
            self._begin(self._name)
        if self._held is not None:
            value = decode(held, self._types, is_json=self._is_json)
            self._end_value(quoted(held) if value is None else value, self._types)
            self._held = []
        else:
            self._out.append('"')

    def cut(self) -> None:
        """Emit the part of a value, or of an object of all arguments, that was read before the reply was cut."""
        held = "".join(self._held or ())
        if self._may_wrap:
            self._may_wrap = False
            if held.lstrip().startswith("{"):
                self._out.append(held.lstrip())
                return
            self._begin(self._name)
        self._release_list()
        is_whole = self.object.done and not self._seen
        self._out.append("}" if is_whole else self._wrapped or self.object.take_partial())
        if self._held:
            is_string = self._types is not None and "string" in self._types
            self._out.append(quoted(held)[:-1] if is_string else held.lstrip())

    def close(self) -> None:
        self._release_list()
        if not self.object.done:
            self._add_members(self.object.closing()[:-1])
        self._out.append(self._wrapped or ("{}" if self._lead == "{" else "}"))
        self._wrapped = ""

    def _release(self) -> None:
        assert self._held is not None
        if self._may_wrap:
            return
        held = "".join(self._held)
        if not may_be_value(held, self._types, is_json=self._is_json):
            self._out.append(quoted(held)[:-1])
            self._held = None
        else:
            self._is_compound = held.lstrip()[:1] in ("{", "[", '"')


def joined(values: list[str]) -> str:
    """Return the one JSON value, or several as one list, in which the items of lists follow one another."""
    if len(values) < 2:
        return "".join(values)
    items = (value[1:-1].strip() if value.startswith("[") else value for value in values)
    return f"[{', '.join(filter(None, items))}]"


def may_be_value(text: str, types: Types, *, is_json: bool = False) -> bool:
    """Return whether a text with this beginning may be a value other than a string, or a string in quotes."""
    start = text[: _MAX_SCALAR + 1].lstrip()
    if is_json and (start[:1] == '"' or not start):
        return bool(start) or len(text) <= _MAX_SCALAR
    if types == STRING:
        return False
    if not start:
        return len(text) <= _MAX_SCALAR
    if start[0] in "{[":
        return True
    rest = text.strip()
    return len(rest) <= _MAX_SCALAR and _MAYBE_SCALAR.match(rest) is not None


def decode(text: str, types: Types, *, is_json: bool = False) -> str | None:
    """Return the JSON value of `text`, or None if it is a string.

    A value of a type that the schema does not allow is kept if the schema does not allow a string either; null is not.
    `is_json`: the model says that the text is JSON, so a string in quotes means the string inside.
    """
    if not may_be_value(text, types, is_json=is_json):
        return None
    text = text.strip()
    if types is not None and "boolean" in types and text in ("True", "False"):
        return text.lower()
    value = json_value(text)
    if value is None and types is not None and "string" not in types:
        value = python_value(text)
    if value is None:
        return None
    kind = _kind(value)
    if kind == "string" and is_json:
        inner = json.loads(value)
        return value if types is None or "string" in types else decode(inner, types) or value
    if types is None:
        return None if kind == "string" else value
    if kind == "number" and types & {"number", "integer"}:
        whole = _INTEGER_VALUED.match(value)
        return whole.group(1) if whole else value if "number" in types or "string" not in types else None
    return value if kind in types or not ({"string"} & types or kind in ("null", "string")) else None


def _kind(value: str) -> str:
    match value[0]:
        case "{":
            return "object"
        case "[":
            return "array"
        case '"':
            return "string"
        case "t" | "f":
            return "boolean"
        case "n":
            return "null"
    return "number"
