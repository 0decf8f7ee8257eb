"""The encoded file of one image, wherever it comes from, once for as long as it stays the same. Decodes no pixels."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from hashlib import blake2b
from typing import TypeVar

from ...core.config import MediaConfig
from ...core.errors import InvalidImage
from ...core.messages import ImagePart
from .decode import ImageFile
from .local import MediaRoot
from .picture import Picture
from .recent import KnownAddresses, RecentPictures
from .sources import Inline, LocalFile, Remote, megabytes, parse_source
from .web import Fetched, WebImages

T = TypeVar("T")
_MAX_FETCHES = 16  # at once, over all requests
_FETCHES_PER_REQUEST = 4
_MAX_REQUEST_BYTES = 256 * 1024 * 1024  # of the files of one request, as of its body


class Allowance:
    """What one request may still do, and whose it is. `deadline_s` is of the event loop's clock."""

    def __init__(self, deadline_s: float, salt: str) -> None:
        self.deadline_s = deadline_s
        self.salt = salt.encode("utf-8", "surrogatepass")  # requests of different salts share nothing that is kept
        self.fetches = asyncio.Semaphore(_FETCHES_PER_REQUEST)
        self._num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Raises InvalidImage."""
        self._num_bytes += num_bytes
        if self._num_bytes > _MAX_REQUEST_BYTES:
            raise InvalidImage(
                f"with it, the images of this request have more than {megabytes(_MAX_REQUEST_BYTES)}. Send fewer, or "
                "smaller ones."
            )


@dataclass(frozen=True, slots=True)
class Found:
    """An image that can be shown: already decoded, or a file whose header is well."""

    content: bytes  # salt, and digest of what it is decoded from
    image: Picture | ImageFile

    @property
    def num_pixels(self) -> int:
        return self.image.num_pixels


class ImageFiles:
    """Used on one event loop; what takes long runs in `pool`."""

    def __init__(
        self, config: MediaConfig, root: MediaRoot, web: WebImages, recent: RecentPictures, pool: Executor
    ) -> None:
        self._config = config
        self._root = root
        self._web = web
        self._recent = recent
        self._pool = pool
        self._known = KnownAddresses()
        self._fetches = asyncio.Semaphore(_MAX_FETCHES)

    async def find(self, part: ImagePart, allowance: Allowance) -> Found:
        """Raises InvalidImage."""
        match parse_source(part.source):
            case Inline() as inline:
                content = allowance.salt + await self._run(lambda: part.source_digest)
                if (picture := self._recent.get(content)) is not None:
                    return Found(content, picture)
                data = await self._run(lambda: inline.read(self._config.max_image_bytes))
                return await self._opened(data, content, allowance)
            case LocalFile(path):
                data = await self._run(lambda: self._root.read(path, self._config.max_image_bytes))
                return await self._found(data, allowance)
            case Remote(url):
                return await self._find_remote(url, allowance)

    async def _find_remote(self, url: str, allowance: Allowance) -> Found:
        """Asks no server whose last answer still holds, and asks for no data that is here already."""
        known = self._known.get((allowance.salt, url))
        picture = None if known is None else self._recent.get(known.content)
        now = asyncio.get_running_loop().time()
        if known is None or picture is None:
            answer = await self._fetch(url, None, allowance)
        elif now < known.fresh_until_s:
            return Found(known.content, picture)
        else:
            answer = await self._fetch(url, known.answer, allowance)
            if answer.data is None:
                self._known.put((allowance.salt, url), answer, known.content, now)
                return Found(known.content, picture)
        assert answer.data is not None, "only who knows a picture is told that it is the same"
        found = await self._found(answer.data, allowance)
        self._known.put((allowance.salt, url), answer, found.content, now)
        return found

    async def _fetch(self, url: str, known: Fetched | None, allowance: Allowance) -> Fetched:
        try:
            async with asyncio.timeout_at(allowance.deadline_s), allowance.fetches, self._fetches:
                return await self._web.fetch(url, known=known)
        except TimeoutError as error:
            raise InvalidImage(
                f"it did not arrive within {self._config.media_timeout_s:g} seconds (--media-timeout-s)."
            ) from error

    async def _found(self, data: bytes, allowance: Allowance) -> Found:
        content = allowance.salt + await self._run(lambda: blake2b(data, digest_size=16).digest())
        picture = self._recent.get(content)
        return Found(content, picture) if picture is not None else await self._opened(data, content, allowance)

    async def _opened(self, data: bytes, content: bytes, allowance: Allowance) -> Found:
        allowance.take(len(data))
        max_pixels = self._config.max_image_pixels
        return Found(content, await self._run(lambda: ImageFile(data, max_pixels=max_pixels)))

    async def _run(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function)
