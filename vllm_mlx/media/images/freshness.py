"""How long an answer of HTTP stands for its address (RFC 9111). Reads no clock: times are seconds of the caller's."""

import re
from collections.abc import Mapping

HEURISTIC_S = 300.0  # where the server says nothing
_MAX_S = 24 * 3600.0
_MOVED_FOR_NOW = (302, 303, 307)
_DIRECTIVE = re.compile(r"([a-z-]+)(?:\s*=\s*\"?(\d+)\"?)?")


def fresh_s(status: int, headers: Mapping[str, str]) -> float:
    """Seconds for which it need not be asked again; 0: ask every time.

    It was asked for without credentials or cookies, so that it says the same to everyone.
    """
    control = dict(_DIRECTIVE.findall(headers.get("cache-control", "").lower()))
    if {"no-store", "no-cache"} & control.keys() or "*" in headers.get("vary", ""):
        return 0.0
    for name in ("s-maxage", "max-age"):
        if control.get(name):
            return max(0.0, min(_MAX_S, float(control[name][:12])) - _age_s(headers))
    if "expires" in headers or "no-cache" in headers.get("pragma", "").lower() or status in _MOVED_FOR_NOW:
        return 0.0
    return HEURISTIC_S


def _age_s(headers: Mapping[str, str]) -> float:
    age = headers.get("age", "0")
    return float(age[:12]) if age.isdecimal() else 0.0
