"""A recorded session file: one JSON object a line, one request each. Sends nothing.

Fields: `session`, `t` (seconds since its session began), `method`, `endpoint`, `headers`, `fault` (the status with
which the recording server refused it, or null) and `body`.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .wire import Protocol, protocol_of

_FIELDS = ("session", "t", "method", "endpoint")


class ReplayError(Exception):
    """The trace cannot be played. The message says why."""


@dataclass(frozen=True, slots=True)
class Recorded:
    number: int  # in the file
    session: str
    at_s: float
    method: str
    endpoint: str
    headers: dict[str, str]
    body: dict[str, Any] | None

    @property
    def protocol(self) -> Protocol | None:
        """Return the protocol, or None if the request asks for no reply or its body does not fit its endpoint."""
        protocol = protocol_of(self.endpoint) if self.body is not None else None
        return protocol if protocol is not None and isinstance((self.body or {}).get(protocol.items), list) else None

    @property
    def thread(self) -> str:
        """Return the client's thread, which sends one request at a time: its main loop, a sub-agent, a title."""
        if self.protocol is None or self.body is None:
            return f"request {self.number}"
        tools = [tool.get("name") or tool.get("function", {}).get("name") for tool in self.body.get("tools") or ()]
        return f"{self.headers.get('x-claude-code-agent-id')} {bool(tools)}"


def load(path: Path, sessions: Iterable[str] = ()) -> list[Recorded]:
    """Return the requests in the order of the file: those of the named sessions, or all."""
    wanted = set(sessions)
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    found = [_recorded(number, line) for number, line in enumerate(lines, 1)]
    missing = wanted - {each.session for each in found}
    if missing:
        names = ", ".join(dict.fromkeys(each.session for each in found))
        raise ReplayError(f"{path} has no session {', '.join(sorted(missing))}. It has: {names}")
    return [each for each in found if not wanted or each.session in wanted]


def _recorded(number: int, line: str) -> Recorded:
    try:
        row = json.loads(line)
        session, at_s, method, endpoint = (row[name] for name in _FIELDS)
    except (ValueError, KeyError, TypeError) as error:
        raise ReplayError(f"Line {number} is no recorded request: {error!r}") from error
    return Recorded(number, session, float(at_s), method, endpoint, row.get("headers") or {}, row.get("body"))
