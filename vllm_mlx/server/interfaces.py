"""The interface of an engine that the server needs. `engine.client.EngineClient` implements it."""

from collections.abc import AsyncIterator, Iterable, Sequence
from types import TracebackType
from typing import Protocol

from prometheus_client.core import Metric

from ..api.replies import TokenNames
from ..cache.stats import Entry
from ..core.config import ModelInfo
from ..core.events import GenerationEvent
from ..core.receipt import PromptChange
from ..core.request import Request
from ..engine.monitoring.schema import EngineStatus


class Generation(Protocol):
    """All choices of one request. Leaving the block aborts what still runs.

    Iterating gives (choice index, event) and ends after every choice has sent Finished or Failed.
    """

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def prompt_change(self) -> PromptChange | None:
        """Why the prompt does not continue the previous one of its conversation, if that is known."""
        ...

    async def __aenter__(self) -> object: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None: ...

    def __aiter__(self) -> AsyncIterator[tuple[int, GenerationEvent]]: ...


class Engine(Protocol):
    @property
    def info(self) -> ModelInfo: ...

    @property
    def token_names(self) -> TokenNames: ...

    @property
    def is_healthy(self) -> bool: ...

    @property
    def is_dead(self) -> bool:
        """Whether the engine has ended for good: the process must be restarted."""
        ...

    def error(self) -> str | None: ...

    async def submit(self, request: Request) -> Generation:
        """Raises RequestError before anything is generated, EngineDead if nothing can be.

        The caller must enter the generation at once, because leaving it is what ends it. Cancelling ends the request.
        """
        ...

    async def count_tokens(self, request: Request) -> int:
        """Count the tokens of the prompt that `submit` would run, even if it is too long. Raises RequestError."""
        ...

    async def status(self) -> EngineStatus:
        """The present state and figures. Raises EngineDead."""
        ...

    async def metrics(self) -> Iterable[Metric]:
        """The figures as Prometheus metrics. Raises EngineDead."""
        ...

    def cancel(self, request_id: str, *, salts: str = "") -> bool:
        """End a running request with Cancelled. False if none has this id and a salt that starts with `salts`."""
        ...

    async def cache_entries(self) -> Sequence[Entry]:
        """The nodes of the prefix cache's tree. Raises EngineDead."""
        ...

    async def clear_cache(self, *, salts: str = "") -> int:
        """Forget cached state of salts that start with `salts`. Returns the bytes freed. Raises EngineDead."""
        ...

    async def shutdown(self, drain_s: float) -> None:
        """Let running requests finish for `drain_s` seconds, then end them. Every generation gets its last event."""
        ...
