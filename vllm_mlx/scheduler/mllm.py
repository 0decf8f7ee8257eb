"""The scheduler of a model that takes images: limits where chunks may end, and encodes one image a step. No pixels.

The image tokens of a prompt are tokens like any other. Features of images are cached within a byte budget, and are
evicted for running rows before the prefix cache is.
"""

from collections.abc import Mapping
from typing import Any

from ..cache.media import Key, MediaCache
from ..core.sequence import MediaItem, Sequence
from ..core.step import StepPlan
from .scheduler import Scheduler


class MLLMScheduler(Scheduler):
    def __init__(
        self,
        *args: Any,
        media: MediaCache[Any],
        max_media_bytes: int,
        media_bytes_per_token: int,
        bidirectional_images: bool,
        **kwargs: Any,
    ):
        """`bidirectional_images`: an image's tokens attend to each other, so that no chunk may end inside an image."""
        super().__init__(*args, **kwargs)
        self._media = media
        self._max_media_bytes = media.max_bytes = max_media_bytes
        self._media_bytes_per_token = media_bytes_per_token
        self._bidirectional_images = bidirectional_images
        self._awaits_inputs = False
        self._encoding: tuple[Key, int] | None = None  # the image that this step encodes, and its number of tokens

    @property
    def awaits_inputs(self) -> bool:
        """Whether a row waits for encoder inputs that are being made again, or for a read."""
        return self._awaits_inputs or super().awaits_inputs

    def schedule(self, now: float = 0.0) -> StepPlan:
        self._encoding = None
        self._awaits_inputs = False
        self._media.release()
        return super().schedule(now)

    def _chunk_end(self, seq: Sequence, most: int) -> int:
        """The chunk may hold at most one image that has to be encoded in this step."""
        start, end = seq.num_computed_tokens, super()._chunk_end(seq, most)
        items = [item for item in seq.prompt.media if item.end > start]
        if self._bidirectional_images:
            cut = next((item for item in items if item.offset < end < item.end), None)
            if cut is not None:
                end = cut.offset if cut.offset > start else cut.end
        for item in items:
            if item.offset >= end:
                break
            if not self._may_use(seq, item):
                return max(start, item.offset)
        return end

    def _may_use(self, seq: Sequence, item: MediaItem) -> bool:
        """Whether the image's features are available. The first image without features claims this step's encoder run.

        Features that a chunk of this step needs are held. Otherwise another row's image, or a row that leaves, could
        evict them before the chunk runs.
        """
        key = seq.media_key(item)
        if self._media.get(key) is not None or (self._encoding is not None and self._encoding[0] == key):
            self._media.hold(key)
            return True
        if not isinstance(item.inputs, Mapping) and not item.inputs.prepare():
            self._awaits_inputs = True
            return False
        if self._encoding is not None or not self._has_room(item):
            return False
        self._encoding = key, item.length
        self._media.hold(key)
        self._shrink_cache(self._row_bytes(extra=1))
        return True

    def _has_room(self, item: MediaItem) -> bool:
        """Whether the features fit with the ones that this step needs. A single image of any size is encoded."""
        held_bytes = self._media.held_bytes
        return not held_bytes or held_bytes + item.length * self._media_bytes_per_token <= self._media.max_bytes

    def _kept_bytes(self) -> int:
        return super()._kept_bytes() + self._media.used_bytes

    def _shrink_cache(self, rows_bytes: int) -> None:
        """Evict features first, then cached prefixes, for running rows and for the image that is being encoded."""
        room = max(0, self.pool.num_bytes - rows_bytes)
        coming = 0 if self._encoding is None else self._encoding[1] * self._media_bytes_per_token
        self._media.max_bytes = min(self._max_media_bytes, room)
        self._media.shrink_to(max(0, self._media.max_bytes - coming))
        super()._shrink_cache(rows_bytes + self._media.used_bytes + coming)
