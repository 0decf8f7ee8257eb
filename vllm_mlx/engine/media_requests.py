"""Renders the images and videos of requests, and makes their encoder inputs again when the engine needs them."""

import asyncio
import logging
import math
from collections.abc import Callable
from functools import partial

from ..core.errors import GenerationError, InvalidImage, VLLMMLXError
from ..core.messages import MediaPart
from ..core.tasks import Deadline
from ..media.limits import Workers
from ..media.loader import MediaLoader
from ..media.parts import located, numbered
from ..media.pixels import Decoded
from ..media.rendered import MediaInputs, RenderedMedia
from ..media.vision import VisionProcessor

logger = logging.getLogger(__name__)


class MediaRequests:
    """Used on one event loop. Media that were rendered before are not decoded again until they have to be encoded.

    Rendering a large image takes seconds: neither texts nor known images wait behind it.
    """

    def __init__(self, vision: VisionProcessor, loader: MediaLoader, wake: Callable[[], None]):
        """`wake` is called on the event loop when encoder inputs are ready that a row waits for."""
        self._vision = vision
        self._loader = loader
        self._renderer = Workers(1, "media renderer")  # one thread: the checkpoint's processor takes one at a time
        self._wake = wake
        self._tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        self._renderer.close()
        await self._loader.close()

    async def render(
        self, parts: tuple[MediaPart, ...], *, salt: str, deadline: Deadline
    ) -> dict[MediaPart, RenderedMedia]:
        """Every part as it was rendered before, or else rendered from its pixels.

        Raises RequestError, and what the deadline raises.
        """
        loop = asyncio.get_running_loop()

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
        task.add_done_callback(partial(self._remade, part, inputs))

    async def _remake(self, part: MediaPart, salt: str, inputs: MediaInputs) -> None:
        async with self._loader.load([part], salt=salt) as loaded:
            decoded = loaded[part]
            assert not isinstance(decoded, RenderedMedia), "pixels were asked for"
            await self._renderer.run(Deadline(math.inf, ""), partial(self._vision.render_again, part, decoded, inputs))

    def _remade(self, part: MediaPart, inputs: MediaInputs, task: "asyncio.Task[None]") -> None:
        """Wake the engine. An error ends the row that waits for these encoder inputs, and no other row."""
        self._tasks.discard(task)
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if isinstance(error, VLLMMLXError):
            inputs.fail(error)
        elif error is not None:
            logger.error("Encoder inputs could not be made again", exc_info=error)
            inputs.fail(GenerationError(f"The encoder inputs of `{part.param}` could not be made again: {error}"))
        self._wake()
