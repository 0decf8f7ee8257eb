"""Finds and opens the files of a request's images, videos and documents. Decodes nothing.

A file that was decoded before is not read again if its pixels, its contents or its rendering are still known.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Generic, ParamSpec, Protocol, TypeVar

from ..core.config import MediaConfig
from ..core.errors import InvalidImage, Overloaded, setting
from ..core.memory import ByteRoom
from ..core.messages import DocumentPart, ImagePart, MediaPart, VideoPart
from ..util.fair_queue import FairQueue, FairThreads
from ..util.lru import LRU
from ..util.tasks import Deadline, together
from .decode import Decoded, ImageFile
from .documents import DocumentFile, ReadDocument
from .fetch import MediaFetcher
from .rendered import RenderedMedia
from .sources import Inline, Kind, LocalFile, MediaRoot, Remote, count_frames, megabytes, parse_source, split_frames
from .video import FrameFiles, FrameSampling, VideoFile, VideoReader

T = TypeVar("T")
P = ParamSpec("P")
M = TypeVar("M")  # the possible results of opening a file of one kind
Recalled = dict[MediaPart, RenderedMedia]  # of all parts that show a source, whose pixels are therefore not needed
DIGEST_BYTES = 16
_MAX_FETCHES, _PER_TENANT = 16, 12  # concurrent, over all requests and over those of one tenant
_FETCHES_PER_REQUEST = 4
_MAX_REQUEST_BYTES = 256 * 1024 * 1024  # the files of one request together; a request body has the same limit
MAX_FILES_BYTES = 4 * _MAX_REQUEST_BYTES  # all files that are not decoded yet
_RETRY_S = 5.0
FRESH_S = 300.0  # in which the file of an address is used again without a request
_ADDRESSES_BYTES = 2 << 20  # addresses of recent files
_ADDRESS_BYTES = 1000  # the objects of one address, without its characters


class MediaRenderer(Protocol):
    """Renders the parts of one request."""

    def recall(self, part: MediaPart, content: bytes) -> RenderedMedia | None:
        """Return the earlier rendering of a part whose file has this content; None if its pixels are needed."""

    def render(self, part: MediaPart, content: bytes, decoded: Decoded) -> RenderedMedia:
        """Render a part from its pixels. Called on a thread. Raises InvalidImage."""


class Allowance:
    """The owner of a request, and the bytes that it may still fetch and hold. Used on one event loop."""

    def __init__(self, fetch_until_s: float, deadline: Deadline, salt: str, room: ByteRoom, tenant: str = "") -> None:
        """`fetch_until_s`: a time of the event loop's clock; `deadline`: the end of all preparation of the request.

        `room`: the budget for the files of all requests.
        """
        self.fetch_until_s = fetch_until_s
        self.deadline = deadline
        self.tenant = tenant
        self.salt = salt.encode("utf-8", "surrogatepass")  # requests of different salts share no cached media
        self.fetches = asyncio.Semaphore(_FETCHES_PER_REQUEST)
        self._room = room
        self._num_bytes = 0

    async def run(self, threads: FairThreads, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work` when it is this request's turn. Raises its error, or before it that of the deadline."""

        def in_time() -> T:
            self.deadline.check()
            return work(*args, **kwargs)

        return await threads.run(in_time, self.tenant, self.deadline)

    def take(self, num_bytes: int) -> None:
        """Hold a file until `give_back`. Raises InvalidImage, or Overloaded if other requests hold too much."""
        if self._num_bytes + num_bytes > _MAX_REQUEST_BYTES:
            raise InvalidImage(
                f"with it, the files of this request have more than {megabytes(_MAX_REQUEST_BYTES)}. Send fewer, or "
                "smaller ones."
            )
        if not self._room.enter(num_bytes):
            message = "Running requests hold too many bytes of image and video files. Send this request again later."
            raise Overloaded(message, retry_after_s=_RETRY_S)
        self._num_bytes += num_bytes

    def give_back(self) -> None:
        self._room.leave(self._num_bytes)
        self._num_bytes = 0


@dataclass(frozen=True, slots=True)
class Wanted:
    """One source of a request. It is read and decoded once, however many parts show it."""

    parts: Mapping[MediaPart, int]  # each with its number; the parts differ in the size at which they show an image
    renderer: MediaRenderer | None  # None for a frame of a video, which is always decoded

    @property
    def part(self) -> MediaPart:
        return next(iter(self.parts))


Media = Recalled | Decoded | ImageFile | VideoFile | FrameFiles


@dataclass(frozen=True, slots=True)
class Found(Generic[M]):
    """The content of a source: a result known from an earlier request, or a file with a valid header."""

    content: bytes  # the salt, and a digest of the file and of the way it is read
    media: M


def num_pixels(found: Found[Media]) -> int:
    media = next(iter(found.media.values())) if isinstance(found.media, dict) else found.media
    return media.num_pixels


@dataclass(frozen=True, slots=True)
class _Reader(Generic[M]):
    """The way in which one source of a request is read."""

    kind: Kind
    name: str  # differs if the same file would have another result
    open: Callable[[bytes], Awaitable[M]]
    part: MediaPart | DocumentPart
    known: Callable[[bytes], M | None]  # the known result of this content, for which no file is needed
    allowance: Allowance

    def content(self, data: bytes) -> bytes:
        key = blake2b(self.name.encode()).digest()
        return self.allowance.salt + blake2b(data, digest_size=DIGEST_BYTES, key=key).digest()


class MediaFiles:
    """Finds files on one event loop; slow work runs on other threads."""

    def __init__(
        self,
        config: MediaConfig,
        root: MediaRoot,
        fetcher: MediaFetcher,
        decoded: LRU[bytes, Decoded],
        workers: FairThreads,
        videos: VideoReader,
        sampling: FrameSampling | None,
    ) -> None:
        """Start without files; `decoded`: recent pixels, by content."""
        self._config = config
        self._root = root
        self._fetcher = fetcher
        self._decoded = decoded
        self._workers = workers
        self._videos = videos
        self._sampling = sampling
        # By salt, URL and reader's name: the content, and until when it counts, by the event loop's clock.
        self._addresses: LRU[tuple[bytes, str, str], tuple[bytes, float]] = LRU(_ADDRESSES_BYTES)
        self._fetches = FairQueue(_MAX_FETCHES, per_key=_PER_TENANT)

    async def find(self, wanted: Wanted, allowance: Allowance) -> Found[Media]:
        """Find the file of an image or a video. Raises InvalidImage, and the deadline's error."""
        part = wanted.part
        if isinstance(part, VideoPart):
            assert self._sampling is not None, "videos are refused before any is fetched"
            num_frames = await allowance.run(self._workers, count_frames, part.source)
            if num_frames is not None:
                self._sampling.check_frames(num_frames)  # before an object is made for each
                return await self._find_frames(part, self._sampling, wanted, allowance)
        return await self._find(self._reader(wanted, allowance))

    async def find_document(
        self, part: DocumentPart, known: Callable[[bytes], ReadDocument | None], allowance: Allowance
    ) -> Found[ReadDocument | DocumentFile]:
        """`known` returns an earlier result of the content. Raises InvalidImage, and the deadline's error."""

        async def open_document(data: bytes) -> ReadDocument | DocumentFile:
            return await allowance.run(self._workers, DocumentFile, data, max_chars=self._config.max_document_chars)

        return await self._find(_Reader("document", "document", open_document, part, known, allowance))

    def _reader(self, wanted: Wanted, allowance: Allowance) -> _Reader[Media]:
        part, known = wanted.part, partial(self._known, wanted)
        if isinstance(part, ImagePart):
            name = "frame" if wanted.renderer is None else "image"
            return _Reader("image", name, partial(self._open_image, allowance), part, known, allowance)

        async def open_video(data: bytes) -> VideoFile:
            return await self._videos.open(data, part.fps, allowance.deadline, allowance.tenant)

        return _Reader("video", f"video {part.fps}", open_video, part, known, allowance)

    async def _open_image(self, allowance: Allowance, data: bytes) -> ImageFile:
        return await allowance.run(self._workers, ImageFile, data, max_pixels=self._config.max_image_pixels)

    async def _find_frames(
        self, part: VideoPart, sampling: FrameSampling, wanted: Wanted, allowance: Allowance
    ) -> Found[Media]:
        sources = await allowance.run(self._workers, split_frames, part.source)
        assert isinstance(sources, tuple), "it has frames"
        found = await together(self._find_frame(*frame, allowance) for frame in enumerate(sources, 1))
        digest = blake2b(
            repr((part.fps, [frame.content for frame in found])).encode(), digest_size=DIGEST_BYTES
        ).digest()
        content = allowance.salt + digest
        if (known := self._known(wanted, content)) is not None:
            return Found(content, known)
        frames = [frame.media for frame in found if isinstance(frame.media, ImageFile)]
        return Found(content, FrameFiles(frames, part.fps or sampling.fps, self._config))

    async def _find_frame(self, number: int, source: str, allowance: Allowance) -> Found[Media]:
        """Open the file even if the same image was decoded before: frames are decoded one at a time."""
        try:
            return await self._find(self._reader(Wanted({ImagePart(source): number}, None), allowance))
        except InvalidImage as error:
            raise InvalidImage(f"its frame {number}: {error.message}") from error

    async def _find(self, reader: _Reader[M]) -> Found[M]:
        part, allowance, max_bytes = reader.part, reader.allowance, self._config.max_bytes(reader.kind)
        assert not isinstance(part.source, tuple), "it is a file"
        match parse_source(part.source, reader.kind):
            case Inline() as inline:
                content = await allowance.run(self._workers, reader.content, part.source_digest)
                if (known := reader.known(content)) is not None:
                    return Found(content, known)
                data = await allowance.run(self._workers, inline.read, max_bytes, reader.kind)
                return await self._open(data, content, reader)
            case LocalFile(path):
                data = await allowance.run(self._workers, self._root.read, path, max_bytes, reader.kind)
                return await self._found(data, reader)
            case Remote(url):
                return await self._find_remote(url, reader)

    async def _find_remote(self, url: str, reader: _Reader[M]) -> Found[M]:
        """Fetch a file, unless the address has sent it within `FRESH_S` and its result is still known."""
        address, now = (reader.allowance.salt, url, reader.name), asyncio.get_running_loop().time()
        content, fresh_until_s = self._addresses.get(address) or (b"", 0.0)
        if now < fresh_until_s and (known := reader.known(content)) is not None:
            return Found(content, known)
        found = await self._found(await self._fetch(url, reader), reader)
        self._addresses.put(address, (found.content, now + FRESH_S), _ADDRESS_BYTES + 4 * len(url))
        return found

    async def _fetch(self, url: str, reader: _Reader[M]) -> bytes:
        allowance = reader.allowance
        try:
            async with (
                asyncio.timeout_at(allowance.fetch_until_s),
                allowance.fetches,
                self._fetches.hold(allowance.tenant, allowance.deadline),
            ):
                return await self._fetcher.fetch(url, kind=reader.kind, tenant=allowance.tenant)
        except TimeoutError as error:
            raise InvalidImage(
                f"it did not arrive within {self._config.media_timeout_s:g} seconds ({setting('media_timeout_s')})."
            ) from error

    async def _found(self, data: bytes, reader: _Reader[M]) -> Found[M]:
        content = await reader.allowance.run(self._workers, reader.content, data)
        known = reader.known(content)
        return await self._open(data, content, reader) if known is None else Found(content, known)

    def _known(self, wanted: Wanted, content: bytes) -> Recalled | Decoded | None:
        """Return the result for this content if no file is needed: all its renderings, or else its cached pixels."""
        if wanted.renderer is None:
            return None
        recalled = {part: known for part in wanted.parts if (known := wanted.renderer.recall(part, content))}
        return recalled if len(recalled) == len(wanted.parts) else self._decoded.get(content)

    async def _open(self, data: bytes, content: bytes, reader: _Reader[M]) -> Found[M]:
        reader.allowance.take(len(data))
        return Found(content, await reader.open(data))
