"""Prepares prompts from requests, off the event loop, each within one deadline. It knows nothing of the engine."""

import asyncio
import math
import time
from collections.abc import Callable, Iterable
from functools import partial

from ..core.errors import Cancelled, GenerationError, InvalidImage, VLLMMLXError, setting
from ..core.fence import Fence, clear_locals
from ..core.messages import MediaPart, Part, ReasoningPart, TextPart, ToolResultPart
from ..core.request import Request
from ..core.tasks import Deadline
from ..media.limits import Workers
from ..media.loader import MediaLoader
from ..media.parts import located, numbered
from ..media.pixels import Decoded
from ..media.rendered import MediaInputs, RenderedMedia
from ..media.vision import VisionProcessor
from ..prompt.processor import PreparedRequest, RequestProcessor
from .monitoring.counters import ReplyStats
from .prompt_pool import PromptPool

LONG_CHARS = 1_000_000  # tokenising so many characters takes about a second


class Preparations:
    """All requests that are being prepared. Belongs to one event loop."""

    def __init__(
        self, processor: RequestProcessor, media: "MediaRequests | None", pool: PromptPool, *, max_prepare_s: float
    ):
        self._processor = processor
        self._media = media
        self._pool = pool
        self._max_prepare_s = max_prepare_s
        self._open: set[_Preparation] = set()

    @property
    def replies(self) -> list[ReplyStats]:
        """The progress of the replies whose prompts are being prepared."""
        return [reply for preparation in self._open for reply in preparation.replies]

    async def prepare(self, request: Request) -> PreparedRequest:
        """Prepare a prompt. Work that nobody waits for any more ends at its next check of the deadline.

        Raises RequestError, and Cancelled after `cancel`.
        """
        deadline = Deadline(
            self._max_prepare_s,
            f"This request took more than {self._max_prepare_s:g} seconds to prepare ({setting('max_prepare_s')}). "
            "Send a shorter one, or try again when the server is less busy.",
        )
        preparation = _Preparation(request, asyncio.current_task())
        self._open.add(preparation)
        try:
            async with asyncio.timeout(deadline.remaining_s):
                return await self._prepare(request, deadline)
        except TimeoutError:
            deadline.check()
            raise
        except asyncio.CancelledError:
            if preparation.is_cancelled and preparation.task is not None and not preparation.task.uncancel():
                raise Cancelled() from None
            raise
        finally:
            self._open.discard(preparation)
            deadline.cancel()

    def cancel(self, request_id: str, *, salts: str = "") -> bool:
        """End the preparation of a request with Cancelled.

        Returns False if no request that is prepared has this id and a salt that begins with `salts`.
        """
        found = [preparation for preparation in self._open if preparation.matches(request_id, salts)]
        for preparation in found:
            preparation.cancel()
        return bool(found)

    async def close(self) -> None:
        if self._media is not None:
            await self._media.close()

    async def _prepare(self, request: Request, deadline: Deadline) -> PreparedRequest:
        """Prepare on a prompt thread, with the media first. Media that the model does not take is never fetched."""
        if self._processor.media_of(request) and self._media is not None:
            return await self._media.prepare(request, deadline, is_long=is_long(request))
        work = partial(self._processor.prepare, request, deadline=deadline)
        return await self._pool.run(work, tenant=request.tenant, deadline=deadline, is_long=is_long(request))


class _Preparation:
    """One request that a task prepares."""

    def __init__(self, request: Request, task: "asyncio.Task[object] | None"):
        self.request = request
        self.task = task
        self.is_cancelled = False
        now, num_choices = time.monotonic(), request.sampling.n
        ids = [request.request_id if num_choices == 1 else f"{request.request_id}-{i}" for i in range(num_choices)]
        self.request_ids = {request.request_id, *ids}
        self.replies = [
            ReplyStats(
                request_id=reply_id,
                tenant=request.tenant,
                prompt_tokens=0,
                max_tokens=request.sampling.max_tokens or 0,
                arrived_s=now if request.arrived_s is None else request.arrived_s,
                queued_s=now,
            )
            for reply_id in ids
        ]

    def matches(self, request_id: str, salts: str) -> bool:
        return self.request.cache_salt.startswith(salts) and request_id in self.request_ids

    def cancel(self) -> None:
        if self.task is not None and not self.is_cancelled:
            self.is_cancelled = True
            self.task.cancel()


def is_long(request: Request) -> bool:
    texts = [request.prompt] if isinstance(request.prompt, str) else []
    num_chars = sum(map(len, texts))
    return num_chars + sum(_num_chars(message.parts) for message in request.messages or ()) >= LONG_CHARS


def _num_chars(parts: Iterable[Part]) -> int:
    count = 0
    for part in parts:
        if isinstance(part, TextPart | ReasoningPart):
            count += len(part.text)
        elif isinstance(part, ToolResultPart):
            count += _num_chars(part.content)
    return count


class MediaRequests:
    """Used on one event loop. Media that were rendered before are not decoded again until they have to be encoded.

    Rendering a large image takes seconds: neither texts nor known images wait behind it.
    """

    def __init__(
        self,
        processor: RequestProcessor,
        vision: VisionProcessor,
        loader: MediaLoader,
        pool: PromptPool,
        wake: Callable[[], None],
    ):
        """`pool`: for prompts; `wake`: called on the event loop when encoder inputs are ready that a row waits for."""
        self._processor = processor
        self._vision = vision
        self._loader = loader
        self._pool = pool
        self._renderer = Workers(1, "media renderer")  # one thread: the checkpoint's processor takes one at a time
        self._wake = wake
        self._tasks: set[asyncio.Task[None]] = set()

    async def prepare(self, request: Request, deadline: Deadline, *, is_long: bool = False) -> PreparedRequest:
        """Prepare a request that holds media. Raises RequestError, and what the deadline raises.

        `is_long`: its text takes long to tokenise.
        """
        try:
            rendered = await self._rendered(request, self._processor.media_of(request), deadline)
            prepare = partial(self._processor.prepare, request, rendered, deadline=deadline)
            return await self._pool.run(prepare, tenant=request.tenant, deadline=deadline, is_long=is_long)
        except BaseException as error:
            clear_locals(error)  # so that a handler that keeps the error keeps no pixels, arrays or texts
            raise

    async def close(self) -> None:
        self._renderer.close()
        await self._loader.close()

    async def _rendered(
        self, request: Request, parts: tuple[MediaPart, ...], deadline: Deadline
    ) -> dict[MediaPart, RenderedMedia]:
        """Every part as it was rendered before, or else rendered from its pixels."""
        salt, loop = request.cache_salt, asyncio.get_running_loop()

        def recall(part: MediaPart, digest: bytes) -> RenderedMedia | None:
            return self._vision.recall(part, digest, salt=salt, remake=partial(self._ask, loop, part, salt))

        def render(part: MediaPart, decoded: Decoded) -> RenderedMedia:
            try:
                return self._vision.render(part, decoded, salt=salt, remake=partial(self._ask, loop, part, salt))
            except InvalidImage as error:
                number = next(number for number, other in numbered(parts) if other == part)
                raise located(error, number, part) from error

        async with self._loader.load(parts, salt=salt, recall=recall, deadline=deadline) as loaded:
            rendered: dict[MediaPart, RenderedMedia] = {}
            for part, media in loaded.items():  # one at a time, so that other requests take turns
                if isinstance(media, RenderedMedia):
                    rendered[part] = media
                else:
                    rendered[part] = await self._renderer.run(deadline, partial(render, part, media))
            return rendered

    def _ask(self, loop: asyncio.AbstractEventLoop, part: MediaPart, salt: str, inputs: MediaInputs) -> None:
        """Called on the engine thread."""
        try:
            loop.call_soon_threadsafe(self._start, part, salt, inputs)
        except RuntimeError:  # the loop is closed
            inputs.fail(GenerationError("The server is shutting down."))

    def _start(self, part: MediaPart, salt: str, inputs: MediaInputs) -> None:
        task = asyncio.get_running_loop().create_task(self._remake(part, salt, inputs))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _remake(self, part: MediaPart, salt: str, inputs: MediaInputs) -> None:
        with Fence("all rows but the one that waits for these encoder inputs") as fence:
            try:
                async with self._loader.load([part], salt=salt) as loaded:
                    decoded = loaded[part]
                    assert not isinstance(decoded, RenderedMedia), "pixels were asked for"
                    render = partial(self._vision.render_again, part, decoded, inputs)
                    await self._renderer.run(Deadline(math.inf, ""), render)
            except VLLMMLXError as error:
                inputs.fail(error)
        if (failure := fence.error) is not None:
            inputs.fail(GenerationError(f"The encoder inputs of `{part.param}` could not be made again: {failure}"))
        self._wake()
