"""What a request's images show: found, decoded and handed out. Has a thread and an event loop of its own."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from ...core.config import MediaConfig
from ...core.errors import InvalidImage, Overloaded
from ...core.messages import ImagePart, VideoPart
from ..videos.clip import Clip
from .files import Allowance, Found, ImageFiles
from .gate import PixelGate
from .local import MediaRoot
from .parts import located
from .picture import Picture
from .recent import RecentPictures
from .web import WebImages

P = ParamSpec("P")
T = TypeVar("T")
Pictures = Mapping[str | bytes | VideoPart, Picture | Clip]
_DECODERS = 2


@dataclass(frozen=True, slots=True)
class _Wanted:
    number: int  # of the first place where it is shown, counted from 1
    part: ImagePart


class ImageLoader:
    """`shown` may be used on any event loop. `web`: None is the network itself."""

    def __init__(self, config: MediaConfig, root: MediaRoot, *, web: WebImages | None = None):
        self._config = config
        self._web = web or WebImages(config)
        self._recent = RecentPictures(max_bytes=config.media_cache_bytes)
        self._pool = ThreadPoolExecutor(_DECODERS, thread_name_prefix="picture")
        self._files = ImageFiles(config, root, self._web, self._recent, self._pool)
        self._gate = PixelGate(config.max_request_pixels)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="images", daemon=True)
        self._thread.start()

    @asynccontextmanager
    async def shown(self, parts: Sequence[Any], *, salt: str = "") -> AsyncIterator[Pictures]:
        """By source. What is handed out counts as in memory until the block ends. Raises RequestError.

        Of what is kept of earlier requests, only that of the same `salt` is used.
        """
        if not parts:
            yield {}
            return
        answer: Future[Pictures] = Future()
        holder = asyncio.run_coroutine_threadsafe(self._hold(parts, salt, answer), self._loop)
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
        self._pool.shutdown(wait=False, cancel_futures=True)

    # -- on the loader's own loop

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._web.close()
        self._loop.stop()

    async def _hold(self, parts: Sequence[Any], salt: str, answer: "Future[Pictures]") -> None:
        """Answers, and holds the pixels until it is cancelled."""
        wanted = self._wanted(parts)
        allowance = Allowance(self._loop.time() + self._config.media_timeout_s, salt)
        found = await _all(_named(item, self._files.find, item.part, allowance) for item in wanted)
        self._check_sum(found)
        num_pixels = sum(each.num_pixels for each in found)
        await self._gate.enter(num_pixels)
        try:
            pictures = await _all(_named(item, self._decode, each) for item, each in zip(wanted, found, strict=True))
            del found
            if answer.set_running_or_notify_cancel():
                answer.set_result({item.part.source: picture for item, picture in zip(wanted, pictures, strict=True)})
                await asyncio.Event().wait()
        finally:
            self._gate.leave(num_pixels)

    def _wanted(self, parts: Sequence[Any]) -> list[_Wanted]:
        """Each source once."""
        if len(parts) > self._config.max_images:
            raise InvalidImage(
                f"This request holds {len(parts)} images; this server takes at most {self._config.max_images} "
                f"(--limit-mm-per-prompt image={len(parts)}). Leave some out."
            )
        wanted: dict[str | bytes, _Wanted] = {}
        for number, part in enumerate(parts, 1):
            wanted.setdefault(part.source, _Wanted(number, part))
        return list(wanted.values())

    def _check_sum(self, found: Sequence[Found]) -> None:
        num_pixels, max_pixels = sum(each.num_pixels for each in found), self._config.max_request_pixels
        if num_pixels > max_pixels:
            raise InvalidImage(
                f"The images of this request have {num_pixels / 1e6:.1f} megapixels together; this server takes at "
                f"most {max_pixels / 1e6:.1f} (--max-request-pixels). Send fewer, or smaller ones."
            )

    async def _decode(self, found: Found) -> Picture:
        if isinstance(found.image, Picture):
            return found.image
        picture = await self._loop.run_in_executor(self._pool, found.image.decode)
        self._recent.put(found.content, picture)
        return picture


async def _named(wanted: _Wanted, work: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
    """Whatever is wrong with an image is said with the image's place and name."""
    try:
        return await work(*args, **kwargs)
    except InvalidImage as error:
        raise located(error, wanted.number, wanted.part) from error


async def _all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The first that fails ends the others, and is what is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


def _pass_on(ended: "Future[None]", answer: "Future[Pictures]") -> None:
    """A holder that ended before it answered has failed, or the loader was closed."""
    if answer.done() or answer.running() or not answer.set_running_or_notify_cancel():
        return
    error = None if ended.cancelled() else ended.exception()
    answer.set_exception(error or Overloaded("The server is shutting down.", retry_after_s=5))
