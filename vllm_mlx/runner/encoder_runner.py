"""Carries out the units of an encoder on the device: one padded batch of whole texts a step. It decides nothing."""

import time
from collections.abc import Sequence as Rows

import mlx.core as mx
import numpy as np

from ..core.step import ChunkTiming, Encoded, PrefillChunk, StepOutput, StepPlan
from .device import DeviceWatch
from .encoder import EncoderModel
from .runner import RowFences


class EncoderRunner:
    """Keeps no state between two steps."""

    media = None  # an encoder takes no images
    num_rows = 0  # nothing of a text stays on the device

    def __init__(self, model: EncoderModel, watch: DeviceWatch):
        self.model = model
        self._watch = watch

    def live_bytes(self) -> int:
        """Return 0: bytes of all rows' state."""
        return 0

    def decode(self, plan: StepPlan) -> StepOutput:
        """Do nothing: no row decodes."""
        self._watch.return_buffers()
        return StepOutput(overrun=self._watch.overrun())

    def prefill(self, chunks: Rows[PrefillChunk]) -> StepOutput:
        """Run the texts as one batch. A device fault is raised, and no result is reported then."""
        fences, seqs = RowFences(), list(dict.fromkeys(chunk.seq for chunk in chunks))
        longest = max(chunk.end - chunk.start for chunk in chunks)
        num_tokens, started_s = longest * len(chunks), time.perf_counter()
        vectors = fences.run_chunk(seqs, num_tokens, self._encode, chunks)
        timing = ChunkTiming(longest, num_tokens, time.perf_counter() - started_s)
        mx.clear_cache()
        pairs = () if vectors is None else zip(chunks, vectors, strict=True)
        return StepOutput(
            encoded=tuple(Encoded(chunk.seq.seq_id, chunk.start, chunk.end - chunk.start, row) for chunk, row in pairs),
            failed=tuple(fences.failed),
            suspects=tuple(fences.suspects),
            refused=tuple(fences.refused),
            chunk_timings=() if vectors is None else (timing,),
            overrun=self._watch.overrun(),
        )

    def _encode(self, chunks: Rows[PrefillChunk]) -> np.ndarray:
        """Return `(texts, dimensions)` vectors, or `(texts,)` scores, in float32."""
        rows, types = [], []
        for chunk in chunks:
            texts = chunk.seq.prompt.texts
            assert texts is not None, "an encoder reads texts"
            rows.append(texts.ids[chunk.start : chunk.end])
            if texts.types is not None:
                types.append(texts.types[chunk.start : chunk.end])
        vectors = self.model.encode(rows, types or None)
        mx.eval(vectors)  # numpy would hold the interpreter's lock while it waits, and the event loop with it
        return np.array(vectors)

    def rest(self) -> None:
        """Give back the freed buffers that MLX keeps for the next step."""
        mx.clear_cache()

    def reset(self) -> None:
        """Forget nothing: there are no rows."""
        mx.clear_cache()

    def drain(self) -> None:
        """Wait for nothing: each step waits for its own results."""
