"""Calls in the ways that many models write them, for a model that does not write its own. Declared tools only."""

from dataclasses import replace
from functools import partial

from .bodies import NewBody
from .bodies.compose import Listing, choice, several
from .bodies.json_body import JsonBody
from .family import Opening, Place, ToolFormat
from .tool_formats import ARG_KEY, FUNCTION, JSON, JSON_LIST, MISTRAL, PYTHON_CALLS
from .tool_formats import TOOL_FORMATS as FAMILY_FORMATS

_BARE_JSON: NewBody = partial(JsonBody, is_bare=True)
_ANY = choice({"{": several(JSON, Listing()), "[": JSON_LIST, "<": FUNCTION}, ARG_KEY)
_LISTS = choice({"{": JSON}, JSON_LIST)
_BODIES: dict[str, NewBody] = {
    "<tool_call>": _ANY,
    "<tool_calls>": _LISTS,
    "<function_call>": _LISTS,
    "<|tool_call|>": _LISTS,
    "<longcat_tool_call>": JSON,
    "[TOOL_CALLS]": MISTRAL,
    "<|python_tag|>": several(JSON, Listing(separators=";,")),
    "<|tool_call_start|>": choice({"{": JSON}, PYTHON_CALLS),
}
_openings = [Opening(marker, body, Place.OUTSIDE_REASONING) for marker, body in _BODIES.items()]
_openings += [
    Opening("<function=", FUNCTION, Place.OUTSIDE_REASONING, keeps_marker=True),
    Opening("{", several(_BARE_JSON, Listing(separators=";,")), Place.AT_START, keeps_marker=True),
    *(
        replace(opening, place=Place.OUTSIDE_REASONING)
        for name in ("minimax_m2", "deepseek_v32", "deepseek_v4")
        for opening in FAMILY_FORMATS[name].openings
    ),
    *(replace(opening, place=Place.AT_START) for opening in FAMILY_FORMATS["pythonic"].openings),
]
_FAMILIES = ("glm45", "hermes", "hunyuan_a13b", "minimax_m2", "deepseek_v32", "deepseek_v4")
_PARTS = [FAMILY_FORMATS[name] for name in _FAMILIES]
_CLOSES = ("</function_call>", "</longcat_tool_call>", "<|tool_call_end|>")

GENERIC = ToolFormat(
    tuple(replace(opening, needs_tools=True) for opening in _openings),
    (*_CLOSES, *dict.fromkeys(close for part in _PARTS for close in part.closes)),
    inner_tags=tuple(dict.fromkeys(tag for part in _PARTS for tag in part.inner_tags)),
    is_fallback=True,
)
TOOL_FORMATS: dict[str, ToolFormat] = {**FAMILY_FORMATS, "generic": GENERIC}
