"""The load of `vllm-mlx bench`: conversations of random words, sent from several threads, each reply timed."""

import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Literal

from ..core.errors import VLLMMLXError
from .remote import Remote

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
    turns: int  # turns of one conversation of the workload `turns`


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


@dataclass(slots=True)
class Timed:
    """One reply. Moments are of `time.perf_counter`, `sent_s` before the connection is made."""

    sent_s: float
    moments: list[float] = field(default_factory=list)  # the time of each part of text or reasoning
    usage: dict[str, Any] = field(default_factory=dict)
    text: str = ""
    reasoning: str = ""
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens as the server counts them; without that, the number of parts."""
        return int(self.usage.get("completion_tokens") or len(self.moments))


@dataclass(frozen=True, slots=True, kw_only=True)
class Asker:
    server: Remote
    model: str
    reply_tokens: int
    temperature: float = 0.0

    def ask(self, messages: Messages) -> Timed:
        """A failure is noted, not raised."""
        body = {
            "model": self.model,
            "messages": messages,
            "max_tokens": self.reply_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        timed = Timed(time.perf_counter())
        try:
            with self.server.events("/v1/chat/completions", body) as events:
                for event in events:
                    _note(event, timed, time.perf_counter())
        except VLLMMLXError as error:
            timed.error = error.message
        if timed.error is None and not timed.moments:
            timed.error = "The reply was empty."
        return timed


def run_load(asker: Asker, conversations: Sequence[Conversation], concurrency: int) -> list[Timed]:
    """Every conversation to its end, `concurrency` at a time. One whose request fails ends there."""
    waiting: SimpleQueue[Conversation] = SimpleQueue()
    for conversation in conversations:
        waiting.put(conversation)
    done: list[Timed] = []  # appending is atomic
    stopped = threading.Event()

    def client() -> None:
        while not stopped.is_set():
            try:
                conversation = waiting.get_nowait()
            except Empty:
                return
            for messages in conversation.requests():
                timed = asker.ask(messages)
                done.append(timed)
                if timed.error is not None or stopped.is_set():
                    break
                conversation.answer(timed.text, timed.reasoning)

    threads = [threading.Thread(target=client, daemon=True) for _ in range(concurrency)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    finally:
        stopped.set()  # by Ctrl-C: nothing more is asked
    return done


def _note(event: dict[str, Any], timed: Timed, now_s: float) -> None:
    timed.usage = event.get("usage") or timed.usage
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        text = delta.get("content") or ""
        reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
        if text or reasoning:
            timed.moments.append(now_s)
        timed.text += text
        timed.reasoning += reasoning
