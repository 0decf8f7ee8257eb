"""Well-formed text, and JSON inside of text.

A client that cuts a string inside an emoji sends half a surrogate pair, which no tokenizer accepts. The server replaces
it when it parses a body, the Python API in its arguments. All other code trusts that texts are well formed.
"""

import json
from collections.abc import Mapping
from typing import Any

RAW_ARGUMENTS = "_raw"
MAX_DEPTH = 128  # levels of nested objects and lists: the code that walks over them recurses


def well_formed(text: str) -> str:
    """The text with every lone surrogate replaced by U+FFFD and every split pair joined."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def well_formed_json(value: Any) -> Any:
    """The JSON value with every text in it well formed, names of fields included."""
    match value:
        case str():
            return well_formed(value)
        case Mapping():
            return {well_formed_json(name): well_formed_json(member) for name, member in value.items()}
        case list() | tuple():
            return [well_formed_json(item) for item in value]
        case _:
            return value


def json_in(text: str) -> Any:
    """Parse a text as JSON. Raises ValueError if it is not JSON or nests too deeply."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it nests too deep") from None
    if is_deeper(value, MAX_DEPTH):
        raise ValueError("it nests too deep")
    return well_formed_json(value) if r"\ud" in text or r"\uD" in text else value


def is_deeper(value: Any, max_depth: int) -> bool:
    """Whether JSON has more than `max_depth` levels. Looks level by level, so it does not recurse itself."""
    level = [value]
    for _ in range(max_depth + 1):
        inside = [node.values() if isinstance(node, dict) else node for node in level if isinstance(node, dict | list)]
        if not inside:
            return False
        level = [member for members in inside for member in members if isinstance(member, dict | list)]
    return True


def decode_arguments(text: str | dict[str, Any] | None) -> dict[str, Any]:
    """The arguments of a past call as a dict, which is what templates read.

    Clients send calls back that were cut off: text that is not a JSON object is kept under `RAW_ARGUMENTS`. Missing
    arguments are an empty dict.
    """
    if isinstance(text, dict):
        return text
    if text is None or not text.strip():
        return {}
    try:
        value = json_in(text)
    except ValueError:
        value = text
    match value:
        case dict():
            return value
        case None:
            return {}
        case _:
            return {RAW_ARGUMENTS: text}
