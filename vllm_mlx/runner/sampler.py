"""Samples the next token of every row of a batch, each row with its own settings. It never reads a token back.

Penalties and biases follow OpenAI and vLLM: presence and frequency penalties count the reply's tokens, the repetition
penalty counts prompt and reply. Truncation (top_k, top_p, min_p) applies after the temperature. A draw adds Gumbel
noise that depends on (seed, position in the reply) only. So a seed gives the same reply alone, in a batch and after
preemption, up to the rounding of the logits.
"""

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ..core.errors import Unsupported
from ..core.events import TokenLogprob
from ..core.sequence import Sequence
from ..core.step import MOST_SCORED
from .masks import Words, apply_mask

_MASK64 = (1 << 64) - 1
_NO_TOP_K = 2**31 - 1  # more than any vocabulary
_MAX_BITS, _BELOW_ONE = 2.0**32 - 1, 1 - 2.0**-24
_MOST_IN_FLOAT = 1 << 22  # logits of a prompt that are in float32 at one time, with copies of them
_LAST_CHOICE = -3e4  # sampled only if a mask allows nothing else; float16 can represent it


@dataclass(slots=True)
class Sampled:
    """The lazy results of one step for all rows."""

    tokens: mx.array  # (rows,)
    logprobs: mx.array | None = None  # (rows,), of the sampled tokens
    top_ids: mx.array | None = None  # (rows, k), most likely first
    top_logprobs: mx.array | None = None  # (rows, k)

    def arrays(self) -> list[mx.array]:
        found = (self.tokens, self.logprobs, self.top_ids, self.top_logprobs)
        return [array for array in found if array is not None]

    def add_logprobs(self, logits: mx.array, num_top: int, read_ids: Rows[int] = ()) -> None:
        """Add the log-probabilities of the tokens, and of the likeliest ones, or of others: `logits: (rows, vocab)`."""
        logits = logits.astype(mx.float32)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        self.logprobs = mx.take_along_axis(logprobs, self.tokens[:, None], axis=-1)[:, 0]
        if num_top:
            top = mx.argpartition(-logprobs, num_top - 1, axis=-1)[:, :num_top]
            if read_ids:
                top = mx.broadcast_to(mx.array(list(read_ids)), top.shape)
            values = mx.take_along_axis(logprobs, top, axis=-1)
            order = mx.argsort(-values, axis=-1)
            self.top_ids = mx.take_along_axis(top, order, axis=-1)
            self.top_logprobs = mx.take_along_axis(values, order, axis=-1)

    def read_logprobs(self, tokens: Rows[int], num_tops: Rows[int | None]) -> list[TokenLogprob | None]:
        """Read them, and wait for the device. `num_tops`: the likeliest tokens of each row; None for a row of none."""
        if self.logprobs is None:
            return [None] * len(tokens)
        chosen: Any = self.logprobs.tolist()
        tops: list[list[tuple[int, float]]] = [[] for _ in tokens]
        if self.top_ids is not None and self.top_logprobs is not None:
            ids: Any = self.top_ids.tolist()
            values: Any = self.top_logprobs.tolist()
            tops = [list(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True)]
        return [
            None if k is None else TokenLogprob(token, value, tuple(top[:k]))
            for k, token, value, top in zip(num_tops, tokens, chosen, tops, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class _Places:
    """The row of each logit, and the number of tokens of its sequence up to the token that was fed there."""

    rows: list[int]
    num_tokens: list[int]
    index: mx.array | None = None  # the rows on the device; None if each row has one logit

    def spread(self, array: mx.array) -> mx.array:
        """From an entry for each row to one for each logit."""
        return array if self.index is None else array[self.index]


class Sampler:
    """Sampling state of one batch. It is rebuilt from the sequences whenever a row joins or leaves."""

    def __init__(self, seqs: list[Sequence], vocab_size: int, ends: Rows[int] | None = None):
        """Begin to sample. `ends`: tokens of each sequence before its first draw; by default all computed but one."""
        self._seqs = seqs
        settings = [seq.sampling for seq in seqs]
        drawn = [row for row, setting in enumerate(settings) if not setting.is_greedy]
        self._drawn = {row: index for index, row in enumerate(drawn)}  # its index among them, by row
        self._truncation = _Truncation([settings[row] for row in self._drawn], vocab_size)
        self._temperature = _column([settings[row].temperature for row in self._drawn])
        penalised = any(setting.has_penalties for setting in settings)
        ends = [seq.num_computed_tokens - 1 for seq in seqs] if ends is None else ends
        self._penalties = _Penalties(seqs, vocab_size, ends) if penalised else None
        self._bias = _bias(seqs, vocab_size)
        self._min_tokens = _MinTokens(seqs, vocab_size) if any(seq.min_tokens for seq in seqs) else None
        self._last: tuple[mx.array, mx.array, _Places] | None = None  # of a draw that may be repeated
        self._num_top = max((s.num_top_logprobs for s in settings if s.num_top_logprobs is not None), default=None)
        self._read_ids = next((setting.read_ids for setting in settings if setting.read_ids), ())

    def sample(
        self, logits: mx.array, fed: mx.array, words: Words | None = None, *, keeps_logits: bool = False
    ) -> Sampled:
        """Sample from `logits: (rows, vocab)` after feeding `fed: (rows,)`, which every sequence's progress counts.

        `words` are the masks of the rows, which override everything else. If None, every token is allowed.
        `keeps_logits`: `sample_again` may follow.
        """
        places = _Places(list(range(len(self._seqs))), [seq.num_computed_tokens for seq in self._seqs])
        adjusted = logits if self._penalties is None else self._penalties.apply(logits, fed)
        adjusted = self._adjust(adjusted, places)
        self._last = (adjusted, logits, places) if keeps_logits else None
        return self._sample(adjusted, logits, places, words)

    def sample_again(self, words: Words) -> Sampled:
        """Repeat the last draw with masks that were not known at that time."""
        assert self._last is not None, "the last draw kept its logits"
        return self._sample(*self._last, words)

    def sample_blocks(self, logits: mx.array, blocks: Rows[Rows[int]], words: Words | None = None) -> Sampled:
        """Sample behind each token of each row's block: its last known token, and drafts. `logits: (tokens, vocab)`.

        Each draw is the one that the row would make if the tokens before it are its reply. `keep` follows.
        """
        rows = [row for row, block in enumerate(blocks) for _ in block]
        num_tokens = [
            seq.num_tokens + place for seq, block in zip(self._seqs, blocks, strict=True) for place in range(len(block))
        ]
        places = _Places(rows, num_tokens, mx.array(rows))
        adjusted = logits if self._penalties is None else self._penalties.apply_blocks(logits, blocks, places)
        return self._sample(self._adjust(adjusted, places), logits, places, words)

    def guess(self, logits: mx.array, rows: list[int], place: int) -> mx.array:
        """Draw a draft of each of these rows, behind `place` others, from an MTP head's `logits: (rows, vocab)`.

        The noise is that of the draw which verifies it, so that the two agree as often as they can. Penalties and masks
        are left out: they depend on drafts that are not read yet.
        """
        places = _Places(rows, [self._seqs[row].num_tokens + place for row in rows], mx.array(rows))
        return self._choose(self._adjust(logits, places), places)

    def keep(self, blocks: Rows[Rows[int]], kept: Rows[int]) -> None:
        """Count the first `kept[r]` tokens of row r's block, which its sequence does not count yet."""
        if self._penalties is not None:
            self._penalties.keep([block[:num] for block, num in zip(blocks, kept, strict=True)])

    def _adjust(self, logits: mx.array, places: _Places) -> mx.array:
        if self._bias is not None:
            logits = logits + places.spread(self._bias)
        return logits if self._min_tokens is None else self._min_tokens.apply(logits, places)

    def _sample(self, adjusted: mx.array, logits: mx.array, places: _Places, words: Words | None) -> Sampled:
        if words is not None:
            adjusted = apply_mask(adjusted, words)
        sampled = Sampled(self._choose(adjusted, places))
        if self._num_top is not None:
            sampled.add_logprobs(logits, self._num_top, self._read_ids)
        return sampled

    def _choose(self, logits: mx.array, places: _Places) -> mx.array:
        drawn = [place for place, row in enumerate(places.rows) if row in self._drawn]
        if not drawn:
            return mx.argmax(logits, axis=-1)
        if len(drawn) == len(places.rows):
            return self._draw(logits, places, drawn)
        greedy = [place for place, row in enumerate(places.rows) if row not in self._drawn]
        tokens = [mx.argmax(logits[mx.array(greedy)], axis=-1), self._draw(logits[mx.array(drawn)], places, drawn)]
        return mx.concatenate(tokens)[mx.array(np.argsort(greedy + drawn))]

    def _draw(self, logits: mx.array, places: _Places, drawn: list[int]) -> mx.array:
        """`logits` are those of the places in `drawn`."""
        seqs = [self._seqs[places.rows[place]] for place in drawn]
        keys = mx.array(
            [
                row_key(seq.sampling.seed, places.num_tokens[place] - seq.num_prompt_tokens)
                for seq, place in zip(seqs, drawn, strict=True)
            ],
            dtype=mx.uint32,
        )
        own = None if places.index is None else mx.array([self._drawn[places.rows[place]] for place in drawn])
        return self._truncation.draw(logits, self._temperature, random_bits(keys, logits.shape[-1]), own)


def score(seq: Sequence, start: int, logits: mx.array) -> tuple[TokenLogprob, ...]:
    """Return the log-probabilities of the tokens behind the positions from `start` on. Lazy `logits: (n, vocab)`.

    Raises Unsupported for too many positions, which a chunk has only if the model computes prompts whole.
    """
    if len(logits) > MOST_SCORED:
        message = f"`echo` with `logprobs` takes at most {MOST_SCORED + 1} tokens where a prompt is computed whole."
        raise Unsupported(message, param="echo")
    num_rows, num_top = max(1, _MOST_IN_FLOAT // logits.shape[1]), seq.sampling.num_top_logprobs or 0
    found: list[TokenLogprob | None] = []
    for at in range(0, len(logits), num_rows):
        rows = logits[at : at + num_rows]
        tokens = seq.tokens(start + at + 1, start + at + 1 + len(rows))
        sampled = Sampled(mx.array(tokens))
        sampled.add_logprobs(rows, num_top)
        found += sampled.read_logprobs(tokens, [num_top] * len(rows))
    return tuple(logprob for logprob in found if logprob is not None)


def row_key(seed: int, position: int) -> tuple[int, int]:
    """Return the random key of one draw, by SplitMix64 (Steele, Lea, Flood 2014) of seed and position."""
    state = (_mix(seed & _MASK64) + (position + 1) * 0x9E3779B97F4A7C15) & _MASK64
    mixed = _mix(state)
    return mixed >> 32, mixed & 0xFFFFFFFF


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def random_bits(keys: mx.array, vocab_size: int) -> mx.array:
    """`keys: (rows, 2)` -> `bits: (rows, vocab)`, each row's by its own key. MLX hands out bits as keys of a split."""
    pairs: mx.array = mx.vmap(lambda key: mx.random.split(key, (vocab_size + 1) // 2))(keys)
    return pairs.reshape(len(keys), -1)[:, :vocab_size]


def _column(values: list[float]) -> mx.array:
    return mx.array(values, dtype=mx.float32)[:, None]


def _bias(seqs: list[Sequence], vocab_size: int) -> mx.array | None:
    if not any(seq.sampling.logit_bias for seq in seqs):
        return None
    bias = np.zeros((len(seqs), vocab_size), dtype=np.float32)
    for row, seq in enumerate(seqs):
        for token_id, value in seq.sampling.logit_bias.items():
            bias[row, token_id] = value
    return mx.array(bias)


# The functions below are compiled: MLX runs successive element-wise operations as one kernel. Only another type of
# logits makes it compile again, because every value is an input, and the functions fix no shape.


def _draw(logits: mx.array, temperature: mx.array, bits: mx.array, log_min_p: mx.array) -> mx.array:
    scores = logits.astype(mx.float32) / temperature
    return _draw_above(scores, mx.max(scores, axis=-1, keepdims=True) + log_min_p, bits)


def _draw_sorted(
    logits: mx.array,
    temperature: mx.array,
    bits: mx.array,
    log_min_p: mx.array,
    top_p: mx.array,
    top_k: mx.array,
    rank: mx.array,
) -> mx.array:
    """`rank: (1, vocab)` counts from 0. A range that was made here would keep the first vocabulary's width."""
    scores = logits.astype(mx.float32) / temperature
    cutoff = mx.max(scores, axis=-1, keepdims=True) + log_min_p
    descending = -mx.sort(-scores, axis=-1)
    probs = mx.softmax(descending, axis=-1)
    before = mx.cumsum(probs, axis=-1) - probs  # probability mass of the more likely tokens
    kept = ((before < top_p) & (rank < top_k)) | (rank == 0)  # rank 0 stays: a tiny top_p may be 0 in float32
    cutoff = mx.maximum(cutoff, mx.min(mx.where(kept, descending, mx.inf), axis=-1, keepdims=True))
    return _draw_above(scores, cutoff, bits)


def _draw_above(scores: mx.array, cutoff: mx.array, bits: mx.array) -> mx.array:
    """Add Gumbel noise, as `mx.random.gumbel` makes it of its bits, and take the best."""
    uniform = mx.minimum(bits.astype(mx.float32) / _MAX_BITS, _BELOW_ONE)
    noise = -mx.log(-mx.log(uniform))
    return mx.argmax(mx.where(scores >= cutoff, scores, -mx.inf) + noise, axis=-1)


def _penalise(
    logits: mx.array,
    counts: mx.array,
    seen: mx.array,
    presence: mx.array,
    frequency: mx.array,
    repetition: mx.array,
) -> mx.array:
    repeated = mx.where(logits > 0, logits / repetition, logits * repetition)
    logits = mx.where(seen > 0, repeated, logits)
    return logits - frequency * counts - presence * (counts > 0)


draw, draw_sorted, penalise = (mx.compile(works, shapeless=True) for works in (_draw, _draw_sorted, _penalise))


class _Truncation:
    """Applies top_k, top_p and min_p of the drawn rows as one cut-off per row, with one sort for all three."""

    def __init__(self, settings: list[Any], vocab_size: int):
        self._log_min_p = _column([float(np.log(s.min_p)) if s.min_p > 0 else -np.inf for s in settings])
        self._is_sorted = any(s.top_k > 0 or s.top_p < 1 for s in settings)
        if self._is_sorted:
            self._top_k = mx.array([min(s.top_k or _NO_TOP_K, _NO_TOP_K) for s in settings])[:, None]
            self._top_p = _column([s.top_p for s in settings])
            self._rank = mx.arange(vocab_size)[None]

    def draw(self, logits: mx.array, temperature: mx.array, bits: mx.array, own: mx.array | None) -> mx.array:
        """Draw one token for each logit: (rows,). `own` has the drawn row of each; None if each row has one logit."""
        settings = [temperature, self._log_min_p, *([self._top_p, self._top_k] if self._is_sorted else [])]
        temperature, log_min_p, *cuts = settings if own is None else [setting[own] for setting in settings]
        if cuts:
            return draw_sorted(logits, temperature, bits, log_min_p, *cuts, self._rank)
        return draw(logits, temperature, bits, log_min_p)


class _Penalties:
    def __init__(self, seqs: list[Sequence], vocab_size: int, ends: Rows[int]):
        """Count the first `ends[r]` tokens of each sequence; `apply` and `keep` add those that are fed."""
        self._seqs = seqs
        counts = np.zeros((len(seqs), vocab_size), dtype=np.float32)  # tokens of the reply
        seen = np.zeros((len(seqs), vocab_size), dtype=np.float32)  # tokens of prompt and reply
        for row, (seq, end) in enumerate(zip(seqs, ends, strict=True)):
            if seq.sampling.has_penalties:
                np.add.at(counts[row], seq.tokens(seq.num_prompt_tokens, end), 1)
                seen[row, seq.tokens(0, end)] = 1
        self._counts, self._seen = mx.array(counts), mx.array(seen)
        self._rows = mx.arange(len(seqs))
        self._presence = _column([seq.sampling.presence_penalty for seq in seqs])
        self._frequency = _column([seq.sampling.frequency_penalty for seq in seqs])
        self._repetition = _column([seq.sampling.repetition_penalty for seq in seqs])

    def apply_blocks(self, logits: mx.array, blocks: Rows[Rows[int]], places: _Places) -> mx.array:
        """As `apply`, where each place also counts the tokens of its block up to itself. Nothing is kept."""
        pairs: list[tuple[int, int, float]] = []
        start = 0
        for row, block in enumerate(blocks):
            for index, token_id in enumerate(block):
                in_reply = self._in_reply(row, index)
                pairs += [(start + place, token_id, in_reply) for place in range(index, len(block))]
            start += len(block)
        counts, seen = _counted(places.spread(self._counts), places.spread(self._seen), pairs)
        presence, frequency, repetition = map(places.spread, (self._presence, self._frequency, self._repetition))
        return penalise(logits, counts, seen, presence, frequency, repetition)

    def keep(self, blocks: Rows[Rows[int]]) -> None:
        """Count the tokens of each row that `apply_blocks` has counted for the moment only."""
        pairs = [
            (row, token_id, self._in_reply(row, index))
            for row, block in enumerate(blocks)
            for index, token_id in enumerate(block)
        ]
        self._counts, self._seen = _counted(self._counts, self._seen, pairs)

    def _in_reply(self, row: int, index: int) -> float:
        """1 if token `index` of a row's block belongs to its reply."""
        seq = self._seqs[row]
        return float(seq.num_tokens + index > seq.num_prompt_tokens)

    def apply(self, logits: mx.array, fed: mx.array) -> mx.array:
        in_reply = mx.array([float(seq.num_computed_tokens > seq.num_prompt_tokens) for seq in self._seqs])
        self._counts = self._counts.at[self._rows, fed].add(in_reply)
        self._seen = self._seen.at[self._rows, fed].maximum(1.0)
        return penalise(logits, self._counts, self._seen, self._presence, self._frequency, self._repetition)


def _counted(counts: mx.array, seen: mx.array, pairs: Rows[tuple[int, int, float]]) -> tuple[mx.array, mx.array]:
    """Return counts and marks with these tokens added: (place, token id, 1 if the token belongs to the reply)."""
    places, token_ids, in_reply = (mx.array(list(column)) for column in zip(*pairs, strict=True))
    return counts.at[places, token_ids].add(in_reply), seen.at[places, token_ids].maximum(1.0)


class _MinTokens:
    def __init__(self, seqs: list[Sequence], vocab_size: int):
        self._seqs = seqs
        stops = np.zeros((len(seqs), vocab_size), dtype=bool)
        for row, seq in enumerate(seqs):
            stops[row, [token_id for token_id in seq.stop_token_ids if 0 <= token_id < vocab_size]] = True
        self._stops = mx.array(stops)

    def apply(self, logits: mx.array, places: _Places) -> mx.array:
        seqs = [self._seqs[row] for row in places.rows]
        too_early = [
            num_tokens - seq.num_prompt_tokens < seq.min_tokens
            for seq, num_tokens in zip(seqs, places.num_tokens, strict=True)
        ]
        if not any(too_early):
            return logits
        return mx.where(places.spread(self._stops) & mx.array(too_early)[:, None], _LAST_CHOICE, logits)
