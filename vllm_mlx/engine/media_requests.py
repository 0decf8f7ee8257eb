"""Reads the documents of requests, and renders their images and videos. Knows no prompt."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace

from ..core.errors import InvalidDocument
from ..core.messages import DocumentPart, MediaPart, ShownPart, TextPart
from ..core.request import Request
from ..media.decode import Decoded
from ..media.documents import DocumentText
from ..media.loader import MediaLoader
from ..media.rendered import RenderedMedia
from ..media.sources import document_parts, naming, replace_parts
from ..media.vision import VisionProcessor
from ..util.tasks import Deadline


@dataclass(frozen=True, slots=True)
class OwnMedia:
    """Renders the images and videos of requests with one salt: at first, and again when an encoder needs its inputs."""

    vision: VisionProcessor
    loader: MediaLoader
    salt: str
    wake: Callable[[], None]
    digest: bytes | None = None  # of the first rendering, which the next one must equal

    def recall(self, part: MediaPart, content: bytes) -> RenderedMedia | None:
        return None if self.digest is not None else self.vision.recall(part, content, self)

    def render(self, part: MediaPart, content: bytes, decoded: Decoded) -> RenderedMedia:
        if self.digest is not None:
            return self.vision.render_again(part, decoded, self.digest)
        return self.vision.render(part, content, decoded, self)

    def start_again(self, part: MediaPart, digest: bytes) -> "Future[RenderedMedia]":
        """Start to render a part again. Called on the engine thread."""
        made = self.loader.start(part, replace(self, digest=digest), self.salt)
        made.add_done_callback(lambda _: self.wake())
        return made


@dataclass(frozen=True, slots=True)
class MediaRequests:
    """Reads documents, and renders images and videos. A known image or video is decoded only to be encoded."""

    vision: VisionProcessor | None  # None for a model that takes no images
    loader: MediaLoader
    wake: Callable[[], None]  # called when encoder inputs were made again

    @property
    def pixels_bytes(self) -> int:
        return self.loader.decoded.used_bytes

    async def close(self) -> None:
        await self.loader.close()

    async def read_documents(self, request: Request, *, deadline: Deadline) -> Request:
        """Return the request with its documents replaced by texts and images.

        A line of text with the reason replaces a document that cannot be read. Raises InvalidDocument if the user has
        just sent it, and the error of the deadline.
        """
        if not (asked := document_parts(request)):
            return request
        read = await self.loader.read(tuple(asked), salt=request.cache_salt, tenant=request.tenant, deadline=deadline)
        parts: dict[DocumentPart, tuple[ShownPart, ...]] = {}
        for number, (part, found) in enumerate(read.items(), 1):
            if isinstance(found, DocumentText):
                parts[part] = found.parts
                continue
            if asked[part]:
                with naming(part, number):
                    raise InvalidDocument(found.reason)
            parts[part] = (TextPart(f"[This document could not be read: {found.reason}]"),)
        return replace_parts(request, parts)

    async def render(
        self, parts: tuple[MediaPart, ...], *, salt: str, tenant: str, deadline: Deadline
    ) -> dict[MediaPart, RenderedMedia]:
        """Return every part as it was rendered before, or else render it from its pixels.

        Raises RequestError, and the error of the deadline.
        """
        assert self.vision is not None, "a model that takes no images refuses them before"
        media = OwnMedia(self.vision, self.loader, salt, self.wake)
        return await self.loader.load(parts, media, salt=salt, tenant=tenant, deadline=deadline)
