"""Asks a server from several threads at once and notes when each part of each reply came. Makes no figures."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

from ...core.errors import VLLMMLXError
from ..remote import Remote
from .workloads import Conversation, Messages


@dataclass(slots=True)
class Timed:
    """One reply. Moments are of `time.perf_counter`, `sent_s` before the connection is made."""

    sent_s: float
    moments: list[float] = field(default_factory=list)  # of each part of text or reasoning
    usage: dict[str, Any] = field(default_factory=dict)
    text: str = ""
    reasoning: str = ""
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        """As the server counts; without that, its parts."""
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
