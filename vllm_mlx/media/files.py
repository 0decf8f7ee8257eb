"""The encoded files of a request's images and videos, wherever they are. Opens each, and decodes no pixels.

A file that was decoded before is not read again: its pixels, or what was rendered from them, take its place.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import TypeVar

from ..core.config import MediaConfig
from ..core.errors import InvalidImage, setting
from ..core.messages import ImagePart, MediaPart, VideoPart
from ..core.tasks import together
from .cache import DecodedCache, KnownAddresses
from .decode import ImageFile
from .fetch import Fetched, MediaFetcher
from .limits import Allowance, Workers
from .pixels import Decoded, Fingerprint
from .rendered import RenderedMedia
from .sources import Inline, Kind, LocalFile, MediaRoot, Remote, count_frames, parse_source, split_frames
from .video import FrameFiles, VideoFile, VideoOpener

T = TypeVar("T")
Recall = Callable[[MediaPart, bytes], RenderedMedia | None]  # part, digest of its pixels -> as rendered before
_MAX_FETCHES = 16  # at once, over all requests


def recall_nothing(part: MediaPart, digest: bytes) -> None:
    """The `Recall` of a caller that needs pixels."""


@dataclass(frozen=True, slots=True)
class Recalled:
    """Every part that shows this source was rendered before: its pixels are not needed."""

    num_pixels: int
    rendered: Mapping[MediaPart, RenderedMedia]


@dataclass(frozen=True, slots=True)
class Wanted:
    """One source of a request, which is read and decoded once however many parts show it."""

    number: int  # number of the first part, counted from 1; images and videos are counted separately
    parts: tuple[MediaPart, ...]  # they differ in the size at which they show an image
    recall: Recall = recall_nothing

    def recalled(self, pixels: Fingerprint) -> Recalled | None:
        rendered = {part: known for part in self.parts if (known := self.recall(part, pixels.digest)) is not None}
        return Recalled(pixels.num_pixels, rendered) if len(rendered) == len(self.parts) else None


@dataclass(frozen=True, slots=True)
class Found:
    """What a source turned out to be: known from an earlier request, or a file with a valid header."""

    content: bytes  # salt, and digest of the file and of how it is read
    media: Recalled | Decoded | ImageFile | VideoFile | FrameFiles

    @property
    def num_pixels(self) -> int:
        return self.media.num_pixels


@dataclass(frozen=True, slots=True)
class _Reader:
    """How files are opened in one place of a request."""

    kind: Kind
    name: str  # names everything that decides which pixels a file becomes
    open: Callable[[bytes], ImageFile | VideoFile]
    workers: Workers  # threads for `open`

    def digest(self, data: bytes) -> bytes:
        return blake2b(data, digest_size=16, key=blake2b(self.name.encode()).digest()).digest()


class MediaFiles:
    """Used on one event loop; slow work runs on other threads."""

    def __init__(
        self,
        config: MediaConfig,
        root: MediaRoot,
        fetcher: MediaFetcher,
        decoded: DecodedCache,
        workers: Workers,
        video_workers: Workers,
        videos: VideoOpener | None,
    ) -> None:
        """`video_workers`: threads that count the frames of a video, which may take as long as decoding it."""
        self._config = config
        self._root = root
        self._fetcher = fetcher
        self._decoded = decoded
        self._workers = workers
        self._video_workers = video_workers
        self._videos = videos
        self._addresses = KnownAddresses()
        self._fetches = asyncio.Semaphore(_MAX_FETCHES)

    async def find(self, wanted: Wanted, allowance: Allowance) -> Found:
        """Raises InvalidImage, and what the deadline raises."""
        part = wanted.parts[0]
        if isinstance(part, ImagePart):
            return await self._find(wanted, part.source, self._image_reader("image"), allowance)
        num_frames = await self._run(partial(count_frames, part.source), allowance)
        if num_frames is None:
            assert not isinstance(part.source, tuple), "it is a file"
            return await self._find(wanted, part.source, self._video_reader(part.fps, allowance), allowance)
        assert self._videos is not None, "videos are refused before any is fetched"
        self._videos.check_frames(num_frames)  # before an object is made for each
        source = await self._run(partial(split_frames, part.source), allowance)
        assert isinstance(source, tuple), "it has frames"
        return await self._find_frames(wanted, part, source, self._videos, allowance)

    def _image_reader(self, name: str) -> _Reader:
        max_pixels = self._config.max_image_pixels
        return _Reader("image", name, lambda data: ImageFile(data, max_pixels=max_pixels), self._workers)

    def _video_reader(self, fps: float | None, allowance: Allowance) -> _Reader:
        assert self._videos is not None, "videos are refused before any is fetched"
        videos, deadline = self._videos, allowance.deadline
        return _Reader("video", f"video {fps}", lambda data: videos.open(data, fps, deadline), self._video_workers)

    async def _find_frames(
        self, wanted: Wanted, part: VideoPart, sources: tuple[str, ...], videos: VideoOpener, allowance: Allowance
    ) -> Found:
        found = await together(self._find_frame(*frame, allowance) for frame in enumerate(sources, 1))
        digest = blake2b(repr((part.fps, [frame.content for frame in found])).encode(), digest_size=16).digest()
        content = allowance.salt + digest
        if (known := self._known(content, wanted)) is not None:
            return Found(content, known)
        frames = [frame.media for frame in found if isinstance(frame.media, ImageFile)]
        return Found(content, videos.frames(frames, part.fps))

    async def _find_frame(self, number: int, source: str, allowance: Allowance) -> Found:
        """Always a file, even if the same image was decoded before: frames are decoded one at a time."""
        try:
            wanted = Wanted(number, (ImagePart(source),))
            return await self._find(wanted, source, self._image_reader("frame"), allowance)
        except InvalidImage as error:
            raise InvalidImage(f"its frame {number}: {error.message}") from error

    async def _find(self, wanted: Wanted, source: str | bytes, reader: _Reader, allowance: Allowance) -> Found:
        max_bytes = self._config.max_bytes(reader.kind)
        match parse_source(source):
            case Inline() as inline:
                part = wanted.parts[0]
                content = allowance.salt + await self._run(lambda: reader.digest(part.source_digest), allowance)
                if (known := self._known(content, wanted)) is not None:
                    return Found(content, known)
                data = await self._run(lambda: inline.read(max_bytes, reader.kind), allowance)
                return await self._open(data, content, reader, allowance)
            case LocalFile(path):
                data = await self._run(lambda: self._root.read(path, max_bytes, reader.kind), allowance)
                return await self._found(data, wanted, reader, allowance)
            case Remote(url):
                return await self._find_remote(url, wanted, reader, allowance)

    async def _find_remote(self, url: str, wanted: Wanted, reader: _Reader, allowance: Allowance) -> Found:
        """Sends no request while the last answer is fresh, and downloads no data that is known already."""
        address = (allowance.salt, url, reader.name)
        last = self._addresses.get(address)
        known = None if last is None else self._known(last.content, wanted)
        now = asyncio.get_running_loop().time()
        if last is None or known is None:
            answer = await self._fetch(url, reader.kind, None, allowance)
        elif now < last.fresh_until_s:
            return Found(last.content, known)
        else:
            answer = await self._fetch(url, reader.kind, last.answer, allowance)
            if answer.data is None:
                self._addresses.put(address, answer, last.content, now)
                return Found(last.content, known)
        assert answer.data is not None, "only a request that names a known answer may be told that it is unchanged"
        found = await self._found(answer.data, wanted, reader, allowance)
        self._addresses.put(address, answer, found.content, now)
        return found

    async def _fetch(self, url: str, kind: Kind, known: Fetched | None, allowance: Allowance) -> Fetched:
        try:
            async with asyncio.timeout_at(allowance.fetch_until_s), allowance.fetches, self._fetches:
                return await self._fetcher.fetch(url, kind=kind, known=known)
        except TimeoutError as error:
            raise InvalidImage(
                f"it did not arrive within {self._config.media_timeout_s:g} seconds ({setting('media_timeout_s')})."
            ) from error

    async def _found(self, data: bytes, wanted: Wanted, reader: _Reader, allowance: Allowance) -> Found:
        content = allowance.salt + await self._run(lambda: reader.digest(data), allowance)
        known = self._known(content, wanted)
        return await self._open(data, content, reader, allowance) if known is None else Found(content, known)

    def _known(self, content: bytes, wanted: Wanted) -> Recalled | Decoded | None:
        """What makes the file unnecessary: all parts were rendered before, or the pixels are still cached."""
        decoded, fingerprint = self._decoded.get(content), self._decoded.fingerprint(content)
        recalled = None if fingerprint is None else wanted.recalled(fingerprint)
        return decoded if recalled is None else recalled

    async def _open(self, data: bytes, content: bytes, reader: _Reader, allowance: Allowance) -> Found:
        allowance.take(len(data))
        return Found(content, await reader.workers.run(allowance.deadline, lambda: reader.open(data)))

    async def _run(self, function: Callable[[], T], allowance: Allowance) -> T:
        return await self._workers.run(allowance.deadline, function)
