"""The checkpoint in torch: it confirms the frozen replies of the tests, and judges replies by teacher forcing."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from transformers import PreTrainedTokenizerFast, Qwen3_5ForConditionalGeneration

from .chat import IGNORED, Encoder, Example, Picture, Segment, paint
from .learning import collate, learned_logits
from .scoring import Greedy, Item, Verdict, prompt_of
from .tokenizer import token_ids


def drawn(color: str, shape: str, side: int) -> Picture:
    """Return an image as the tests draw it: a shape of pure colour, in the middle, on white."""
    image = Image.new("RGB", (side, side), "white")
    paint(ImageDraw.Draw(image), shape, (side / 2, side / 2, side * 0.375), color)
    return Picture(image, color, shape)


class Torch:
    """The same checkpoint in transformers."""

    def __init__(self, folder: Path):
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        self.model = Qwen3_5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        self.encoder = Encoder(self.tokenizer)
        self.pad_id = token_ids(self.tokenizer).text_end

    @torch.no_grad()
    def agrees(self, prompt: str, pictures: list[Picture], reply: str) -> bool:
        """Return whether greedy decoding would give just this reply and then end the turn."""
        parts = [Segment(prompt), Segment(f"{reply}<|im_end|>", learned=True)]
        logits, targets = learned_logits(self.model, collate([self.encoder.encode(parts, pictures)], self.pad_id))
        return bool((logits.argmax(-1) == targets).all())


def freeze(folder: Path, file: Path) -> None:
    """Answers the prompts in `file` anew and writes the replies into it; refuses where torch and MLX differ."""
    cases = json.loads(file.read_text())
    differing = []
    greedy, other = Greedy(folder), Torch(folder)
    for case in cases:
        pictures = [drawn(*described) for described in case["pictures"]]
        images = [p.image for p in pictures]
        reply, _ = greedy.complete(case["messages"], case["tools"], case["thinking"], images)
        prompt = prompt_of(other.tokenizer, case["messages"], case["tools"], case["thinking"])
        if not other.agrees(prompt, pictures, reply):
            differing.append(case["name"])
        changed = "" if case.get("reply") in (None, reply) else f"   (was {case['reply']!r})"
        print(f"{case['name']}: {reply!r}{changed}")
        case["reply"] = reply
    if differing:
        raise SystemExit(f"torch and MLX differ on: {', '.join(differing)}")
    file.write_text(json.dumps(cases, indent=1, ensure_ascii=False) + "\n")


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
