"""Protocol-neutral conversation values. Two messages with equal content are equal."""

from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import Any, Literal

_PIECE = 1 << 20
Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class TextPart:
    text: str


@dataclass(frozen=True)
class ImagePart:
    """`max_side`: shown so that it fits a square of so many pixels; None: as it is. `text`: what stands for it in a
    rendered conversation, once that is known.

    Has no slots, so that what is derived from a source of many megabytes is computed once.
    """

    source: str | bytes  # data: URI, URL, or the bytes of a file; once it was seen, a digest of what it shows
    max_side: int | None = field(default=None, kw_only=True)
    text: str = field(default="", kw_only=True)
    param: str = field(default="messages", compare=False, kw_only=True)  # where the client gave it, for errors

    @cached_property
    def source_digest(self) -> bytes:
        return _digest(self.source)


@dataclass(frozen=True)
class VideoPart:
    """`fps`: frames of a second that are shown, or that were taken where the source is frames; None: the model's own.

    `text` as of an image. Has no slots, as an image has none.
    """

    source: str | bytes | tuple[str, ...]  # as an image's, or those of the frames, which are images
    fps: float | None = field(default=None, kw_only=True)
    text: str = field(default="", kw_only=True)
    param: str = field(default="messages", compare=False, kw_only=True)  # where the client gave it, for errors

    @cached_property
    def source_digest(self) -> bytes:
        if isinstance(self.source, tuple):
            return _digest(b"".join(map(_digest, self.source)))
        return _digest(self.source)


MediaPart = ImagePart | VideoPart
ShownPart = TextPart | MediaPart


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallPart:
    call_id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolResultPart:
    call_id: str
    content: tuple[ShownPart, ...]
    name: str | None = None  # some templates print the tool's name beside its result
    is_error: bool = False


Part = ShownPart | ReasoningPart | ToolCallPart | ToolResultPart


@dataclass(frozen=True, slots=True)
class Message:
    role: Role
    parts: tuple[Part, ...]
    name: str | None = None


@dataclass(frozen=True, slots=True)
class ToolSpec:
    name: str
    description: str | None
    parameters: dict[str, Any] | None  # JSON schema
    strict: bool = False
    param: str = field(default="parameters", compare=False)  # where the client gave them, for errors

    def to_openai(self) -> dict[str, Any]:
        """The dict that chat templates expect: `{"type": "function", "function": {...}}`."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        if self.parameters is not None:
            function["parameters"] = self.parameters
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    mode: Literal["auto", "none", "required"] = "auto"
    name: str | None = None  # with "required": this tool only


def _digest(source: str | bytes) -> bytes:
    """In pieces, since making bytes of text holds the interpreter's lock, which the event loop wants back soon."""
    digest = blake2b(digest_size=16, person=type(source).__name__.encode())
    for start in range(0, len(source), _PIECE):
        piece = source[start : start + _PIECE]
        digest.update(piece if isinstance(piece, bytes) else piece.encode("utf-8", "surrogatepass"))
    return digest.digest()
