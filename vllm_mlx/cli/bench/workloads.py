"""What a load asks: conversations made of random words, some of them alike. Knows no server and no clock."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

Messages = list[dict[str, Any]]
Workload = Literal["new", "shared", "turns"]

# Short words that most tokenizers hold whole, so that a word is about a token.
_TEXT = """
time year people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work number night point home water room mother area money story fact
month lot right study book eye job word business issue side kind head house service friend father power hour game line
end member law car city name team minute idea body back parent face level office door health person art war
history party result change morning reason research girl guy moment air teacher force
"""
_WORDS = tuple(_TEXT.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    prompt_words: int
    reply_tokens: int
    turns: int  # of one conversation of the workload `turns`


class Words:
    """Another seed gives other prompts, so that nothing is cached from the last time."""

    def __init__(self, seed: int):
        self._random = random.Random(seed)

    def text(self, num_words: int) -> str:
        return " ".join(self._random.choices(_WORDS, k=max(1, num_words)))


@dataclass(slots=True)
class Conversation:
    """The questions one client asks, one after the other."""

    questions: list[str]
    messages: Messages = field(default_factory=list)

    def requests(self) -> Iterator[Messages]:
        """`answer` the one before the next."""
        for question in self.questions:
            self.messages.append({"role": "user", "content": question})
            yield list(self.messages)

    def answer(self, text: str, reasoning: str) -> None:
        turn = {"role": "assistant", "content": text}
        self.messages.append(turn | ({"reasoning_content": reasoning} if reasoning else {}))


def conversations(workload: Workload, num_requests: int, sizes: Sizes, words: Words) -> list[Conversation]:
    """`new`: nothing in common. `shared`: one long beginning, the first to be asked alone. `turns`: each grows."""
    match workload:
        case "new":
            return [Conversation([words.text(sizes.prompt_words)]) for _ in range(num_requests)]
        case "shared":
            system = {"role": "system", "content": words.text(sizes.prompt_words)}
            return [Conversation([words.text(8)], [system]) for _ in range(num_requests + 1)]
        case "turns":
            lengths = [sizes.prompt_words, *[max(8, sizes.prompt_words // 10)] * (sizes.turns - 1)]
            number = -(-num_requests // sizes.turns)
            return [Conversation([words.text(length) for length in lengths]) for _ in range(number)]
