"""What the server asks of an engine. `engine.EngineClient` is one."""

from collections.abc import AsyncIterator, Iterable, Sequence
from types import TracebackType
from typing import Protocol

from prometheus_client.core import Metric

from ..api.encoder import TokenNames
from ..cache.stats import Entry
from ..core.config import ModelInfo
from ..core.events import GenerationEvent
from ..core.prompt_change import PromptChange
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
        """What kept the prompt from going on from the last one of its conversation, where that is known."""
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
        """For good: the process has to be started anew."""
        ...

    def error(self) -> str | None: ...

    async def submit(self, request: Request) -> Generation:
        """Raises RequestError before anything is generated, EngineDead if nothing can be.

        The caller enters the generation at once: one that nobody leaves is never ended. Cancelling ends the request.
        """
        ...

    async def count_tokens(self, request: Request) -> int:
        """Tokens of the prompt that `submit` would run, though it may be too long to run. Raises RequestError."""
        ...

    async def status(self) -> EngineStatus:
        """How things stand. Raises EngineDead."""
        ...

    async def metrics(self) -> Iterable[Metric]:
        """The same, as Prometheus reads it. Raises EngineDead."""
        ...

    def cancel(self, request_id: str, *, salts: str = "") -> bool:
        """End a request that `status` lists, with Cancelled. False if there is none of this id and these salts."""
        ...

    async def cache_entries(self) -> Sequence[Entry]:
        """The nodes of the prefix cache's tree. Raises EngineDead."""
        ...

    async def clear_cache(self, *, salts: str = "") -> int:
        """Forget cached state of salts that begin so; returns the bytes freed. Raises EngineDead."""
        ...

    async def shutdown(self, drain_s: float) -> None:
        """Give what runs `drain_s` to finish, then end it; every generation gets its last event."""
        ...
