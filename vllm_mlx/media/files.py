"""The encoded file of an image or a video, wherever it is, once for as long as it stays the same. Decodes no pixels."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import TypeVar

from ..core.config import MediaConfig
from ..core.errors import InvalidImage
from ..core.messages import ImagePart, MediaPart, VideoPart
from ..core.tasks import together
from .cache import DecodedCache, KnownAddresses
from .clip import Clip
from .decode import ImageFile
from .fetch import Fetched, MediaFetcher
from .image import DecodedImage, Seen
from .limits import Allowance
from .local import MediaRoot
from .sources import Inline, Kind, LocalFile, Remote, count_frames, parse_source, split_frames
from .video import FrameFiles, VideoFile, VideoOpener
from .workers import Workers

T = TypeVar("T")
_MAX_FETCHES = 16  # at once, over all requests


@dataclass(frozen=True, slots=True)
class Found:
    """What can be shown: already decoded, now or earlier, or a file whose header is well."""

    content: bytes  # salt, and digest of what it is decoded from
    image: DecodedImage | Clip | Seen | ImageFile | VideoFile | FrameFiles

    @property
    def num_pixels(self) -> int:
        return self.image.num_pixels


@dataclass(frozen=True, slots=True)
class _Reader:
    """How the bytes of a file are taken."""

    kind: Kind
    name: str  # of all that decides what is made of them
    open: Callable[[bytes], ImageFile | VideoFile]
    whole: bool  # pixels are needed, also of what was seen before
    workers: Workers  # that open it

    def digest(self, data: bytes) -> bytes:
        return blake2b(data, digest_size=16, key=blake2b(self.name.encode()).digest()).digest()


class MediaFiles:
    """Used on one event loop; what takes long runs on other threads."""

    def __init__(
        self,
        config: MediaConfig,
        root: MediaRoot,
        web: MediaFetcher,
        recent: DecodedCache,
        workers: Workers,
        video_workers: Workers,
        videos: VideoOpener | None,
    ) -> None:
        """`video_workers`: that count the frames of a video, which may take as long as decoding it."""
        self._config = config
        self._root = root
        self._web = web
        self._recent = recent
        self._workers = workers
        self._video_workers = video_workers
        self._videos = videos
        self._known = KnownAddresses()
        self._fetches = asyncio.Semaphore(_MAX_FETCHES)

    async def find(self, part: MediaPart, allowance: Allowance) -> Found:
        """Raises InvalidImage, and what the deadline raises."""
        if isinstance(part, ImagePart):
            return await self._find(part, part.source, self._image_reader("image", allowance.whole), allowance)
        num_frames = await self._run(partial(count_frames, part.source), allowance)
        if num_frames is None:
            assert not isinstance(part.source, tuple), "it is a file"
            return await self._find(part, part.source, self._video_reader(part.fps, allowance), allowance)
        assert self._videos is not None, "videos are refused before any is fetched"
        self._videos.check_frames(num_frames)  # before an object is made of each
        source = await self._run(partial(split_frames, part.source), allowance)
        assert isinstance(source, tuple), "it has frames"
        return await self._find_frames(part, source, self._videos, allowance)

    def _image_reader(self, name: str, whole: bool) -> _Reader:
        max_pixels = self._config.max_image_pixels
        return _Reader("image", name, lambda data: ImageFile(data, max_pixels=max_pixels), whole, self._workers)

    def _video_reader(self, fps: float | None, allowance: Allowance) -> _Reader:
        assert self._videos is not None, "videos are refused before any is fetched"
        videos, deadline = self._videos, allowance.deadline

        def read(data: bytes) -> VideoFile:
            return videos.open(data, fps, deadline)

        return _Reader("video", f"video {fps}", read, allowance.whole, self._video_workers)

    async def _find_frames(
        self, part: VideoPart, sources: tuple[str, ...], videos: VideoOpener, allowance: Allowance
    ) -> Found:
        found = await together(self._find_frame(*frame, allowance) for frame in enumerate(sources, 1))
        digest = blake2b(repr((part.fps, [each.content for each in found])).encode(), digest_size=16).digest()
        content = allowance.salt + digest
        if (clip := self._recent.get(content, whole=allowance.whole)) is not None:
            return Found(content, clip)
        frames = [each.image for each in found if isinstance(each.image, ImageFile)]
        return Found(content, videos.frames(frames, part.fps))

    async def _find_frame(self, number: int, source: str, allowance: Allowance) -> Found:
        """As a file, also where the same image was decoded before: frames are decoded one at a time."""
        try:
            return await self._find(ImagePart(source), source, self._image_reader("frame", True), allowance)
        except InvalidImage as error:
            raise InvalidImage(f"its frame {number}: {error.message}") from error

    async def _find(self, part: MediaPart, source: str | bytes, reader: _Reader, allowance: Allowance) -> Found:
        max_bytes = self._config.max_bytes(reader.kind)
        match parse_source(source):
            case Inline() as inline:
                content = allowance.salt + await self._run(lambda: reader.digest(part.source_digest), allowance)
                if (picture := self._recent.get(content, whole=reader.whole)) is not None:
                    return Found(content, picture)
                data = await self._run(lambda: inline.read(max_bytes, reader.kind), allowance)
                return await self._opened(data, content, reader, allowance)
            case LocalFile(path):
                data = await self._run(lambda: self._root.read(path, max_bytes, reader.kind), allowance)
                return await self._found(data, reader, allowance)
            case Remote(url):
                return await self._find_remote(url, reader, allowance)

    async def _find_remote(self, url: str, reader: _Reader, allowance: Allowance) -> Found:
        """Asks no server whose last answer still holds, and asks for no data that is here already."""
        address = (allowance.salt, url, reader.name)
        known = self._known.get(address)
        picture = None if known is None else self._recent.get(known.content, whole=reader.whole)
        now = asyncio.get_running_loop().time()
        if known is None or picture is None:
            answer = await self._fetch(url, reader.kind, None, allowance)
        elif now < known.fresh_until_s:
            return Found(known.content, picture)
        else:
            answer = await self._fetch(url, reader.kind, known.answer, allowance)
            if answer.data is None:
                self._known.put(address, answer, known.content, now)
                return Found(known.content, picture)
        assert answer.data is not None, "only who knows a picture is told that it is the same"
        found = await self._found(answer.data, reader, allowance)
        self._known.put(address, answer, found.content, now)
        return found

    async def _fetch(self, url: str, kind: Kind, known: Fetched | None, allowance: Allowance) -> Fetched:
        try:
            async with asyncio.timeout_at(allowance.fetch_until_s), allowance.fetches, self._fetches:
                return await self._web.fetch(url, kind=kind, known=known)
        except TimeoutError as error:
            raise InvalidImage(
                f"it did not arrive within {self._config.media_timeout_s:g} seconds (--media-timeout-s)."
            ) from error

    async def _found(self, data: bytes, reader: _Reader, allowance: Allowance) -> Found:
        content = allowance.salt + await self._run(lambda: reader.digest(data), allowance)
        picture = self._recent.get(content, whole=reader.whole)
        return Found(content, picture) if picture is not None else await self._opened(data, content, reader, allowance)

    async def _opened(self, data: bytes, content: bytes, reader: _Reader, allowance: Allowance) -> Found:
        allowance.take(len(data))
        return Found(content, await reader.workers.run(allowance.deadline, lambda: reader.open(data)))

    async def _run(self, function: Callable[[], T], allowance: Allowance) -> T:
        return await self._workers.run(allowance.deadline, function)
