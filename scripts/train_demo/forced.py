"""Judges replies by teacher forcing in torch: one pass over a conversation shows the result of greedy decoding."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from .batches import collate, learned_logits
from .encode import IGNORED, Example
from .frozen import Torch
from .scoring import Item, Verdict


def reply_places(labels: list[int]) -> list[range]:
    """Return where the tokens of each reply stand."""
    found: list[range] = []
    for place, label in enumerate(labels):
        if label == IGNORED:
            continue
        if found and found[-1].stop == place:
            found[-1] = range(found[-1].start, place + 1)
        else:
            found.append(range(place, place + 1))
    return found


class Forced:
    """A checkpoint in transformers. Reasoning counts: a reply is right if all of its tokens are the likeliest."""

    def __init__(self, folder: Path):
        self.known = Torch(folder)

    def verdicts(self, questions: Iterable[Item]) -> Iterator[Verdict]:
        return map(self.judged, questions)

    def judged(self, item: Item) -> Verdict:
        example = self.known.encoder.example(item.conversation, lambda turn: item.thinking, all_blocks=False)
        likeliest = self.likeliest(example)
        replies = dict(zip((i for i, _ in item.conversation.replies()), reply_places(example.labels), strict=True))
        length = 0
        for turn in item.turns:
            places = replies[turn]
            length = places.start
            wanted, given = [example.ids[p] for p in places], [likeliest[p] for p in places]
            if wanted != given:
                return Verdict(item.skill, length, self.difference(wanted, given))
        return Verdict(item.skill, length)

    @torch.no_grad()
    def likeliest(self, example: Example) -> dict[int, int]:
        """For each learned place the token that the model would put there."""
        logits, _ = learned_logits(self.known.model, collate([example], self.known.pad_id))
        places = [place for run in reply_places(example.labels) for place in run]
        return dict(zip(places, logits.argmax(-1).tolist(), strict=True))

    def difference(self, wanted: list[int], given: list[int]) -> tuple[str, str]:
        """Return the expected text, and the given one up to its first wrong token."""
        first = next(i for i, (a, b) in enumerate(zip(wanted, given, strict=True)) if a != b)
        return self.known.tokenizer.decode(wanted), self.known.tokenizer.decode([*wanted[:first], given[first]])
