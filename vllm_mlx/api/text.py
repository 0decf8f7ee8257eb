"""Well-formed text, and the JSON that a text holds.

A client that cuts a string inside an emoji sends half a surrogate pair, which no tokenizer takes. It is replaced where
texts come in: the server does it when it parses a body, the Python API with its arguments. Inside, texts are trusted.
"""

import json
from collections.abc import Mapping
from typing import Any

RAW_ARGUMENTS = "_raw"
MAX_DEPTH = 128  # of objects and lists in each other: what walks over them recurses


def well_formed(text: str) -> str:
    """`text` with each lone surrogate replaced by U+FFFD and each split pair joined."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def well_formed_json(value: Any) -> Any:
    """The same for every text inside a JSON value, names of fields included. Anything else stays as it is."""
    match value:
        case str():
            return well_formed(value)
        case Mapping():
            return {well_formed_json(name): well_formed_json(each) for name, each in value.items()}
        case list() | tuple():
            return [well_formed_json(each) for each in value]
        case _:
            return value


def json_in(text: str) -> Any:
    """The JSON value that a text holds. Raises ValueError for other texts, and for a value that nests too deep."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it nests too deep") from None
    if is_deeper(value, MAX_DEPTH):
        raise ValueError("it nests too deep")
    return well_formed_json(value) if r"\ud" in text or r"\uD" in text else value


def is_deeper(value: Any, max_depth: int) -> bool:
    """Level by level, so that this itself needs no stack."""
    level = [value]
    for _ in range(max_depth + 1):
        inside = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        if not inside:
            return False
        level = [each for part in inside for each in part if isinstance(each, dict | list)]
    return True


def decode_arguments(text: str | dict[str, Any] | None) -> dict[str, Any]:
    """The arguments of a past call, which templates read as a dict.

    Clients replay calls that were cut off, so text that is no JSON object is kept whole under `RAW_ARGUMENTS`;
    nothing at all is an empty dict.
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
