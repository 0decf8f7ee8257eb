"""Recent replies and errors, for those who watch: bounded, in memory. Holds no word of a prompt or a reply."""

from collections import deque
from collections.abc import Mapping
from typing import Any

MAX_ERRORS = 20
MAX_REPLIES = 30


class Recent:
    """Each entry names its `tenant`, which `visibility` takes out before anybody sees it."""

    def __init__(self) -> None:
        self._errors: deque[Mapping[str, Any]] = deque(maxlen=MAX_ERRORS)
        self._replies: deque[Mapping[str, Any]] = deque(maxlen=MAX_REPLIES)

    def add_reply(self, reply: Mapping[str, Any], *, tenant: str) -> None:
        self._replies.append({**reply, "tenant": tenant})

    def add_error(self, error: Mapping[str, Any], *, tenant: str) -> None:
        self._errors.append({**error, "tenant": tenant})

    def fields(self) -> dict[str, Any]:
        """Newest first."""
        return {"last_replies": list(reversed(self._replies)), "last_errors": list(reversed(self._errors))}
