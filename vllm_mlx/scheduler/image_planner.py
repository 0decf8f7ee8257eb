"""Plans the ends of chunks near images, the image that a step encodes, and the room for features. It has no pixels.

The image tokens of a prompt are tokens like any other. Features of images are cached within a byte budget, and are
evicted for running rows before the prefix cache is.
"""

from collections.abc import Mapping
from typing import Any

from ..cache.media import Key, MediaCache
from ..core.sequence import MediaItem, Sequence


class MLLMScheduler:
    """Owns the budget of the features, and the image that the running step encodes."""

    def __init__(self, features: MediaCache[Any], *, max_bytes: int, bytes_per_token: int, bidirectional: bool):
        """If `bidirectional`, an image's tokens attend to each other, so no chunk may end inside an image."""
        self._features = features
        self._max_bytes = features.max_bytes = max_bytes
        self._bytes_per_token = bytes_per_token
        self._bidirectional = bidirectional
        self._encoding: tuple[Key, int] | None = None  # the image that this step encodes, and its number of tokens
        self.awaits_inputs = False  # whether a row of this step waits for encoder inputs that are being made again

    @property
    def used_bytes(self) -> int:
        return self._features.used_bytes

    def begin_step(self) -> None:
        self._encoding = None
        self.awaits_inputs = False
        self._features.release()

    def chunk_end(self, seq: Sequence, end: int) -> int:
        """Return the end of a row's next chunk, at most `end`. It holds at most one image that this step encodes."""
        start = seq.num_computed_tokens
        items = [item for item in seq.prompt.media if item.end > start]
        if self._bidirectional:
            cut = next((item for item in items if item.offset < end < item.end), None)
            if cut is not None:
                end = cut.offset if cut.offset > start else cut.end
        for item in items:
            if item.offset >= end:
                break
            if not self._may_use(seq, item):
                return max(start, item.offset)
        return end

    def known_end(self, seq: Sequence) -> int:
        """Return the end of a prompt without its last token, or the first image in it whose features are not kept."""
        lacking = (item.offset for item in seq.prompt.media if self._features.get(seq.media_key(item)) is None)
        return next(lacking, seq.prefill_end)

    def shrink_to(self, num_bytes: int) -> int:
        """Keep the features within `num_bytes`. Returns their bytes, with the features that this step computes."""
        coming = 0 if self._encoding is None else self._encoding[1] * self._bytes_per_token
        self._features.max_bytes = min(self._max_bytes, num_bytes)
        self._features.shrink_to(max(0, self._features.max_bytes - coming))
        return self._features.used_bytes + coming

    def _may_use(self, seq: Sequence, item: MediaItem) -> bool:
        """Return whether the image's features are available. The first image without any claims the encoder run.

        Features that a chunk of this step needs are held. Otherwise another row's image, or a row that leaves, could
        evict them before the chunk runs.
        """
        key = seq.media_key(item)
        is_coming = self._encoding is not None and self._encoding[0] == key
        if self._features.get(key) is None and not is_coming:
            if not isinstance(item.inputs, Mapping) and not item.inputs.prepare():
                self.awaits_inputs = True
                return False
            if self._encoding is not None or not self._has_room(item):
                return False
            self._encoding = key, item.length
        self._features.hold(key)
        return True

    def _has_room(self, item: MediaItem) -> bool:
        """Return whether the features fit with the ones that this step needs. A single image of any size is encoded."""
        held_bytes = self._features.held_bytes
        return not held_bytes or held_bytes + item.length * self._bytes_per_token <= self._features.max_bytes
