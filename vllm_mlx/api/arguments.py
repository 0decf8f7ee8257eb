"""Arguments of a tool call, as templates and clients read them. Knows no protocol."""

import json
from typing import Any

from .text import well_formed, well_formed_json

RAW_ARGUMENTS = "_raw"


def decode_arguments(text: str | dict[str, Any] | None) -> dict[str, Any]:
    """The arguments of a past call, which templates read as a dict.

    Clients replay calls that were cut off, so text that is no JSON object is kept whole under `RAW_ARGUMENTS`;
    nothing at all is an empty dict.
    """
    if isinstance(text, dict):
        return dict(well_formed_json(text))
    if text is None or not text.strip():
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    match value:
        case dict():
            return dict(well_formed_json(value))
        case None:
            return {}
        case _:
            return {RAW_ARGUMENTS: well_formed(text)}
