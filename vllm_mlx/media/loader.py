"""Finds, decodes and renders images and videos, and reads documents, on a thread with its own event loop."""

import asyncio
import math
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np

from ..core.config import MediaConfig
from ..core.errors import InvalidDocument, InvalidImage, InvalidVideo, ShuttingDown, setting
from ..core.memory import ByteRoom
from ..core.messages import DocumentPart, ImagePart, MediaPart, VideoPart
from ..util.fair_queue import FairQueue, FairThreads
from ..util.fence import clear_locals
from ..util.lru import LRU
from ..util.tasks import Deadline, together
from .decode import Decoded, DecodedImage, ImageFile
from .documents import DocumentFile, DocumentReader, DocumentRefusal, ReadDocument
from .fetch import MediaFetcher
from .files import MAX_FILES_BYTES, Allowance, Found, Media, MediaFiles, MediaRenderer, Recalled, Wanted, num_pixels
from .processes import LARGE_PIXELS, Processes
from .rendered import RenderedMedia
from .sources import MediaRoot, naming
from .video import FrameFiles, FrameSampling, VideoFile, VideoReader

P = TypeVar("P")
T = TypeVar("T")
_READERS = 2  # threads that hash and open files, which takes milliseconds
_DECODERS = 2  # threads that decode images
_PIXEL_BYTES = 3
_SMALL_SHARE = 8  # a request with at most an eighth of all pixels is small
_DOCUMENTS_BYTES = 64 << 20  # limit of the contents of recent documents that are kept
_GRACE_S = 0.01  # so that waiting ends after the deadline, not just before it


class PixelGate:
    """A limit on pixels in memory. Used on one event loop.

    Small requests never wait for large ones: they have another eighth of `max_pixels` to themselves.
    """

    def __init__(self, max_pixels: int):
        self._main = FairQueue(max_pixels)
        self._small = FairQueue(max_pixels // _SMALL_SHARE)

    @property
    def num_pixels(self) -> int:
        """Pixels in memory now."""
        return self._main.num_taken + self._small.num_taken

    @asynccontextmanager
    async def hold(self, num_pixels: int, tenant: str = "") -> AsyncIterator[None]:
        """Wait until the pixels fit, and count them as in memory in the block. `num_pixels` is at most `max_pixels`."""
        is_small = num_pixels <= self._small.num_places
        lane = self._small if is_small and not self._main.has_room(num_pixels) else self._main
        async with lane.hold(tenant, number=num_pixels):
            yield


def image_decoders() -> FairThreads:
    """Make the threads that decode images. Loaders of one process share them, so that several models use no more."""
    return FairThreads(_DECODERS, "image")


class MediaLoader:
    """Loads media on its own thread. Its methods may be used on any event loop."""

    def __init__(
        self,
        config: MediaConfig,
        root: MediaRoot,
        *,
        sampling: FrameSampling | None = None,
        fetcher: MediaFetcher | None = None,
        max_files_bytes: int = MAX_FILES_BYTES,
        takes_images: bool = True,
        decoders: FairThreads | None = None,
    ):
        """Start the threads. `sampling`: choice of a video's frames; None without videos. `max_files_bytes`: the limit
        of all files that are not decoded yet. `takes_images`: whether the model takes images; otherwise
        it gets only the text of documents. `decoders`: threads shared with other loaders, if there are any.
        """
        self._config = config
        self._fetcher = fetcher or MediaFetcher(config)
        self.decoded: LRU[bytes, Decoded] = LRU(config.media_cache_bytes)  # recent pixels, by content
        self._readers = FairThreads(_READERS, "media file")
        self._decoders = decoders or image_decoders()
        self._frame_workers = FairThreads(1, "video frames")  # so that images need not wait for many frames
        self._renderer = FairThreads(1, "media renderer")  # the checkpoint's processor takes one at a time
        self._processes = Processes()
        self._documents = DocumentReader(config, self._processes, takes_images=takes_images)
        self._videos = VideoReader(self._processes, sampling or FrameSampling(), config)
        self._files = MediaFiles(config, root, self._fetcher, self.decoded, self._readers, self._videos, sampling)
        self._read_documents: LRU[bytes, ReadDocument] = LRU(_DOCUMENTS_BYTES)
        self._files_room = ByteRoom(max_files_bytes)
        self._gate = PixelGate(config.max_request_pixels)
        self._loop = asyncio.new_event_loop()
        self._entering = threading.Lock()  # work enters the loop, or no more work may
        self._closing = threading.Lock()  # two calls of `close` may meet
        self._is_closed = self._is_ending = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="images", daemon=True)
        self._thread.start()

    @property
    def num_pixels(self) -> int:
        """Pixels of running requests in memory now."""
        return self._gate.num_pixels

    async def load(
        self,
        parts: Sequence[MediaPart],
        renderer: MediaRenderer,
        *,
        salt: str = "",
        tenant: str = "",
        deadline: Deadline | None = None,
    ) -> dict[MediaPart, RenderedMedia]:
        """Return every part as `renderer` recalls it, or else renders it.

        Only cached results of requests with the same `salt` are used. Tenants take turns. `deadline`: the end of all
        preparation of the request, None if there is none; it is cancelled if the caller leaves before the media are
        rendered.
        Raises RequestError.
        """
        if not parts:
            return {}
        wanted = self._wanted(parts, renderer)
        return await self._on_own_loop(
            lambda allowance: self._rendered(wanted, renderer, allowance), salt, tenant, deadline
        )

    def start(self, part: MediaPart, renderer: MediaRenderer, salt: str) -> "Future[RenderedMedia]":
        """Start to load one part, for a caller that must not wait. Any thread may call it."""

        async def load() -> RenderedMedia:
            return (await self.load([part], renderer, salt=salt))[part]

        try:
            return self._enter(load())
        except ShuttingDown as error:
            failed: Future[RenderedMedia] = Future()
            failed.set_exception(error)
            return failed

    async def read(
        self, parts: Sequence[DocumentPart], *, salt: str = "", tenant: str = "", deadline: Deadline | None = None
    ) -> dict[DocumentPart, ReadDocument]:
        """Return the contents of every document, or why it cannot be read. Raises RequestError.

        `salt`, `tenant` and `deadline` are as in `load`.
        """
        _check_count(len(parts), self._config.max_documents, "document")

        async def read(allowance: Allowance) -> dict[DocumentPart, ReadDocument]:
            return dict(zip(parts, await together(self._read(part, allowance) for part in parts), strict=True))

        return await self._on_own_loop(read, salt, tenant, deadline)

    async def close(self) -> None:
        """Fail requests that are being loaded and end the thread. A second call does nothing."""
        if self._thread.is_alive():
            if not self._is_ending:  # two ends would cancel each other
                self._loop.call_soon_threadsafe(lambda: self._loop.create_task(self._end()))
            self._is_ending = True
            await asyncio.to_thread(self._thread.join)
        await asyncio.to_thread(self._close_loop)
        for workers in (self._readers, self._decoders, self._frame_workers, self._renderer):
            workers.close()

    async def _on_own_loop(
        self, work: Callable[[Allowance], Awaitable[dict[P, T]]], salt: str, tenant: str, deadline: Deadline | None
    ) -> dict[P, T]:
        work_on_loop = self._outcome(work, salt, tenant, deadline or Deadline(math.inf, ""))
        running = self._enter(work_on_loop)
        try:
            outcome = await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is None or caller.cancelling():
                raise
            raise ShuttingDown() from None
        if isinstance(outcome, dict):
            return outcome
        try:
            raise outcome
        finally:
            del outcome, running  # or the error and this frame would keep each other alive

    def _close_loop(self) -> None:
        with self._entering:
            self._is_closed = True
        with self._closing:
            if not self._loop.is_closed():
                self._loop.run_until_complete(self._cancel())  # work that entered after the loop was stopped
            self._loop.close()

    def _enter(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Start work on the loader's own loop, from any thread. Raises ShuttingDown if the loop is closed."""
        with self._entering:
            if self._is_closed:
                work.close()
                raise ShuttingDown()
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    # -- on the loader's own loop

    async def _end(self) -> None:
        await self._cancel()
        await self._fetcher.close()
        self._loop.stop()

    async def _cancel(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _outcome(
        self, work: Callable[[Allowance], Awaitable[dict[P, T]]], salt: str, tenant: str, deadline: Deadline
    ) -> dict[P, T] | Exception:
        """Return the result or the error, without pixels. Raised, it would be logged if the caller has left."""
        fetch_until_s = self._loop.time() + self._config.media_timeout_s
        allowance = Allowance(fetch_until_s, deadline, salt, self._files_room, tenant)
        try:
            async with _until(deadline):
                return await work(allowance)
        except BaseException as error:
            deadline.cancel()  # so that work for this request in other threads ends
            clear_locals(error)
            if not isinstance(error, Exception):
                raise
            return error
        finally:
            allowance.give_back()

    async def _rendered(self, wanted: Sequence[Wanted], renderer: MediaRenderer, allowance: Allowance) -> Recalled:
        found = await together(self._find(item, allowance) for item in wanted)
        self._check_sum(found)
        contents = [source.content for source in found]
        new_pixels = sum(0 if isinstance(source.media, dict) else num_pixels(source) for source in found)
        async with self._hold(new_pixels, allowance.tenant):
            decoded = await together(map(partial(self._decode, allowance), wanted, found))
            del found
            allowance.give_back()
            rendered: Recalled = {}
            for item, content, media in zip(wanted, contents, decoded, strict=True):
                if isinstance(media, dict):
                    rendered |= media
                else:
                    for part, number in item.parts.items():  # one at a time, so that other requests take turns
                        with naming(part, number):
                            rendered[part] = await allowance.run(self._renderer, renderer.render, part, content, media)
        for content, media in zip(contents, decoded, strict=True):
            if not isinstance(media, dict):
                self.decoded.put(content, media, media.pixels.nbytes)
        return rendered

    async def _read(self, part: DocumentPart, allowance: Allowance) -> ReadDocument:
        """Return the content read from the same bytes before, or read the document now."""
        try:
            found = await self._files.find_document(part, self._read_documents.get, allowance)
        except InvalidImage as error:
            return DocumentRefusal(error.message)
        if isinstance(found.media, DocumentFile):
            read = await self._documents.read(found.media, allowance.deadline, allowance.tenant)
            self._read_documents.put(found.content, read, read.num_bytes)
            return read
        return found.media

    async def _find(self, wanted: Wanted, allowance: Allowance) -> Found[Media]:
        with naming(wanted.part, wanted.parts[wanted.part]):
            return await self._files.find(wanted, allowance)

    @asynccontextmanager
    async def _hold(self, num_pixels: int, tenant: str) -> AsyncIterator[None]:
        """Count pixels as in memory. Their part of the budget comes first; cached pixels get the rest."""
        try:
            async with self._gate.hold(num_pixels, tenant):
                self._make_room()
                yield
        finally:
            self._make_room()

    def _make_room(self) -> None:
        self.decoded.resize(max(0, self._config.media_cache_bytes - self._gate.num_pixels * _PIXEL_BYTES))

    async def _decode(self, allowance: Allowance, wanted: Wanted, found: Found[Media]) -> Recalled | Decoded:
        with naming(wanted.part, wanted.parts[wanted.part]):
            match found.media:
                case ImageFile() as file if file.num_pixels > LARGE_PIXELS:
                    return DecodedImage(await self._large_pixels(file, allowance))
                case ImageFile() as file:
                    return DecodedImage(await allowance.run(self._decoders, file.pixels))
                case VideoFile() as file:
                    return await self._videos.decode(file, allowance.deadline, allowance.tenant)
                case FrameFiles() as file:
                    pixels_of = partial(self._frame_pixels, allowance)
                    return await allowance.run(self._frame_workers, file.decode, allowance.deadline, pixels_of)
                case known:
                    return known

    async def _large_pixels(self, file: ImageFile, allowance: Allowance) -> np.ndarray:
        return await self._processes.pixels(file, self._config.max_decode_s, allowance.deadline, allowance.tenant)

    def _frame_pixels(self, allowance: Allowance, file: ImageFile) -> np.ndarray:
        """Decode one frame of a video. Called on another thread."""
        if file.num_pixels <= LARGE_PIXELS:
            return file.pixels()
        return self._enter(self._large_pixels(file, allowance)).result()

    def _wanted(self, parts: Sequence[MediaPart], renderer: MediaRenderer) -> list[Wanted]:
        """Return every source once. Parts are numbered from 1, images and videos separately."""
        wanted: dict[str | bytes | VideoPart, dict[MediaPart, int]] = {}
        counts: Counter[type[MediaPart]] = Counter()
        for part in parts:
            counts[type(part)] += not (isinstance(part, ImagePart) and part.is_page)
            key = part.source if isinstance(part, ImagePart) else part  # a video part decides which frames are decoded
            wanted.setdefault(key, {}).setdefault(part, counts[type(part)])
        _check_count(counts[ImagePart], self._config.max_images, "image")
        _check_count(counts[VideoPart], self._config.max_videos, "video")
        return [Wanted(numbers, renderer) for numbers in wanted.values()]

    def _check_sum(self, found: Sequence[Found[Media]]) -> None:
        sum_pixels, max_pixels = sum(map(num_pixels, found)), self._config.max_request_pixels
        if sum_pixels > max_pixels:
            raise InvalidImage(
                f"The images and videos of this request have {sum_pixels / 1e6:.1f} megapixels together; this server "
                f"takes at most {max_pixels / 1e6:.1f} ({setting('max_request_pixels')}). Send fewer, or smaller ones."
            )


@asynccontextmanager
async def _until(deadline: Deadline) -> AsyncIterator[None]:
    """End the block at the deadline, even if it waits for other requests. Raises the deadline's error."""
    remaining_s = deadline.remaining_s
    try:
        async with asyncio.timeout(None if math.isinf(remaining_s) else remaining_s + _GRACE_S):
            yield
    except TimeoutError:
        deadline.check()
        raise


def _check_count(number: int, most: int, kind: str) -> None:
    if number > most:
        raise {"image": InvalidImage, "video": InvalidVideo, "document": InvalidDocument}[kind](
            f"This request holds {number} {kind}s; this server takes at most {most} "
            f"({setting('limit_mm_per_prompt')} {kind}={number}). Leave some out."
        )
