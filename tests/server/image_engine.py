"""A fake engine that loads the images of a request as the real one does, before it plays its script."""

from dataclasses import dataclass, field
from typing import Any

from vllm_mlx.core.config import MediaConfig
from vllm_mlx.core.request import Request
from vllm_mlx.media.fetch import MediaFetcher
from vllm_mlx.media.loader import MediaLoader
from vllm_mlx.media.sources import MediaRoot, media_parts

from ..media.samples import as_pixels
from .fakes import FakeEngine, FakeGeneration


@dataclass
class ImageEngine(FakeEngine):
    media: MediaConfig = field(default_factory=MediaConfig)
    web: MediaFetcher | None = None
    seen: list[Any] = field(default_factory=list)  # the images of every request, in order

    def __post_init__(self) -> None:
        self.loader = MediaLoader(self.media, MediaRoot(self.media.media_root), fetcher=self.web)

    async def submit(self, request: Request) -> FakeGeneration:
        pictures = await self.loader.load(media_parts(request), as_pixels)
        self.seen.append([pictures[part] for part in media_parts(request)])
        return await super().submit(request)

    async def shutdown(self, drain_s: float) -> None:
        await super().shutdown(drain_s)
        await self.loader.close()
