"""Finds, decodes and hands out a request's images and videos, on a thread with an event loop of its own."""

import asyncio
import math
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from functools import partial
from typing import ParamSpec, TypeVar

from ..core.config import MediaConfig
from ..core.errors import InvalidImage, InvalidVideo, Overloaded, setting
from ..core.fence import clear_locals
from ..core.messages import ImagePart, MediaPart, VideoPart
from ..core.tasks import Deadline, together
from .cache import DecodedCache
from .decode import ImageFile
from .fetch import MediaFetcher
from .files import Found, MediaFiles, Recall, Recalled, Wanted, recall_nothing
from .limits import MAX_FILES_BYTES, Allowance, ByteRoom, PixelGate, PixelLane, Workers
from .parts import located, numbered
from .pixels import Decoded
from .rendered import RenderedMedia
from .sources import MediaRoot
from .video import FrameFiles, FrameSampling, VideoFile, VideoOpener

P = ParamSpec("P")
T = TypeVar("T")
LoadedMedia = Mapping[MediaPart, RenderedMedia | Decoded]  # rendered before, or what it has to be rendered from
_READERS = 2  # threads that hash and open files, which takes milliseconds
_DECODERS = 2  # threads that decode images
_PIXEL_BYTES = 3
_GRACE_S = 0.01  # so that a wait which a deadline ends is over after the deadline, not just before it


class MediaLoader:
    """`load` may be used on any event loop."""

    def __init__(
        self,
        config: MediaConfig,
        root: MediaRoot,
        *,
        sampling: FrameSampling | None = None,
        fetcher: MediaFetcher | None = None,
        max_files_bytes: int = MAX_FILES_BYTES,
    ):
        """`sampling`: of videos; None if the model takes none. `max_files_bytes`: of files not decoded yet."""
        self._config = config
        self._fetcher = fetcher or MediaFetcher(config)
        self._cache = DecodedCache(max_bytes=config.media_cache_bytes)
        self._readers = Workers(_READERS, "media file")
        self._decoders = Workers(_DECODERS, "image")
        self._video_workers = Workers(1, "video")  # so that images need not wait for one
        videos = None if sampling is None else VideoOpener(config, sampling)
        self._files = MediaFiles(config, root, self._fetcher, self._cache, self._readers, self._video_workers, videos)
        self._files_room = ByteRoom(max_files_bytes)
        self._gate = PixelGate(config.max_request_pixels)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="images", daemon=True)
        self._thread.start()

    @asynccontextmanager
    async def load(
        self,
        parts: Sequence[MediaPart],
        *,
        salt: str = "",
        recall: Recall = recall_nothing,
        deadline: Deadline | None = None,
    ) -> AsyncIterator[LoadedMedia]:
        """Every part as `recall` knows it, or else its pixels, which count as in memory until the block ends.

        Of what is cached from earlier requests, only that of the same `salt` is used. `deadline`: of all preparation
        of the request, None for none; it is cancelled if the caller leaves before the media are loaded.
        Raises RequestError.
        """
        if not parts:
            yield {}
            return
        answer: Future[LoadedMedia] = Future()
        hold = self._hold(parts, salt, recall, deadline or Deadline(math.inf, ""), answer)
        holder = asyncio.run_coroutine_threadsafe(hold, self._loop)
        holder.add_done_callback(lambda ended: _pass_on(ended, answer))
        try:
            yield await asyncio.wrap_future(answer)
        finally:
            holder.cancel()

    async def close(self) -> None:
        """Fail requests that are being loaded and end the thread. A second call does nothing."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(lambda: self._loop.create_task(self._end()))
            await asyncio.to_thread(self._thread.join)
        self._loop.close()
        for workers in (self._readers, self._decoders, self._video_workers):
            workers.close()

    # -- on the loader's own loop

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._fetcher.close()
        self._loop.stop()

    async def _hold(
        self, parts: Sequence[MediaPart], salt: str, recall: Recall, deadline: Deadline, answer: "Future[LoadedMedia]"
    ) -> Exception | None:
        """Answer, and hold the pixels until cancelled. A failure keeps none of them alive.

        Returns what failed before it answered. Raised, it would be logged if the caller has left.
        """
        fetch_until_s = self._loop.time() + self._config.media_timeout_s
        allowance = Allowance(fetch_until_s, deadline, salt, self._files_room)
        is_loaded = False
        try:
            async with self._loaded(self._wanted(parts, recall), allowance) as loaded:
                is_loaded = True
                if answer.set_running_or_notify_cancel():
                    answer.set_result(loaded)
                    del loaded
                    await asyncio.Event().wait()
        except BaseException as error:
            if not is_loaded:
                deadline.cancel()  # so that what runs for this request in other threads ends
            clear_locals(error)
            if not isinstance(error, Exception):
                raise
            return error
        return None

    @asynccontextmanager
    async def _loaded(self, wanted: Sequence[Wanted], allowance: Allowance) -> AsyncIterator[LoadedMedia]:
        lane: PixelLane | None = None
        needed, contents, ready = 0, list[bytes](), list[Recalled | Decoded]()
        try:
            async with _until(allowance.deadline):
                found = await together(_named(item, self._files.find, item, allowance) for item in wanted)
                self._check_sum(found)
                needed = sum(source.num_pixels for source in found if not isinstance(source.media, Recalled))
                lane = await self._gate.enter(needed)
                self._cache.make_room(self._gate.num_pixels * _PIXEL_BYTES)
                contents = [source.content for source in found]
                jobs = [(item, source.media) for item, source in zip(wanted, found, strict=True)]
                ready = await together(_named(item, self._decode, media, allowance.deadline) for item, media in jobs)
                del found, jobs
            allowance.give_back()
            yield dict(loaded for item, media in zip(wanted, ready, strict=True) for loaded in _by_part(item, media))
        finally:
            allowance.give_back()
            if lane is not None:
                lane.leave(needed)
            self._cache.make_room(self._gate.num_pixels * _PIXEL_BYTES)
            for content, media in zip(contents, ready, strict=False):  # nothing was decoded if one was refused
                if not isinstance(media, Recalled):
                    self._cache.put(content, media)

    def _wanted(self, parts: Sequence[MediaPart], recall: Recall) -> list[Wanted]:
        """Every source once."""
        first: dict[str | bytes | VideoPart, int] = {}
        shown: dict[str | bytes | VideoPart, dict[MediaPart, None]] = {}
        counts: Counter[type[MediaPart]] = Counter()
        for number, part in numbered(parts):
            counts[type(part)] = number
            key = part.source if isinstance(part, ImagePart) else part  # a video part decides which frames are decoded
            first.setdefault(key, number)
            shown.setdefault(key, {})[part] = None
        _check_count(counts[ImagePart], self._config.max_images, "image")
        _check_count(counts[VideoPart], self._config.max_videos, "video")
        return [Wanted(first[key], tuple(parts), recall) for key, parts in shown.items()]

    def _check_sum(self, found: Sequence[Found]) -> None:
        num_pixels, max_pixels = sum(source.num_pixels for source in found), self._config.max_request_pixels
        if num_pixels > max_pixels:
            raise InvalidImage(
                f"All that this request shows has {num_pixels / 1e6:.1f} megapixels together; this server takes at "
                f"most {max_pixels / 1e6:.1f} ({setting('max_request_pixels')}). Send fewer, or smaller ones."
            )

    async def _decode(
        self, media: Recalled | Decoded | ImageFile | VideoFile | FrameFiles, deadline: Deadline
    ) -> Recalled | Decoded:
        match media:
            case ImageFile():
                return await self._decoders.run(deadline, media.decode)
            case VideoFile() | FrameFiles():
                return await self._video_workers.run(deadline, partial(media.decode, deadline))
            case _:
                return media


def _by_part(wanted: Wanted, media: Recalled | Decoded) -> Iterator[tuple[MediaPart, RenderedMedia | Decoded]]:
    """Every part that shows the source. What was decoded may have the pixels of another file, rendered before."""
    if isinstance(media, Recalled):
        yield from media.rendered.items()
        return
    for part in wanted.parts:
        yield part, wanted.recall(part, media.digest) or media


@asynccontextmanager
async def _until(deadline: Deadline) -> AsyncIterator[None]:
    """The deadline also ends waiting for other requests. Raises what the deadline raises."""
    remaining_s = deadline.remaining_s
    try:
        async with asyncio.timeout(None if math.isinf(remaining_s) else remaining_s + _GRACE_S):
            yield
    except TimeoutError:
        deadline.check()
        raise


async def _named(wanted: Wanted, work: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
    """Every error of an image or a video names it and says where it is."""
    try:
        return await work(*args, **kwargs)
    except InvalidImage as error:
        raise located(error, wanted.number, wanted.parts[0]) from error


def _check_count(number: int, most: int, kind: str) -> None:
    if number > most:
        raise (InvalidImage if kind == "image" else InvalidVideo)(
            f"This request holds {number} {kind}s; this server takes at most {most} "
            f"({setting('limit_mm_per_prompt')} {kind}={number}). Leave some out."
        )


def _pass_on(ended: "Future[Exception | None]", answer: "Future[LoadedMedia]") -> None:
    """Answer with the error of a holder that ended before it answered, unless nobody waits for the answer.

    A holder that was cancelled has none: the loader was closed. Called when the holder's frame is finished, so that
    the caller can free what the error keeps alive.
    """
    if answer.done() or answer.running() or not answer.set_running_or_notify_cancel():
        return
    error = None if ended.cancelled() else ended.exception() or ended.result()
    answer.set_exception(error or Overloaded("The server is shutting down.", retry_after_s=5))
