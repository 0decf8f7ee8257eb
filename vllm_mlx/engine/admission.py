"""Limits how many requests run and wait, and how long each may take. It knows neither texts nor token ids."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from collections.abc import Sequence as Items
from contextlib import asynccontextmanager
from typing import NoReturn, Protocol

from ..core.config import EngineConfig
from ..core.errors import ModelUnavailable, TimeLimit, TooManyRequests, VLLMMLXError, setting
from ..core.request import Request
from ..scheduler.residence import Resident
from ..util.tenants import has_room
from .monitoring.counters import ReplyStats

_LEAST_WAIT_S, _LONGEST_WAIT_S = 1.0, 30.0  # bounds of the time after which a refused client may retry
_REFUSALS_PER_S = 20  # per tenant; others are delayed, because clients that retry immediately cost time
_QUICK_REFUSALS = 10  # per tenant, never delayed
_LONGEST_HOLD_S = 30.0
_MOST_SHOWN = 5  # requests that an error names
Party = tuple[str, int]  # a tenant, and the position of a model: each model has its own places


class Admitted(Protocol):
    """A request whose replies run or wait."""

    request: Request

    @property
    def replies(self) -> Collection[ReplyStats]: ...

    def put(self, item: VLLMMLXError) -> None:
        """End all replies with this error."""


class Refusals:
    """Spaces out the refusals of each tenant, so that its clients do not all return at the same moment."""

    def __init__(self) -> None:
        self._next_s: dict[str, float] = {}  # when the next refusal of a tenant is due

    def hold_s(self, tenant: str, now: float) -> float:
        """Return the time to delay a refusal. This slows down clients that ignore the time that a refusal names."""
        earliest_s = now - (_QUICK_REFUSALS - 1) / _REFUSALS_PER_S
        due_s = min(max(earliest_s, self._next_s.get(tenant, earliest_s)), now + _LONGEST_HOLD_S)
        self._next_s[tenant] = due_s + 1 / _REFUSALS_PER_S
        return max(0.0, due_s - now)


class AdmissionQueue:
    """Decides which requests are admitted. Belongs to one event loop."""

    def __init__(
        self,
        config: EngineConfig,
        running_replies: Callable[[], Collection[ReplyStats]],
        models: Items[Resident] = (),
    ):
        """`models`: all of them, by their positions."""
        self._config, self._models = config, models
        self._running_replies = running_replies
        self.num_preparing: Counter[Party] = Counter()  # replies whose prompts are being prepared
        self.timers: dict[int, list[asyncio.TimerHandle]] = {}  # by the generation's identity
        self._refusals = Refusals()
        self.num_refused = 0

    @asynccontextmanager
    async def preparing(self, request: Request, num_choices: int) -> AsyncIterator[None]:
        """Hold a place in the queue while a request is prepared. Raises TooManyRequests if the queue is full.

        Each tenant has a share of the queue for each model. One that holds no place there finds room for one reply.
        """
        party = request.tenant, request.model
        if not self._has_room(party, num_choices):
            await self._refuse(request.tenant)
        self.num_preparing[party] += num_choices
        try:
            yield
        finally:
            self.num_preparing[party] -= num_choices
            if not self.num_preparing[party]:
                del self.num_preparing[party]

    async def check(self, tenant: str, num_models: int) -> None:
        """Raise TooManyRequests if the tenant would get no place for any request that is not read yet."""
        if not any(self._has_room((tenant, model), 1) for model in range(num_models)):
            await self._refuse(tenant)

    def _has_room(self, party: Party, num_choices: int) -> bool:
        replies, held = self._running_replies(), Counter(self.num_preparing)
        held.update((reply.tenant, reply.model) for reply in replies)
        is_first = not held[party] and (num_choices == 1 or not replies)
        return is_first or has_room(held, party, num_choices, self._config.max_num_seqs + self._config.max_queue)

    async def _refuse(self, tenant: str) -> NoReturn:
        error = self._refusal(self._running_replies())
        await asyncio.sleep(self._refusals.hold_s(tenant, time.monotonic()))
        raise error

    def _refusal(self, replies: Collection[ReplyStats]) -> TooManyRequests:
        now = time.monotonic()
        elapsed_s = sum(now - reply.arrived_s for reply in replies) / max(1, len(replies))
        self.num_refused += 1
        return TooManyRequests(
            f"The server is busy: {self._config.max_queue} requests wait in the admission queue already "
            f"({setting('max_queue')}).",
            retry_after_s=min(_LONGEST_WAIT_S, max(_LEAST_WAIT_S, elapsed_s)),
        )

    def watch(self, generation: Admitted) -> None:
        """Start the timers that end a generation when its time is over."""
        loop, config = asyncio.get_running_loop(), self._config
        timers = self.timers[id(generation)] = []
        if len(self._models) > 1:  # the first of the timers
            timers.append(loop.call_later(config.max_model_wait_s, self._waited_for_model, generation))
        if config.max_queue_s is not None:
            timers.append(loop.call_later(config.max_queue_s, self._waited, generation, config.max_queue_s))
        if config.max_request_s is not None:
            timers.append(loop.call_later(config.max_request_s, self._took, generation, config.max_request_s))

    def left(self, generation: Admitted) -> None:
        for timer in self.timers.pop(id(generation), ()):
            timer.cancel()

    def _waited(self, generation: Admitted, limit_s: float) -> None:
        replies = generation.replies
        if replies and all(reply.phase == "queued" for reply in replies):
            self.num_refused += 1
            generation.put(
                TooManyRequests(
                    f"The request waited in the admission queue for {limit_s:g} seconds ({setting('max_queue_s')}).",
                    retry_after_s=_LEAST_WAIT_S,
                )
            )

    def _waited_for_model(self, generation: Admitted) -> None:
        replies = generation.replies
        if not replies or any(reply.phase != "queued" for reply in replies):
            return
        if (others := self._in_the_way(generation.request.model)) is None:  # it is being loaded, or has room again
            loop = asyncio.get_running_loop()
            again = loop.call_later(_LEAST_WAIT_S, self._waited_for_model, generation)
            self.timers[id(generation)][0] = again  # replaces the timer that has ended
            return
        self.num_refused += 1
        limit = f"{self._config.max_model_wait_s:g} seconds ({setting('max_model_wait_s')})"
        message = f"The model had no room in memory for {limit}. In memory: {others}."
        generation.put(ModelUnavailable(message, retry_after_s=_LONGEST_WAIT_S))

    def _took(self, generation: Admitted, limit_s: float) -> None:
        if generation.replies:
            generation.put(TimeLimit(f"The request took more than {limit_s:g} seconds ({setting('max_request_s')})."))

    def _in_the_way(self, model: int) -> str | None:
        """Name the models in memory and their requests, if requests for another model wait for that memory."""
        if not (self._models[model].is_short or self._models[model].is_yielding):
            return None
        running = [reply for reply in self._running_replies() if reply.phase != "queued"]
        return "; ".join(
            f"{each.name}, which runs {users(at, running) or 'nothing'}"
            for at, each in enumerate(self._models)
            if each.takes_memory
        )


def users(model: int, replies: Iterable[ReplyStats]) -> str:
    """Name the first requests for a model."""
    running = [reply.request_id for reply in replies if reply.model == model]
    return ", ".join(running[:_MOST_SHOWN]) + (", …" if len(running) > _MOST_SHOWN else "")
