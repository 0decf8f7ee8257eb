"""One conversation with a model: its turns, and the request for the next. Knows no terminal and no network."""

import base64
import mimetypes
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..failures import WrongUsage


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What every request of a conversation asks for. None: the server's own default."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    thinking: bool | None = None

    def body(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.max_tokens is not None:
            body["max_tokens"] = self.max_tokens
        if self.temperature is not None:
            body["temperature"] = self.temperature
        if self.thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": self.thinking}
        return body


@dataclass(slots=True)
class Conversation:
    system: str | None = None
    turns: list[dict[str, Any]] = field(default_factory=list)
    images: list[str] = field(default_factory=list)  # data URLs that go with the next question

    @property
    def messages(self) -> list[dict[str, Any]]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.turns]

    def add_image(self, path: Path) -> None:
        """Raises WrongUsage."""
        self.images.append(image_url(path))

    def ask(self, text: str) -> None:
        """The next question, and the images that were waiting for it."""
        content: str | list[dict[str, Any]] = text
        if self.images:
            pictures = [{"type": "image_url", "image_url": {"url": url}} for url in self.images]
            content = [*pictures, {"type": "text", "text": text}]
        self.turns.append({"role": "user", "content": content})
        self.images = []

    def answer(self, text: str, reasoning: str) -> None:
        """What came, whole or stopped. Reasoning goes back as it came: the next prompt then extends this one."""
        turn: dict[str, Any] = {"role": "assistant", "content": text}
        if reasoning:
            turn["reasoning_content"] = reasoning
        self.turns.append(turn)

    def take_back(self) -> None:
        """The question that got no answer, so that it may be asked again."""
        if self.turns and self.turns[-1]["role"] == "user":
            self.turns.pop()

    def clear(self) -> None:
        self.turns, self.images = [], []


def image_url(path: Path) -> str:
    """A file as a `data:` URL: the server may be another machine. Raises WrongUsage."""
    try:
        data = path.expanduser().read_bytes()
    except OSError as error:
        raise WrongUsage(f"Cannot read the image {path}: {error.strerror}.") from error
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    if not kind.startswith("image/"):
        raise WrongUsage(f"{path} is no image: give a PNG, JPEG, WebP or GIF file.")
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
