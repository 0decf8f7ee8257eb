"""Arguments of a tool call, as templates and clients read them. Knows no protocol."""

from typing import Any

from .text import json_in

RAW_ARGUMENTS = "_raw"


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
