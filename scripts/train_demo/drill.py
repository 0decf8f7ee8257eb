"""Random tokens with spans of them said again: dense practice in copying. Knows no language."""

import random

from .encode import IGNORED, Example


def drill(rng: random.Random, num_words: int) -> Example:
    """Ids below `num_words`; the first token of a repeated span is the cue and is not learned."""
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
