"""Short runs after load, which measure this machine and let Metal compile its kernels. They know no request.

They measure the speed of prefill, and the memory that a chunk takes. A device compiles a kernel when it is first used,
so the rows that are decoded sample in every way that replies do, and one is masked.
"""

import time
from dataclasses import dataclass

import mlx.core as mx

from ..core.config import DEFAULT_MAX_PIXELS, PROBE_PIXELS
from ..core.request import TokenSampling
from ..core.sequence import Constraint, PromptInputs, ReasoningRule, Sequence, Tag
from ..core.step import BY_HEAD, PrefillChunk, StepPlan
from .attention import AttentionShape, observed
from .device import DeviceWatch, device_memory, peak_of
from .encoder import EncoderModel
from .model import Model, MultimodalModel
from .runner import RowFences, Runner
from .vision_inputs import encode

# No Mac has verified these constants.
_PROBE_TOKENS = 256
_LONG_PROBE_TOKENS = 1024  # enough for an expert of a mixture to get many rows, as in a long chunk
_SHORT_PROBE_TOKENS = 64  # enough to touch nearly all experts of a mixture, as every chunk does
_MOST_ENCODE_S = 3.0  # seconds of one image, for which all replies wait
_FEWEST_PIXELS = 256 * 256  # an image may have this many, however slow the encoder
_MOST_OVERHEAD = 0.9  # share of a probe, however the two are measured
_LENGTHS = (8, 40)  # different, as in requests
_DRAFTS = 1, 3, 7  # drafts of a row in the passes of the warm-up
_NUM_STEPS = 3
_SAMPLINGS = (  # pairs of rows that decode together
    (
        TokenSampling(temperature=0.0, num_top_logprobs=1, logit_bias={0: 1.0}),
        TokenSampling(temperature=0.7, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.1),
    ),
    (TokenSampling(temperature=1.0), TokenSampling(temperature=1.0)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    tokens_per_s: float
    overhead_s: float  # seconds of a chunk in addition to those of its tokens: weights are read, kernels are started
    chunk_bytes_per_token: float  # activations at their peak
    attention: frozenset[AttentionShape] = frozenset()
    half_share: float = 1.0  # seconds of a chunk of half as many tokens as the shorter probe ÷ those of that probe
    long_probe_s: float | None = None  # seconds of a chunk of 1,024 tokens, for a mixture of experts


def calibrate(model: Model | EncoderModel, *, has_experts: bool = False) -> Calibration:
    """Measure a few forward passes. The first one of a length also compiles kernels and is not counted.

    The line through the times of two lengths begins at the overhead. The times of many experts do not form a line.
    """
    with observed() as attention:
        _run(model, _PROBE_TOKENS)
    mx.clear_cache()
    probe_s, peak_bytes = peak_of(lambda: _run(model, _PROBE_TOKENS))
    half_s, short_s = (min(_run(model, n) for _ in range(2)) for n in (_SHORT_PROBE_TOKENS // 2, _SHORT_PROBE_TOKENS))
    long_s = _run(model, _LONG_PROBE_TOKENS) if has_experts else None
    mx.clear_cache()
    overhead_s = overhead_of(short_s, probe_s)
    return Calibration(
        tokens_per_s=_PROBE_TOKENS / max(1e-6, probe_s - overhead_s),
        overhead_s=overhead_s,
        chunk_bytes_per_token=peak_bytes / _PROBE_TOKENS,
        attention=frozenset(attention),
        half_share=half_s / short_s,
        long_probe_s=long_s,
    )


def overhead_of(short_s: float, probe_s: float) -> float:
    """Seconds of a chunk in addition to those of its tokens, from the seconds of a short probe and of a longer one."""
    per_token_s = (probe_s - short_s) / (_PROBE_TOKENS - _SHORT_PROBE_TOKENS)
    overhead_s = short_s - _SHORT_PROBE_TOKENS * per_token_s
    return max(0.0, min(overhead_s, _MOST_OVERHEAD * short_s, _MOST_OVERHEAD * probe_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageCost:
    feature_bytes_per_token: int
    encoder_bytes: int  # activations at their peak, for the largest image
    max_pixels: int  # the largest image has this many


def calibrate_images(
    model: MultimodalModel, sizes: tuple[PromptInputs, PromptInputs], max_tokens: int, max_pixels: int | None
) -> ImageCost:
    """Run the vision encoder on a small and a larger image, and extrapolate activations and time by tokens from there.

    The largest image has `max_pixels` and `max_tokens`. Without `max_pixels`, the default and the time decide.
    """
    small, large = (prompt.media[0].length for prompt in sizes)
    (feature_bytes, low_bytes, _), (_, high_bytes, _) = (_encode(model, prompt) for prompt in sizes)
    if max_pixels is None:  # the first runs have also compiled kernels
        small_s, large_s = (_encode(model, prompt)[2] for prompt in sizes)
        max_pixels = timely_pixels((small, small_s), (large, large_s), max_tokens)
        max_tokens = _tokens_of(max_pixels, large, max_tokens)
    per_token = max(0.0, (high_bytes - low_bytes) / (large - small)) if large > small else 0.0
    return ImageCost(
        feature_bytes_per_token=-(-feature_bytes // small),
        encoder_bytes=int(max(low_bytes, high_bytes) + per_token * max(0, max_tokens - large)),
        max_pixels=max_pixels,
    )


def timely_pixels(low: tuple[int, float], high: tuple[int, float], max_tokens: int) -> int:
    """Halve the default size, which has `max_tokens`, until the encoder reads an image in time -> its pixels.

    `low`, `high`: tokens and seconds of two images. A parabola goes through them and zero: attention grows with the
    square of the tokens. If it would bend downwards, it is a line through the two.
    """
    (small, small_s), (large, large_s), pixels = low, high, DEFAULT_MAX_PIXELS
    if large <= small:  # the processor gives every image the same size
        return pixels
    linear = max(0.0, (large_s - small_s) / (large - small))
    square = max(0.0, (large_s / large - small_s / small) / (large - small))

    def seconds(n: float) -> float:
        return large_s + linear * (n - large) + square * (n - large) * (n - small)

    while pixels > _FEWEST_PIXELS and seconds(_tokens_of(pixels, large, max_tokens)) > _MOST_ENCODE_S:
        pixels //= 2
    return pixels


def _tokens_of(pixels: int, probe_tokens: int, max_tokens: int) -> int:
    """Return tokens of an image, which grow with its size until the processor scales it down by itself."""
    return min(max_tokens, -(-probe_tokens * pixels // PROBE_PIXELS))


def _encode(model: MultimodalModel, prompt: PromptInputs) -> tuple[int, int, float]:
    """Return bytes of the features, bytes of the activations at their peak, and seconds."""
    mx.clear_cache()
    start = time.perf_counter()
    features, peak = peak_of(lambda: encode(model.module, list(prompt.token_ids), prompt.media[0]))
    seconds = time.perf_counter() - start
    mx.clear_cache()
    return features.nbytes, peak, seconds


def _run(model: Model | EncoderModel, num_tokens: int) -> float:
    start = time.perf_counter()
    model.probe(num_tokens)
    return time.perf_counter() - start


class _NoTags:
    leftover: tuple[int, ...] = ()

    def feed(self, token_id: int) -> Tag | None:
        return None


def warm_up(model: Model, *, has_drafts: bool = False, fences: type[RowFences] = RowFences) -> None:
    """Prefill two rows, decode them in two groups and then in one if the model can; once for each way to draw.

    `has_drafts`: also verify drafts of two rows and of one.
    """
    runner = Runner(model, DeviceWatch(device_memory().total_bytes))
    runner.fences = fences
    for samplings in _SAMPLINGS:
        seqs = tuple(_row(model, length, sampling) for length, sampling in zip(_LENGTHS, samplings, strict=True))
        runner.prefill(PrefillChunk(seq, 0, seq.prefill_end) for seq in seqs)
        for seq in seqs:
            seq.num_computed_tokens = seq.prefill_end
        isolated = frozenset(seq.seq_id for seq in seqs if model.no_shared_forward is not None)
        for step in range(_NUM_STEPS):
            for seq in seqs:
                seq.num_computed_tokens += 1
            is_group = model.can_batch and step > 0
            runner.decode(StepPlan(decode=(seqs,) if is_group else tuple((seq,) for seq in seqs), isolated=isolated))
        if has_drafts:
            _verify(runner, seqs, isolated)
        runner.reset()


def _verify(runner: Runner, seqs: tuple[Sequence, ...], isolated: frozenset[int]) -> None:
    """Verify some widths of drafts, since each may have its own kernels. An MTP head also drafts them."""
    runner.decode(StepPlan(decode=tuple((seq,) for seq in seqs), isolated=isolated, reads=True))
    for rows in (seqs, seqs[:1]):
        for num_drafts in _DRAFTS:
            drafts = {seq.seq_id: (BY_HEAD if runner.model.num_head_layers else 0,) * num_drafts for seq in rows}
            runner.decode(StepPlan(decode=tuple((seq,) for seq in rows), isolated=isolated, drafts=drafts))


def _row(model: Model, length: int, sampling: TokenSampling) -> Sequence:
    return Sequence(
        seq_id=-length,
        prompt=PromptInputs(token_ids=(0,) * length),
        sampling=sampling,
        max_tokens=_NUM_STEPS,
        min_tokens=1,
        stop_token_ids=frozenset({1}),
        constraint=_masked(model.vocab_size) if sampling.top_p < 1 else None,
    )


def _masked(vocab_size: int) -> Constraint:
    """Return a constraint whose reasoning budget is spent: its mask allows one token."""
    rule = ReasoningRule(new_watch=_NoTags, starts=(), end=(0,) * _NUM_STEPS, is_open=True, may_open=False, budget=0)
    return Constraint(mask_words=-(-vocab_size // 32), reasoning=rule)
