"""One streamed reply on a terminal: thoughts folded to a line, text as it comes, figures below. Sends nothing."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.status import Status

from ..status_view import milliseconds
from ..terminal import printable


@dataclass(slots=True)
class Reply:
    """What came so far. `feed` takes the events of a chat completion."""

    started_s: float
    reasoning: str = ""
    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    first_s: float | None = None

    def feed(self, event: dict[str, Any], now: float) -> tuple[str, str]:
        """The reasoning and the text that this event brought."""
        self.usage = event.get("usage") or self.usage
        reasoning, text = "", ""
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            reasoning += delta.get("reasoning_content") or delta.get("reasoning") or ""
            text += delta.get("content") or ""
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        if self.first_s is None and (reasoning or text):
            self.first_s = now
        self.reasoning += reasoning
        self.text += text
        return reasoning, text

    def figures(self, now: float) -> str:
        num_tokens = self.usage.get("completion_tokens")
        if self.first_s is None or num_tokens is None:
            return ""
        details = self.usage.get("prompt_tokens_details") or {}
        writing_s = now - self.first_s
        speed = f", {(num_tokens - 1) / writing_s:.1f} tokens/s" if writing_s > 0 and num_tokens > 1 else ""
        return (
            f"{num_tokens} tokens{speed}, first after {milliseconds(self.first_s - self.started_s)}; "
            f"prompt {self.usage.get('prompt_tokens', 0):,} tokens, {details.get('cached_tokens') or 0:,} cached"
        )


@dataclass(slots=True)
class ReplyPrinter:
    """`show_thinking`: in full, as it comes. `is_plain`: the text alone, for a pipe."""

    console: Console
    show_thinking: bool = False
    is_plain: bool = False

    def print(self, events: Iterator[dict[str, Any]], reply: Reply) -> None:
        """Fills `reply`, which holds what came when this is interrupted."""
        spinner = self.console.status("Reading…", spinner="dots")
        if self._is_live:
            spinner.start()
        try:
            for event in events:
                reasoning, text = reply.feed(event, time.monotonic())
                if reasoning:
                    self._think(reasoning, reply, spinner)
                if text:
                    self._write(text, reply, spinner)
        finally:
            spinner.stop()
            if reply.text or (reply.reasoning and self.show_thinking):
                print(flush=True)

    def close(self, reply: Reply, now: float) -> None:
        if self.is_plain:
            return
        if not reply.text and reply.reasoning and not self.show_thinking:
            self._fold(reply, now)
        if reply.finish_reason == "length":
            self.console.print("It reached its limit of tokens.", style="yellow")
        if figures := reply.figures(now):
            self.console.print(figures, style="dim", markup=False, soft_wrap=True)

    @property
    def _is_live(self) -> bool:
        return self.console.is_terminal and not self.is_plain

    def _think(self, reasoning: str, reply: Reply, spinner: Status) -> None:
        if self.show_thinking and not self.is_plain:
            spinner.stop()
            self.console.print(reasoning, style="dim italic", end="", markup=False, soft_wrap=True)
        elif self._is_live:
            spinner.update(f"Thinking… {len(reply.reasoning.split())} words")

    def _write(self, text: str, reply: Reply, spinner: Status) -> None:
        if reply.text == text:  # the first of it
            spinner.stop()
            if reply.reasoning and not self.is_plain:
                print() if self.show_thinking else self._fold(reply, time.monotonic())
        print(text if self.is_plain else printable(text), end="", flush=True)

    def _fold(self, reply: Reply, now: float) -> None:
        thought_s = now - (reply.first_s or now)
        words = len(reply.reasoning.split())
        self.console.print(f"▸ thought for {thought_s:.1f} s, {words} words (/thinking shows them)", style="dim")
