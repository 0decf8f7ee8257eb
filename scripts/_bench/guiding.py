"""Workload set `guided`: the cost of a grammar for a reply, measured in an engine of this process.

The checkpoint has a vocabulary of 152k made-up words, one of eight rows 16k, and a step takes some 10 ms, as with a
small model on a Mac.
"""

import contextlib
import random
import string
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.support.checkpoints import MARKER_TOKENS, SPECIAL_TOKENS, write_checkpoint
from tests.support.engine_driver import Driver
from tests.support.guiding import PERSON, Guiding
from vllm_mlx.core.request import JsonSchema, TokenSampling
from vllm_mlx.core.sequence import Constraint, PromptInputs, Sequence
from vllm_mlx.runner.row_constraint import RowConstraint

from .figures import OURS, Figure, Measure, at_least, at_most

VOCAB_SIZE = 151_936
CROWD_VOCAB_SIZE = 16_384  # eight rows of the large one take longer than 10 ms a step on a CPU
UNGUIDED = "unguided"
MANY = {"type": "array", "items": PERSON, "minItems": 1000}  # longer than any reply here
PROMPT = 24
NUM_TOKENS = 60
BESIDE = 7  # rows
_MASKS = 400
_SHAPE: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 128, "head_dim": 16}


@contextlib.contextmanager
def prepared(model: Path) -> Iterator[list[Figure]]:
    """Yield the figures of this set. `model`, a tiny checkpoint, is not used, because its vocabulary is too small."""
    alone, crowd = (Load(model.parent, vocab_size) for vocab_size in (VOCAB_SIZE, CROWD_VOCAB_SIZE))
    yield [*alone.figures(), *crowd.crowd_figures()]


def write_large(folder: Path, vocab_size: int) -> Path:
    write_checkpoint(folder, "qwen3", vocab_size=vocab_size, **_SHAPE)
    _tokenizer(vocab_size).save(str(folder / "tokenizer.json"))
    return folder


def _tokenizer(vocab_size: int) -> Tokenizer:
    """Make a vocabulary of bytes, numbers, punctuation, and words of two to nine letters, with and without a space."""
    draw = random.Random(1)
    added = (*SPECIAL_TOKENS, *MARKER_TOKENS)
    words = dict.fromkeys([*pre_tokenizers.ByteLevel.alphabet(), *map(str, range(1000))])
    words |= dict.fromkeys(a + b for a in string.punctuation for b in ("", *string.punctuation, "Ċ", "Ġ"))
    while len(words) < vocab_size - 300:
        word = "".join(draw.choices(string.ascii_lowercase, k=draw.randint(2, 9)))
        words |= dict.fromkeys((word, "Ġ" + word, word.capitalize()))
    vocab = {word: number for number, word in enumerate(list(words)[: vocab_size - 300])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    return tokenizer


class Load:
    """An engine on a checkpoint with a vocabulary of this size, which is written into the folder."""

    def __init__(self, folder: Path, vocab_size: int):
        path = write_large(folder / f"vocabulary-{vocab_size}", vocab_size)
        self._driver = Driver(path, prefix_cache=False)
        self._guiding = Guiding(path, vocab_size=vocab_size)
        self._vocab_size = vocab_size
        self._draw = random.Random(2)
        self._start, self._end = (self._tag_id(tag) for tag in ("<think>", "</think>"))
        self._sampling = TokenSampling(temperature=0, logit_bias={self._end: -100.0})

    def figures(self) -> list[Figure]:
        """Return the figures of one row."""
        thinking = partial(self._rate, 1, thinks=True)
        return [
            self._rate_figure("decode, a schema while the model thinks", 1, 0.98, thinking),
            self._rate_figure("decode, a budget while the model thinks", 1, 0.98, self._budget_rate),
            self._rate_figure("decode in a schema, 1 row", 1, 0.9, partial(self._rate, 1)),
            *(
                Figure(f"mask of a schema, p{share}", "µs", {OURS: partial(self._mask_us, share)}, (at_most(bound),))
                for share, bound in ((50, 300), (99, 5000))
            ),
        ]

    def crowd_figures(self) -> list[Figure]:
        """Return the figures of eight rows."""
        rows = BESIDE + 1
        found = [self._rate_figure(f"decode in a schema, {rows} rows", rows, 0.85, partial(self._rate, rows))]
        for what, thinks in (("think before a schema", True), ("follow a schema", False)):
            measures: dict[str, Measure] = {
                OURS: partial(self._step_beside_ms, thinks=thinks),
                UNGUIDED: partial(self._step_beside_ms, is_guided=False),
            }
            name = f"median step of a row beside {BESIDE} that {what}"
            found.append(Figure(name, "ms", measures, (at_most(1.02, UNGUIDED),)))
        return found

    def _rate_figure(self, name: str, rows: int, bound: float, ours: Measure) -> Figure:
        measures: dict[str, Measure] = {OURS: ours, UNGUIDED: partial(self._rate, rows, is_guided=False)}
        return Figure(name, "tok/s", measures, (at_least(bound, UNGUIDED),))

    def _tag_id(self, tag: str) -> int:
        token_id = self._guiding.tokenizer.token_id(tag)
        assert token_id is not None
        return token_id

    def _rate(self, num_rows: int, *, is_guided: bool = True, thinks: bool = False) -> float:
        """Return the speed of all rows. No row ends its reasoning by itself; prompts and settings are always equal."""
        return self._decoded([self._add(is_guided, thinks) for _ in range(num_rows)])

    def _step_beside_ms(self, *, is_guided: bool = True, thinks: bool = False) -> float:
        """Median milliseconds between two tokens of one unguided row beside others."""
        others = [self._add(is_guided, thinks) for _ in range(BESIDE)]
        return float(np.median(self._step_seconds([*others, self._add(False, False)]))) * 1e3

    def _budget_rate(self) -> float:
        """Return the speed of a row whose budget is never spent."""
        ids = self._prompt()
        constraint = self._guiding.constraint(ids, thinking_token_budget=10**6)
        assert constraint is not None
        return self._decoded([self._driver.add(ids, NUM_TOKENS, self._sampling, constraint=constraint)])

    def _prompt(self) -> list[int]:
        return [*(self._draw.randrange(1000) for _ in range(PROMPT)), self._start]

    def _add(self, is_guided: bool, thinks: bool) -> int:
        ids = self._prompt()
        constraint = self._constraint(ids, thinks) if is_guided else None
        return self._driver.add(ids, NUM_TOKENS, self._sampling, constraint=constraint)

    def _decoded(self, rows: list[int]) -> float:
        """Return tokens/s of these rows, which decode together."""
        seconds = self._step_seconds(rows)
        return len(rows) * len(seconds) / sum(seconds)

    def _step_seconds(self, rows: list[int]) -> list[float]:
        """Seconds of each step in which all of these rows decode, without their first and last tokens."""
        driver, seconds = self._driver, []
        while min(driver.seqs[row].num_output_tokens for row in rows) < 4:
            driver.step()
        while min(driver.seqs[row].num_output_tokens for row in rows) < NUM_TOKENS - 4:
            start = time.perf_counter()
            driver.step()
            seconds.append(time.perf_counter() - start)
        driver.run()
        return seconds

    def _constraint(self, ids: list[int], thinks: bool) -> Constraint:
        constraint = self._guiding.constraint(ids, JsonSchema(MANY))
        assert constraint is not None
        return constraint if thinks else replace(constraint, reasoning=None)

    def _mask_us(self, share: int) -> float:
        """Return a percentile over the masks of one drawn reply, in processor time."""
        ids = [1, 2, 3]
        seq = Sequence(seq_id=0, prompt=PromptInputs(token_ids=tuple(ids)), sampling=TokenSampling(), max_tokens=10**6)
        row = RowConstraint(self._constraint(ids, thinks=False), seq)
        mask = np.empty((self._vocab_size + 31) // 32, dtype=np.uint32)
        times = []
        for _ in range(_MASKS):
            start = time.thread_time()
            row.fill(mask)
            times.append(time.thread_time() - start)
            row.feed(self._any(mask))
        return float(np.percentile(times, share)) * 1e6

    def _any(self, mask: Any) -> int:
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        return int(allowed[self._draw.randrange(len(allowed))])
