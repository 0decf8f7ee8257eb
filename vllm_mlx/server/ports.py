"""What the server asks of an engine. `engine.AsyncEngine` is one."""

from collections.abc import AsyncIterator
from types import TracebackType
from typing import Protocol

from ..api.encoder import TokenNames
from ..core.config import ModelInfo
from ..core.events import GenerationEvent
from ..core.request import Request


class Generation(Protocol):
    """All choices of one request. Leaving the block aborts what still runs.

    Iterating gives (choice index, event) and ends after every choice has sent Finished or Failed.
    """

    @property
    def num_prompt_tokens(self) -> int: ...

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

    def error(self) -> str | None: ...

    async def submit(self, request: Request) -> Generation:
        """Raises RequestError before anything is generated, EngineDead if nothing can be."""
        ...

    async def count_tokens(self, request: Request) -> int:
        """Tokens of the prompt that `submit` would run, however long it is. Raises RequestError."""
        ...

    async def shutdown(self, drain_s: float) -> None:
        """Give what runs `drain_s` to finish, then end it; every generation gets its last event."""
        ...
