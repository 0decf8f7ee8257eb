"""The shape of a request body: its structure, kinds and lengths, without its texts; and a body of the same shape.

A word is kept if the protocols define it, in a field that has such words. A name or an id becomes `name1`, the same one
in every place. Any other text becomes an object that has its length. Does no I/O.
"""

import hashlib
import json
import random
import re
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from ..api.anthropic import schema as anthropic
from ..api.openai import schema as openai
from ..api.responses import schema as responses
from ..api.text import json_in
from ..api.wire import Ignored, Wire

TEXT, DATA, JSON, TOKENS, BIASES = "~text", "~data", "~json", "~tokens", "~biases"  # no field has such a name

_SCHEMA_KEYS = frozenset({
    "$defs", "$ref", "additionalProperties", "allOf", "anyOf", "const", "default", "definitions", "dependentRequired",
    "description", "else", "enum", "exclusiveMaximum", "exclusiveMinimum", "format", "if", "items", "maxItems",
    "maxLength", "maxProperties", "maximum", "minItems", "minLength", "minProperties", "minimum", "multipleOf", "not",
    "oneOf", "pattern", "patternProperties", "prefixItems", "properties", "propertyNames", "required", "then", "title",
    "type", "uniqueItems",
})  # fmt: skip
_SCHEMA_NUMBERS = frozenset({"maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties"})
_NAMES = frozenset({
    "call_id", "file_id", "filename", "id", "model", "name", "previous_response_id", "required", "tool_call_id",
    "tool_name", "tool_use_id", "namespace",
})  # fmt: skip
_OTHER_WORDS = frozenset({
    "array", "boolean", "integer", "null", "number", "object", "string",
    "adaptive", "auto", "between_tools", "custom", "disabled", "enabled", "ephemeral", "grammar", "lark", "namespace",
    "none", "omitted", "regex", "required", "summarized", "updates", "5m", "1h", "24h",
    "json_object", "json_schema", "structural_tag", "thinking", "function_call_output", "custom_tool_call_output",
})  # fmt: skip
_OTHER_FIELDS = frozenset({"definition", "grammar", "schema", "strict", "syntax", "budget_tokens", "enable_thinking"})
_TOOL_TYPES = frozenset({
    "apply_patch", "code_interpreter", "computer", "file_search", "image_generation", "local_shell", "mcp", "shell",
    "tool_search", "web_search", "web_search_preview",
})  # fmt: skip
_OTHER_WORD_FIELDS = frozenset({"display", "include", "syntax", "tool_choice", "ttl", "type", "verbosity"})
_MEDIA_TYPE = re.compile(r"[a-z]{1,20}/[a-z0-9.+-]{1,40}")
_VERSIONED = re.compile(
    r"(advisor|bash|browser_toolset|clear_thinking|clear_tool_uses|code_execution|compact|computer|computer_toolset|"
    r"memory|text_editor|tool_search_tool_bm25|tool_search_tool_regex|web_fetch|web_search)_[0-9]{8}"
)
_PSEUDONYM = re.compile(r"name[0-9]+")
_FIELD = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_QUOTED = re.compile(r"(['`\"])(.*?)\1", re.DOTALL)
_LETTERS = "etaoinshrdlu"


def _wires(base: type[Wire] = Wire) -> Iterator[type[Wire]]:
    for wire in base.__subclasses__():
        yield wire
        yield from _wires(wire)


def _literals(hint: Any) -> Iterator[str]:
    if get_origin(hint) is Literal:
        yield from (value for value in get_args(hint) if isinstance(value, str))
    else:
        for inner in get_args(hint):
            yield from _literals(inner)


def _is_free(hint: Any) -> bool:
    return hint is Any or get_origin(hint) is dict or any(map(_is_free, get_args(hint)))


def _vocabulary() -> tuple[frozenset[str], frozenset[str], frozenset[str], frozenset[str]]:
    """Names of fields, words that they hold, names of fields that hold words, names of fields of any form."""
    fields, word_fields, free = {*_SCHEMA_KEYS, *_OTHER_FIELDS}, set(_OTHER_WORD_FIELDS), set()
    words = {*_OTHER_WORDS, *_TOOL_TYPES, *responses.SKIPPED_ITEMS, *responses.INCLUDED}
    for wire in _wires():
        for name, rule in (wire.extras or {}).items():
            fields.add(name)
            held = [value for value in rule.values if isinstance(value, str)] if isinstance(rule, Ignored) else []
            words.update(held)
            word_fields.update([name] if held else [])
        for name, field in wire.model_fields.items():
            fields.add(field.alias or name)
            held = list(_literals(field.annotation))
            words.update(held)
            word_fields.update([name] if held else [])
            free.update([name] if _is_free(field.annotation) else [])
    return frozenset(fields), frozenset(words), frozenset(word_fields), frozenset(free)


assert openai and anthropic, "their types are looked at because they were imported"
FIELDS, WORDS, _WORD_FIELDS, _FREE_FIELDS = _vocabulary()


class Shaper:
    """Makes the shape of one body. Equal texts have the same mark, which nobody can compute without the `salt`."""

    def __init__(self, salt: bytes) -> None:
        self._salt = salt
        self._names: dict[str, str] = {}

    def shape(self, value: Any, field: str = "", *, is_free: bool = False) -> Any:
        """`field`: the name of the value's field. `is_free`: it is in an object whose fields no protocol defines."""
        match value:
            case dict() if field == "logit_bias":
                return {BIASES: len(value)}
            case [bool() | int(), *_] if field in ("prompt", "stop_token_ids"):
                return {TOKENS: len(value)}
            case dict():
                return {
                    self._field(name, is_free): self.shape(inner, name, is_free=is_free or _begins_free(name, inner))
                    for name, inner in value.items()
                }
            case list():
                return [self.shape(item, field, is_free=is_free) for item in value]
            case str():
                return self._text(value, field)
            case int() | float() if is_free and not isinstance(value, bool) and field not in _SCHEMA_NUMBERS:
                return type(value)(0 if not value else 1)
            case _:
                return value

    def _field(self, name: str, is_free: bool) -> str:
        """Return the name of a field, or a replacement for a name that only the client defines."""
        is_plain = _FIELD.fullmatch(name) and not _PSEUDONYM.fullmatch(name)
        if name in FIELDS or (is_plain and not is_free):
            return name
        return self._name(name)

    def _name(self, name: str) -> str:
        return self._names.setdefault(name, f"name{len(self._names) + 1}")

    def _text(self, text: str, field: str) -> Any:
        if not text or (field in _WORD_FIELDS and (text in WORDS or _VERSIONED.fullmatch(text))):
            return text
        if field in _NAMES:
            return self._name(text)
        head, mark, _ = text[:100].partition(";base64,")
        if mark and head.startswith("data:"):
            media = head.removeprefix("data:")
            return {DATA: len(text), "media": media if _MEDIA_TYPE.fullmatch(media) else "other"}
        if field == "data":
            return {DATA: len(text)}
        if field == "media_type" and _MEDIA_TYPE.fullmatch(text):
            return text
        if field == "arguments" and (inner := _json(text)) is not None:
            return {JSON: self.shape(inner, is_free=True)}
        num_bytes = len(text.encode("utf-8", "replace"))
        mark = hashlib.blake2b(text.encode("utf-8", "replace"), key=self._salt, digest_size=6).hexdigest()
        return {TEXT: len(text), "same": mark} | ({} if num_bytes == len(text) else {"bytes": num_bytes})


def _begins_free(name: str, value: Any) -> bool:
    return name not in FIELDS or (name in _FREE_FIELDS and isinstance(value, dict))


def _json(text: str) -> Any:
    """The object that a text holds; None if it holds none."""
    try:
        value = json_in(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def without_quotes(message: str) -> str:
    """Return an error's message without the client's words that it quotes. Paths of the protocol's own fields stay."""

    def keep(quote: re.Match[str]) -> str:
        words = re.findall(r"[^\W\d]\w*", quote[2])
        return quote[0] if all(word in FIELDS or word in WORDS for word in words) else f"{quote[1]}…{quote[1]}"

    return _QUOTED.sub(keep, message)


def filled(shape: Any) -> Any:
    """Make a body of this shape. Texts are as long in characters and bytes as they were, and equal ones are equal."""
    match shape:
        case {"~text": int(num_chars)}:
            return _filler(num_chars, shape.get("bytes", num_chars), str(shape.get("same", "")))
        case {"~data": int(num_chars)}:
            head = f"data:{shape['media']};base64," if "media" in shape else ""
            return head + "A" * (num_chars - len(head))
        case {"~json": inner}:
            return json.dumps(filled(inner), ensure_ascii=False)
        case {"~tokens": int(count)}:
            return [100 + number % 100 for number in range(count)]
        case {"~biases": int(count)}:
            return {str(number): 0.0 for number in range(count)}
        case dict():
            return {name: filled(inner) for name, inner in shape.items()}
        case list():
            return [filled(item) for item in shape]
        case _:
            return shape


def _filler(num_chars: int, num_bytes: int, seed: str) -> str:
    """Make words of small letters. If there are more bytes than characters, the first letters have several bytes."""
    extra = max(0, min(num_bytes - num_chars, 3 * num_chars))
    size, rest = divmod(extra, num_chars) if num_chars else (0, 0)
    wide = ("e", "é", "語", "😀", "😀")
    start = wide[size + 1] * rest + (wide[size] * (num_chars - rest) if size else "")
    pick = random.Random(seed)
    letters = pick.choices(_LETTERS + "  ", k=num_chars - len(start))
    return start + "".join(letters)
