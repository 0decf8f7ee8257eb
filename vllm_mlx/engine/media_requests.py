"""Reads the documents of requests, renders their images and videos, and makes encoder inputs again on demand."""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from ..core.errors import GenerationError, InvalidDocument, ShuttingDown, VLLMMLXError
from ..core.messages import DocumentPart, MediaPart, ShownPart, TextPart
from ..core.request import Request
from ..core.tasks import Deadline
from ..media.documents import DocumentText
from ..media.loader import MediaLoader
from ..media.parts import document_parts, naming, replace_documents
from ..media.rendered import MediaInputs, RenderedMedia
from ..media.vision import VisionProcessor

logger = logging.getLogger(__name__)


class MediaRequests:
    """Used on one event loop. Media that were rendered before are not decoded again until they have to be encoded."""

    def __init__(self, vision: VisionProcessor | None, loader: MediaLoader, wake: Callable[[], None]):
        """`vision` is None for a model that takes no images.

        `wake` is called on the event loop when encoder inputs are ready that a row waits for.
        """
        self._vision = vision
        self._loader = loader
        self._wake = wake
        self._tasks: set[asyncio.Task[Any]] = set()

    async def close(self) -> None:
        await self._loader.close()

    async def read_documents(self, request: Request, *, deadline: Deadline) -> Request:
        """The request with texts and images in the place of its documents.

        If one cannot be read, a line of text says why. Raises InvalidDocument if the user has just sent it, and what
        the deadline raises.
        """
        if not (asked := document_parts(request)):
            return request
        read = await self._loader.read(tuple(asked), salt=request.cache_salt, tenant=request.tenant, deadline=deadline)
        parts: dict[DocumentPart, tuple[ShownPart, ...]] = {}
        for number, (part, found) in enumerate(read.items(), 1):
            if isinstance(found, DocumentText):
                parts[part] = found.parts
                continue
            if asked[part]:
                with naming(part, number):
                    raise InvalidDocument(found.reason)
            parts[part] = (TextPart(f"[This document could not be read: {found.reason}]"),)
        return replace_documents(request, parts)

    async def render(
        self, parts: tuple[MediaPart, ...], *, salt: str, tenant: str, deadline: Deadline
    ) -> dict[MediaPart, RenderedMedia]:
        """Every part as it was rendered before, or else rendered from its pixels.

        Raises RequestError, and what the deadline raises.
        """
        assert self._vision is not None, "a model that takes no images refuses them before"
        remake = partial(self._ask, asyncio.get_running_loop(), salt)
        render, recall = partial(self._vision.render, remake), partial(self._vision.recall, remake)
        return await self._loader.load(parts, render, salt=salt, tenant=tenant, recall=recall, deadline=deadline)

    def _ask(self, loop: asyncio.AbstractEventLoop, salt: str, part: MediaPart, inputs: MediaInputs) -> None:
        """Called on the engine thread."""
        try:
            loop.call_soon_threadsafe(self._start, salt, part, inputs)
        except RuntimeError:  # the loop is closed
            inputs.fail(ShuttingDown())

    def _start(self, salt: str, part: MediaPart, inputs: MediaInputs) -> None:
        assert self._vision is not None, "it has encoder inputs"
        remade = self._loader.load([part], partial(self._vision.render_again, inputs), salt=salt)
        task = asyncio.get_running_loop().create_task(remade)
        self._tasks.add(task)
        task.add_done_callback(partial(self._remade, part, inputs))

    def _remade(self, part: MediaPart, inputs: MediaInputs, task: "asyncio.Task[Any]") -> None:
        """Wake the engine. An error ends the row that waits for these encoder inputs, and no other row."""
        self._tasks.discard(task)
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if isinstance(error, VLLMMLXError):
            inputs.fail(error)
        elif error is not None:
            logger.error("Encoder inputs could not be made again", exc_info=error)
            inputs.fail(GenerationError(f"The encoder inputs of `{part.param}` could not be made again: {error}"))
        self._wake()
