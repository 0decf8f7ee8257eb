"""Chunks of prompts with images: one encoded image a step, whole images where the model needs them."""

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest

from vllm_mlx.cache.media import MediaCache
from vllm_mlx.core.config import EngineConfig
from vllm_mlx.core.memory import MemoryBudget, RowFootprint
from vllm_mlx.core.request import TokenSampling
from vllm_mlx.core.sequence import MediaItem, PromptInputs, Sequence
from vllm_mlx.core.step import StepOutput
from vllm_mlx.scheduler.image_planner import MLLMScheduler
from vllm_mlx.scheduler.prefill_pacer import PrefillPacer
from vllm_mlx.scheduler.scheduler import Scheduler


@dataclass
class Features:
    nbytes: int


class Pure:
    """A scheduler and its cache of features."""

    def __init__(
        self, *, whole: bool = False, rows_bytes: int = 10_000, chunk: int = 64, repeatable: bool = False
    ) -> None:
        self.features: MediaCache[Features] = MediaCache(0)
        self.images = MLLMScheduler(self.features, max_bytes=rows_bytes // 2, bytes_per_token=2, bidirectional=whole)
        self.scheduler = Scheduler(
            EngineConfig(model="m", max_prefill_chunk=chunk, repeatable=repeatable),
            memory=MemoryBudget(total_bytes=rows_bytes + 2, weights_bytes=1, transient_bytes=1),
            footprint=RowFootprint(bytes_per_token=1),
            pacer=PrefillPacer(max_stall_s=1.0, max_chunk=chunk, tokens_per_s=1000, overhead_s=0),
            images=self.images,
        )
        self.add, self.schedule, self.update = self.scheduler.add, self.scheduler.schedule, self.scheduler.update


def seq(seq_id: int, length: int, *images: tuple[int, int, bytes], salt: str = "") -> Sequence:
    media = tuple(MediaItem(digest, offset, size, {}) for offset, size, digest in images)
    prompt = PromptInputs(token_ids=tuple(range(length)), media=media)
    return Sequence(seq_id=seq_id, prompt=prompt, sampling=TokenSampling(), max_tokens=1, cache_salt=salt)


def chunks(pure: Pure, num_steps: int) -> list[list[tuple[int, int, int]]]:
    """(sequence, start, end) of each step's chunks; the images that they hold are encoded."""
    steps = []
    for _ in range(num_steps):
        plan = pure.schedule()
        for chunk in plan.prefill:
            for item in chunk.seq.prompt.media:
                key = chunk.seq.media_key(item)
                if item.offset < chunk.end and item.end > chunk.start and key not in pure.features:
                    pure.features.store(key, Features(item.length * 2))
        steps.append([(chunk.seq.seq_id, chunk.start, chunk.end) for chunk in plan.prefill])
        pure.update(StepOutput(prefilled=tuple((chunk.seq.seq_id, chunk.end) for chunk in plan.prefill)))
    return steps


def test_a_chunk_ends_before_the_second_image_to_encode():
    pure = Pure()
    pure.add(seq(1, 60, (5, 10, b"a"), (20, 10, b"b"), (40, 10, b"a")))
    assert chunks(pure, 2) == [[(1, 0, 20)], [(1, 20, 59)]]


def test_rows_of_one_step_share_one_encoding_and_text_goes_along():
    pure = Pure()
    pure.add(seq(1, 20, (2, 10, b"a")))
    pure.add(seq(2, 20, (4, 10, b"b")))
    pure.add(seq(3, 20, (0, 10, b"c")))
    pure.add(seq(4, 20))
    assert chunks(pure, 3) == [[(1, 0, 19), (2, 0, 4), (4, 0, 19)], [(2, 4, 19)], [(3, 0, 19)]]


def test_one_picture_in_several_rows_is_one_encoding():
    pure = Pure()
    for seq_id in (1, 2, 3):
        pure.add(seq(seq_id, 20, (seq_id, 10, b"a")))
    assert chunks(pure, 1) == [[(1, 0, 19), (2, 0, 19), (3, 0, 19)]]


def test_one_picture_under_two_salts_is_two_encodings_one_a_step():
    pure = Pure()
    for seq_id, salt in enumerate(("mine", "yours", "mine")):
        pure.add(seq(seq_id, 20, (2, 10, b"a"), salt=salt))
    assert chunks(pure, 2) == [[(0, 0, 19), (1, 0, 2), (2, 0, 19)], [(1, 2, 19)]]


@pytest.mark.parametrize("whole", [False, True])
def test_only_where_the_model_needs_it_no_chunk_ends_inside_an_image(whole):
    pure = Pure(whole=whole, chunk=16)
    pure.add(seq(1, 70, (10, 20, b"a"), (40, 5, b"b")))
    ends = [end for step in chunks(pure, 8) for _, _, end in step]
    assert ends == ([10, 30, 32, 48, 64, 69] if whole else [16, 32, 48, 64, 69])


class Inputs:
    """Tensors that are gone, as those of an image that was encoded before."""

    def prepare(self) -> bool:
        return False

    def get(self) -> dict[str, object]:
        raise AssertionError("the engine thread would wait for these")

    def drop(self) -> None:
        pass


def run_step(pure: Pure) -> list[tuple[int, int, int]]:
    """One step as the runner takes it: each chunk finds its features, or their tensors."""
    plan = pure.schedule()
    for chunk in plan.prefill:
        for item in chunk.seq.prompt.media:
            key = chunk.seq.media_key(item)
            if item.offset < chunk.end and item.end > chunk.start and key not in pure.features:
                inputs = item.inputs if isinstance(item.inputs, dict) else item.inputs.get()
                pure.features.store(key, Features(item.length * 2 + len(inputs)))
    chunks = [(chunk.seq.seq_id, chunk.start, chunk.end) for chunk in plan.prefill]
    pure.update(StepOutput(prefilled=tuple((seq_id, end) for seq_id, _, end in chunks)))
    return chunks


def test_an_image_to_encode_does_not_evict_features_that_a_chunk_of_the_same_step_uses():
    """Or the engine thread would have to wait until that chunk's tensors are made again."""
    pure = Pure(rows_bytes=1300)  # beside both rows, the features of one of the two images fit
    known = seq(1, 200, (0, 100, b"known"))
    known = replace(known, prompt=replace(known.prompt, media=(replace(known.prompt.media[0], inputs=Inputs()),)))
    pure.features.store(known.media_key(known.prompt.media[0]), Features(200))
    pure.add(known)
    pure.add(seq(2, 300, (0, 250, b"new")))
    assert run_step(pure) == [(1, 0, 64)], "the second image waits for a step that has room"
    chunks = [chunk for _ in range(12) for chunk in run_step(pure)]
    assert max(end for seq_id, _, end in chunks if seq_id == 1) == 199
    assert max(end for seq_id, _, end in chunks if seq_id == 2) == 299


def test_a_row_that_leaves_in_a_step_evicts_no_features_that_its_chunks_use():
    pure = Pure(rows_bytes=1000)
    key = ("", b"known")
    pure.features.store(key, Features(300))
    pure.add(seq(1, 200, (0, 100, b"known")))
    plan = pure.schedule()
    assert [chunk.seq.seq_id for chunk in plan.prefill] == [1]
    pure.images.shrink_to(0)  # as for a row that ends in the same step
    assert key in pure.features
    pure.features.release()  # as the next step does
    pure.images.shrink_to(0)
    assert key not in pure.features


def test_features_give_way_to_live_rows():
    pure = Pure(rows_bytes=1000)
    old = ("", b"old")
    pure.features.store(old, Features(400))
    pure.add(seq(1, 600))
    pure.schedule()
    pure.schedule()
    assert pure.features.used_bytes <= 1000 - pure.scheduler.room.rows_bytes()
    assert old not in pure.features


@pytest.mark.parametrize("whole", [False, True])
def test_repeatable_chunks_end_before_each_image_whatever_is_encoded_already(whole):
    images = ((5, 10, b"a"), (20, 10, b"b"), (60, 30, b"a"))
    edges = [0, 5, 20, 60, 90, 127] if whole else [0, 5, 20, 60, 64, 127]
    for others in (
        [],
        [seq(2, 60, (0, 10, b"a"))],
        [seq(2, 60, (0, 10, b"c")), seq(3, 90, (2, 10, b"d"), (40, 20, b"b"))],
    ):
        pure = Pure(whole=whole, repeatable=True)
        for other in others:
            pure.add(other)
        pure.add(seq(1, 128, *images))
        own = [chunk[1:] for step in chunks(pure, 20) for chunk in step if chunk[0] == 1]
        assert own == list(pairwise(edges))
