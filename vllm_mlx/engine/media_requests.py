"""A request's pictures on their way to the tower: found, shown to the processor, made into tensors again."""

import asyncio
import logging
import math
from collections.abc import Callable
from functools import partial

from ..core.deadline import Deadline
from ..core.errors import GenerationError, InvalidImage, VLLMMLXError
from ..core.messages import MediaPart
from ..core.request import Request
from ..core.tracebacks import clear_locals
from ..media.encoder_inputs import MediaInputs
from ..media.loader import MediaLoader
from ..media.rendered import RenderedMedia
from ..media.vision import PixelsNeeded
from ..media.workers import Workers
from ..prompt.processor import PreparedRequest, RequestProcessor
from .prompt_pool import PromptPool

logger = logging.getLogger(__name__)


class MediaRequests:
    """Used on one event loop. A turn that brings known pictures back decodes none, unless the tower has to run.

    What a large picture stands for takes seconds to find: neither texts nor known pictures wait behind it.
    """

    def __init__(self, processor: RequestProcessor, loader: MediaLoader, pool: PromptPool, wake: Callable[[], None]):
        """`pool`: for prompts; `wake`: called on the event loop when tensors are there that a row waits for."""
        self._processor = processor
        self._loader = loader
        self._pool = pool
        self._renderer = Workers(1, "pictures")  # the processor is one at a time anyway
        self._wake = wake
        self._tasks: set[asyncio.Task[None]] = set()

    async def prepare(self, request: Request, deadline: Deadline, *, is_long: bool = False) -> PreparedRequest:
        """Of a request that shows something. Raises RequestError, and what the deadline raises.

        `is_long`: its text takes long to tokenise.
        """
        try:
            try:
                return await self._prepare(request, deadline, is_long=is_long, whole=False)
            except PixelsNeeded:
                pass
            return await self._prepare(request, deadline, is_long=is_long, whole=True)
        except BaseException as error:
            clear_locals(error)  # pixels, tensors and texts: a handler that keeps the error does not keep these
            raise

    async def close(self) -> None:
        self._renderer.close()
        await self._loader.close()

    async def _prepare(self, request: Request, deadline: Deadline, *, is_long: bool, whole: bool) -> PreparedRequest:
        loop = asyncio.get_running_loop()
        parts, remake = self._processor.media_of(request), partial(self._ask, loop)
        prompts = partial(self._pool.run, tenant=request.tenant, deadline=deadline)
        async with self._loader.shown(parts, salt=request.cache_salt, whole=whole, deadline=deadline) as shown:
            show = partial(self._processor.show, request, shown, remake)
            try:
                known = await prompts(partial(show, known_only=True))
            except PixelsNeeded:
                renditions: dict[MediaPart, RenderedMedia] = {}
                for part in dict.fromkeys(parts):  # one at a time, so that other requests have theirs in between
                    render_one = partial(self._processor.show_part, request, part, shown, remake)
                    renditions[part] = await self._renderer.run(deadline, render_one)
                known = await prompts(partial(self._processor.with_media, request, renditions))
        return await prompts(partial(self._processor.prepare, *known, deadline=deadline), is_long=is_long)

    def _ask(self, loop: asyncio.AbstractEventLoop, part: MediaPart, salt: str, tensors: MediaInputs) -> None:
        """On the engine thread."""
        try:
            loop.call_soon_threadsafe(self._start, part, salt, tensors)
        except RuntimeError:  # the loop is closed
            tensors.fail(GenerationError("The server is shutting down."))

    def _start(self, part: MediaPart, salt: str, tensors: MediaInputs) -> None:
        task = asyncio.get_running_loop().create_task(self._remake(part, salt, tensors))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _remake(self, part: MediaPart, salt: str, tensors: MediaInputs) -> None:
        try:
            async with self._loader.shown([part], salt=salt) as shown:
                render = partial(self._processor.render, part, shown)
                rendition = await self._renderer.run(Deadline(math.inf, ""), render)
            if rendition.digest != tensors.digest:
                raise InvalidImage(f"The picture of `{part.param}` is another one by now.", param=part.param)
            tensors.put(rendition.pieces)
        except VLLMMLXError as error:
            tensors.fail(error)
        except Exception as error:  # whatever it is, the row that waits must learn of it
            logger.exception("MediaInputs could not be made again")
            tensors.fail(GenerationError(f"The tensors of `{part.param}` could not be made again: {error}"))
        self._wake()
