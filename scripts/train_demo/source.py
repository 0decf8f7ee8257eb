"""Examples in batches, drawn from a mixture."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from .batches import pack
from .chat import Conversation
from .encode import IGNORED, Encoder, Example
from .errands import by_echo
from .held_out import THINKING
from .mixture import KINDS, PRACTICE, Mixture

BATCH_TOKENS = 2_560
POOL_BATCHES = 12
ALL_BLOCKS = 0.6  # of the examples show the reasoning of all replies


@dataclass(slots=True)
class Source:
    """Batches without end, the same for the same seed."""

    encoder: Encoder
    num_words: int
    rng: random.Random
    mixture: Mixture
    max_tokens: int
    echo_writes: bool
    waiting: list[list[Example]] = field(default_factory=list)

    def example(self) -> Example:
        kind = self.mixture.next_kind()
        while True:
            made = drill(self.rng, self.num_words) if kind == "drill" else self.encoded({**KINDS, **PRACTICE}[kind])
            if len(made.ids) <= self.max_tokens:
                self.mixture.account(kind, len(made.ids))
                return made

    def encoded(self, make: Callable[[random.Random], Conversation]) -> Example:
        conversation = by_echo(make(self.rng)) if self.echo_writes else make(self.rng)
        decided = [self.rng.random() < THINKING for _ in conversation.turns]
        return self.encoder.example(conversation, decided.__getitem__, all_blocks=self.rng.random() < ALL_BLOCKS)

    def next_batch(self, shares: dict[str, float]) -> list[Example]:
        """Draw from a pool that is sorted by length into batches, which come in random order."""
        if not self.waiting:
            self.mixture.change(shares)
            pool, size = [], 0
            while size < POOL_BATCHES * BATCH_TOKENS:
                pool.append(self.example())
                size += len(pool[-1].ids)
            self.waiting = pack(pool, BATCH_TOKENS)
            self.rng.shuffle(self.waiting)
        return self.waiting.pop()


def drill(rng: random.Random, num_words: int) -> Example:
    """Random tokens with spans of them said again: dense practice in copying.

    Ids are below `num_words`. The first token of a repeated span is the cue and is not learned.
    """
    length = rng.randint(16, rng.choice((70, 70, 250)))
    ids = [rng.randrange(1, num_words) for _ in range(length)]
    labels = [IGNORED] * length
    for _ in range(rng.randint(3, 8)):
        size = rng.randint(4, 14)
        start = rng.randrange(length - size)
        span = ids[start : start + size]
        ids += span
        labels += [IGNORED, *span[1:]]
    return Example(ids, labels, [(i, i, i) for i in range(len(ids))], [], [])
