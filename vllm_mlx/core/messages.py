"""The values of a conversation, the same for every protocol. Two messages with equal content are equal."""

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
class _SentPart:
    """A part that a source stands for. It has no slots, so that the digest of many megabytes is computed once."""

    source: str | bytes | tuple[str, ...]  # data: URI, URL, or bytes of a file; of a video, or those of its frames
    param: str = field(default="messages", compare=False, kw_only=True)  # the request field, for errors

    @cached_property
    def source_digest(self) -> bytes:
        if isinstance(self.source, tuple):
            return _digest(b"".join(map(_digest, self.source)))
        return _digest(self.source)


@dataclass(frozen=True)
class ImagePart(_SentPart):
    """An image of a message.

    `max_side`: the image is scaled down until its longer side has this many pixels; None keeps its size.
    `text`: the text that represents the image in a rendered conversation, once it is known.
    """

    source: str | bytes  # later a digest of the pixels
    max_side: int | None = field(default=None, kw_only=True)
    text: str = field(default="", kw_only=True)
    is_page: bool = field(default=False, compare=False, kw_only=True)  # whether it is a page of a document


@dataclass(frozen=True)
class VideoPart(_SentPart):
    """A video of a message.

    `fps`: the rate at which frames are sampled, or at which the given frames were; None for the model's own rate.
    `text` as for an image.
    """

    fps: float | None = field(default=None, kw_only=True)
    text: str = field(default="", kw_only=True)


@dataclass(frozen=True)
class DocumentPart(_SentPart):
    """A PDF or a file of text, until it is read: texts and images take its place before the prompt is rendered."""

    source: str | bytes


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
    content: tuple[ShownPart | DocumentPart, ...]
    name: str | None = None  # some templates print the tool's name with its result
    is_error: bool = False


Part = ShownPart | DocumentPart | ReasoningPart | ToolCallPart | ToolResultPart


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
    param: str = field(default="parameters", compare=False)  # the request field, for errors

    @property
    def name_param(self) -> str:
        """Return the request field that names the tool, for errors; for a web search, the tool's own field."""
        path, dot, _ = self.param.rpartition(".")
        return f"{path}.name" if dot else self.param

    def to_openai(self) -> dict[str, Any]:
        """Return the dict that chat templates expect: `{"type": "function", "function": {...}}`."""
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
    names: frozenset[str] = frozenset()  # of the tools that may be called; empty: all

    def allows(self, name: str) -> bool:
        return self.name in (None, name) and (not self.names or name in self.names)


def _digest(source: str | bytes) -> bytes:
    """Digest a source piece by piece, because encoding a long text would hold the interpreter's lock for too long."""
    digest = blake2b(digest_size=16, person=type(source).__name__.encode())
    for start in range(0, len(source), _PIECE):
        piece = source[start : start + _PIECE]
        digest.update(piece if isinstance(piece, bytes) else piece.encode("utf-8", "surrogatepass"))
    return digest.digest()
