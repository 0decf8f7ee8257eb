"""What every protocol's errors are to the server. Knows no envelope."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..core.errors import VLLMMLXError
from .reply import Reply


@dataclass(frozen=True, slots=True)
class HTTPError:
    """Everything but the headers that HTTP itself asks for. `code` is the stable word for the log."""

    status: int
    body: Reply
    code: str | None = None
    retry_after_s: float | None = None


class ErrorEncoder(Protocol):
    """One protocol's envelope."""

    def error(self, error: VLLMMLXError) -> HTTPError: ...

    def status(self, status: int, message: str) -> HTTPError:
        """For errors that HTTP itself found: unknown route, wrong method, no key, too large, our own bug."""
        ...

    def validation(self, errors: Sequence[Mapping[str, Any]], body: Any) -> HTTPError:
        """`errors` as pydantic lists them, `loc` starting inside `body`."""
        ...
