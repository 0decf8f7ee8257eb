"""What a request's images and videos show: found, decoded and handed out. Has a thread and an event loop of its own."""

import asyncio
import math
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import ParamSpec, TypeVar

from ..core.config import MediaConfig
from ..core.deadline import Deadline
from ..core.errors import InvalidImage, InvalidVideo, Overloaded
from ..core.messages import ImagePart, MediaPart, VideoPart
from ..core.tasks import together
from ..core.tracebacks import clear_locals
from .cache import DecodedCache
from .clip import Clip
from .decode import ImageFile
from .fetch import MediaFetcher
from .files import Found, MediaFiles
from .image import DecodedImage, Seen
from .limits import MAX_FILES_BYTES, Allowance, ByteRoom, PixelGate, PixelLane
from .local import MediaRoot
from .parts import Key, located, numbered, shown_as
from .video import FrameSampling, VideoOpener
from .workers import Workers

P = ParamSpec("P")
T = TypeVar("T")
_READERS = 2  # threads that hash and open files, which takes milliseconds
_DECODERS = 2  # threads that decode images
_PIXEL_BYTES = 3
_GRACE_S = 0.01  # so that a wait which a deadline ends is over after the deadline, not just before it

Shown = Mapping[Key, DecodedImage | Seen | Clip]


@dataclass(frozen=True, slots=True)
class _Wanted:
    number: int  # of the first place where it is shown, counted from 1; images and videos each on their own
    part: MediaPart


class MediaLoader:
    """`shown` may be used on any event loop. `web`: None is the network itself."""

    def __init__(
        self,
        config: MediaConfig,
        root: MediaRoot,
        *,
        sampling: FrameSampling | None = None,
        web: MediaFetcher | None = None,
        max_files_bytes: int = MAX_FILES_BYTES,
    ):
        """`sampling`: of videos; None for a model that is shown none. `max_files_bytes`: of those not yet decoded."""
        self._config = config
        self._web = web or MediaFetcher(config)
        self._recent = DecodedCache(max_bytes=config.media_cache_bytes)
        self._readers = Workers(_READERS, "media file")
        self._decoders = Workers(_DECODERS, "image")
        self._video_workers = Workers(1, "video")  # so that images need not wait for one
        videos = None if sampling is None else VideoOpener(config, sampling)
        self._files = MediaFiles(config, root, self._web, self._recent, self._readers, self._video_workers, videos)
        self._files_room = ByteRoom(max_files_bytes)
        self._gate = PixelGate(config.max_request_pixels)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="images", daemon=True)
        self._thread.start()

    @asynccontextmanager
    async def shown(
        self, parts: Sequence[MediaPart], *, salt: str = "", whole: bool = True, deadline: Deadline | None = None
    ) -> AsyncIterator[Shown]:
        """What is handed out counts as in memory until the block ends. Raises RequestError.

        Of what is kept of earlier requests, only that of the same `salt` is used. `whole`: with pixels, also where
        those of a picture seen before are no longer at hand. `deadline`: of all preparation of the request; None:
        there is none. It is cancelled if the caller leaves before the media are there.
        """
        if not parts:
            yield {}
            return
        answer: Future[Shown] = Future()
        hold = self._hold(parts, salt, whole, deadline or Deadline(math.inf, ""), answer)
        holder = asyncio.run_coroutine_threadsafe(hold, self._loop)
        holder.add_done_callback(lambda ended: _pass_on(ended, answer))
        try:
            yield await asyncio.wrap_future(answer)
        finally:
            holder.cancel()

    async def close(self) -> None:
        """Fails what is under way and ends the thread. A second time does nothing."""
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
        await self._web.close()
        self._loop.stop()

    async def _hold(
        self, parts: Sequence[MediaPart], salt: str, whole: bool, deadline: Deadline, answer: "Future[Shown]"
    ) -> None:
        """Answers, and holds the pixels until it is cancelled. A failure keeps none of them alive."""
        fetch_until_s = self._loop.time() + self._config.media_timeout_s
        allowance = Allowance(fetch_until_s, deadline, salt, self._files_room, whole=whole)
        is_loaded = False
        try:
            async with self._loaded(self._wanted(parts), allowance) as shown:
                is_loaded = True
                if answer.set_running_or_notify_cancel():
                    answer.set_result(shown)
                    del shown
                    await asyncio.Event().wait()
        except BaseException as error:
            if not is_loaded:
                deadline.cancel()  # so that what runs for this request in other threads ends
            clear_locals(error)
            raise

    @asynccontextmanager
    async def _loaded(self, wanted: Sequence[_Wanted], allowance: Allowance) -> AsyncIterator[Shown]:
        lane: PixelLane | None = None
        needed, contents, decoded = 0, list[bytes](), list[DecodedImage | Clip | Seen]()
        try:
            async with _until(allowance.deadline):
                found = await together(_named(item, self._files.find, item.part, allowance) for item in wanted)
                self._check_sum(found)
                needed = sum(each.num_pixels for each in found if not isinstance(each.image, Seen))
                lane = await self._gate.enter(needed)
                self._recent.make_room(self._gate.num_pixels * _PIXEL_BYTES)
                contents = [each.content for each in found]
                jobs = [(item, each) for item, each in zip(wanted, found, strict=True)]
                decoded = await together(_named(item, self._decode, each, allowance.deadline) for item, each in jobs)
                del found, jobs
            allowance.give_back()
            yield {shown_as(item.part): each for item, each in zip(wanted, decoded, strict=True)}
        finally:
            allowance.give_back()
            if lane is not None:
                lane.leave(needed)
            self._recent.make_room(self._gate.num_pixels * _PIXEL_BYTES)
            for content, each in zip(contents, decoded, strict=False):  # nothing was decoded where one was refused
                self._recent.put(content, each)

    def _wanted(self, parts: Sequence[MediaPart]) -> list[_Wanted]:
        """Each source once."""
        wanted: dict[Key, _Wanted] = {}
        counts: Counter[type[MediaPart]] = Counter()
        for number, part in numbered(parts):
            counts[type(part)] = number
            wanted.setdefault(shown_as(part), _Wanted(number, part))
        _check_count(counts[ImagePart], self._config.max_images, "image")
        _check_count(counts[VideoPart], self._config.max_videos, "video")
        return list(wanted.values())

    def _check_sum(self, found: Sequence[Found]) -> None:
        num_pixels, max_pixels = sum(each.num_pixels for each in found), self._config.max_request_pixels
        if num_pixels > max_pixels:
            raise InvalidImage(
                f"All that this request shows has {num_pixels / 1e6:.1f} megapixels together; this server takes at "
                f"most {max_pixels / 1e6:.1f} (--max-request-pixels). Send fewer, or smaller ones."
            )

    async def _decode(self, found: Found, deadline: Deadline) -> DecodedImage | Clip | Seen:
        image = found.image
        if isinstance(image, DecodedImage | Clip | Seen):
            return image
        if isinstance(image, ImageFile):
            return await self._decoders.run(deadline, image.decode)
        return await self._video_workers.run(deadline, partial(image.decode, deadline))


@asynccontextmanager
async def _until(deadline: Deadline) -> AsyncIterator[None]:
    """Also what waits for others ends at the deadline. Raises what the deadline raises."""
    remaining_s = deadline.remaining_s
    try:
        async with asyncio.timeout(None if math.isinf(remaining_s) else remaining_s + _GRACE_S):
            yield
    except TimeoutError:
        deadline.check()
        raise


async def _named(wanted: _Wanted, work: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
    """Whatever is wrong with an image or a video is said with its place and name."""
    try:
        return await work(*args, **kwargs)
    except InvalidImage as error:
        raise located(error, wanted.number, wanted.part) from error


def _check_count(number: int, most: int, kind: str) -> None:
    if number > most:
        raise (InvalidImage if kind == "image" else InvalidVideo)(
            f"This request holds {number} {kind}s; this server takes at most {most} "
            f"(--limit-mm-per-prompt {kind}={number}). Leave some out."
        )


def _pass_on(ended: "Future[None]", answer: "Future[Shown]") -> None:
    """A holder that ended before it answered has failed, or the loader was closed."""
    if answer.done() or answer.running() or not answer.set_running_or_notify_cancel():
        return
    error = None if ended.cancelled() else ended.exception()
    answer.set_exception(error or Overloaded("The server is shutting down.", retry_after_s=5))
