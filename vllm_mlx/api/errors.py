"""What every protocol's errors are to the server. Knows no envelope."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from pydantic import AfterValidator

from ..core.errors import VLLMMLXError

MAX_WORDS = 1_000  # characters


def _bounded(words: str) -> str:
    return words if len(words) <= MAX_WORDS else f"{words[:MAX_WORDS]}…"


Words = Annotated[str, AfterValidator(_bounded)]  # of an error, in every envelope: it may quote what a client sent

CANCELLED = "request_cancelled"
CANCELLED_STATUS = 499  # clients send again what failed with 5xx, 408, 409 or 429


class Described(Protocol):
    @property
    def message(self) -> str: ...


class ErrorBody(Protocol):
    """What the envelopes have in common."""

    @property
    def error(self) -> Described: ...

    def to_json(self) -> str: ...


@dataclass(frozen=True, slots=True)
class HTTPError:
    """Everything but the headers that HTTP itself asks for. `code` is the stable word for the log."""

    status: int
    body: ErrorBody
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
