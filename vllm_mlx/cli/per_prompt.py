"""`--limit-mm-per-prompt`, as vLLM spells it: `image=4,video=1`, or `{"image": 4}`. Knows no other setting."""

import json
import re
from typing import Any

from ..core.config import MediaConfig

_HINT = 'write image=4,video=1, or {"image": 4, "video": 1}'
_PAIR = re.compile(r"\s*(\w+)\s*=\s*(\d{1,9})\s*")
DEFAULT = f"image={MediaConfig().max_images},video={MediaConfig().max_videos}"


def parse_limit(value: object) -> str:
    """As `image=4,video=1`; what is left out has its default. Raises ValueError."""
    limits = value if isinstance(value, dict) else _limits(str(value))
    known = {**max_per_prompt(DEFAULT), **limits}
    if not limits or any(type(number) is not int or number < 0 for number in limits.values()):
        raise ValueError(_HINT)
    for kind in limits.keys() - {"image", "video"}:
        if limits[kind] != 0:
            raise ValueError(f"this server takes no {kind}; {_HINT}")
    return f"image={known['image']},video={known['video']}"


def max_per_prompt(limit: str) -> dict[str, int]:
    """By kind, of what `parse_limit` returned."""
    return {kind: int(number) for kind, _, number in (part.partition("=") for part in limit.split(","))}


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
