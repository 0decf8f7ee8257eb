"""`--limit-mm-per-prompt`, as vLLM spells it: `image=4`, or `{"image": 4}`. Knows no other setting."""

import json
import re
from typing import Any

_HINT = 'write image=4, or {"image": 4}'
_PAIR = re.compile(r"\s*(\w+)\s*=\s*(\d{1,9})\s*")


def parse_limit(value: object) -> str:
    """As `image=4`. Raises ValueError."""
    limits = value if isinstance(value, dict) else _limits(str(value))
    if type(limits.get("image")) is not int or limits["image"] < 0:
        raise ValueError(_HINT)
    for kind, number in limits.items():
        if kind != "image" and number != 0:
            raise ValueError(f"this server takes no {kind}; {_HINT}")
    return f"image={limits['image']}"


def max_per_prompt(limit: str) -> int:
    """Of what `parse_limit` returned."""
    return int(limit.partition("=")[2])


def _limits(text: str) -> dict[str, Any]:
    if text.lstrip().startswith("{"):
        try:
            return dict(json.loads(text))
        except ValueError as error:
            raise ValueError(_HINT) from error
    found = [_PAIR.fullmatch(part) for part in text.split(",")]
    if None in found:
        raise ValueError(_HINT)
    return {match[1]: int(match[2]) for match in found if match is not None}
