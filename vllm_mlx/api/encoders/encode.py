"""Vectors and scores → replies, which are written piece by piece: the interpreter's lock is free between two pieces."""

from base64 import b64encode
from collections.abc import Iterator, Sequence
from math import isfinite
from typing import Any, Literal

from pydantic_core import to_json

from ...core.errors import GenerationError
from ...core.events import Finished, GenerationEvent, Usage, Vectors
from ..replies import Reply, given
from .decode import EncoderSpec

_MANY_TEXTS = 16  # whose vectors take longer than an event loop should wait


class EncoderUsage(Reply):
    prompt_tokens: int
    total_tokens: int


class Embedding(Reply):
    """The vector of one input: numbers, or base64 of their 32-bit floats, the lowest byte first."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingList(Reply):
    object: Literal["list"] = "list"
    model: str
    data: list[Embedding]
    usage: EncoderUsage


class Ranked(Reply):
    """A document by its place in the request, with a score from 0 to 1. `document` has the field `text`."""

    index: int
    relevance_score: float
    document: dict[str, str] | None = None


class RerankReply(Reply):
    """The documents, the best first; equal scores keep the order of the request. `meta` is for Cohere's clients."""

    id: str
    object: Literal["list"] = "list"
    model: str
    results: list[Ranked]
    usage: EncoderUsage
    meta: dict[str, dict[str, int]]


class EncoderFold:
    """Folds the events of a request to an encoder into one reply: `feed` for every event, then `finish` once."""

    def __init__(self, spec: EncoderSpec) -> None:
        self._spec = spec
        self._vectors: Sequence[Any] = ()
        self._usage = Usage(prompt_tokens=0)

    def feed(self, index: int, event: GenerationEvent) -> None:
        match event:
            case Vectors():
                self._vectors = event.vectors
            case Finished():
                self._usage = event.usage

    @property
    def is_long(self) -> bool:
        """Return whether `finish` takes long, and may run on a thread."""
        return len(self._vectors) > _MANY_TEXTS

    def finish(self) -> bytes:
        """Write the reply. Raises GenerationError if a value is not a finite number, which JSON does not have."""
        spec, count = self._spec, self._usage.prompt_tokens
        largest = (each if spec.is_ranking else abs(each).max() for each in self._vectors)
        if not all(map(isfinite, largest)):
            raise GenerationError(
                "The encoder computed a value that is not a finite number, which no reply can hold. Compare the files "
                "of its checkpoint with the published ones."
            )
        usage = EncoderUsage(prompt_tokens=count, total_tokens=count)
        around: Reply = EmbeddingList(model=spec.model, data=[], usage=usage)
        pieces = [*(self._ranked() if spec.is_ranking else self._embedded())]
        if spec.is_ranking:
            meta = {"tokens": {"input_tokens": count}}
            around = RerankReply(id=spec.reply_id, model=spec.model, results=[], usage=usage, meta=meta)
        start, mark, end = around.to_json().encode().partition(b'[],"')  # inside a text, a quote follows a backslash
        pieces[0] = start + b"[" + pieces[0]
        pieces[-1] += mark[1:] + end
        return b",".join(pieces)

    def _embedded(self) -> Iterator[bytes]:
        for index, vector in enumerate(self._vectors):
            value = b64encode(vector.astype("<f4").tobytes()) if self._spec.is_base64 else vector.tolist()
            yield to_json({"object": "embedding", "index": index, "embedding": value})

    def _ranked(self) -> Iterator[bytes]:
        scores, documents = [float(score) for score in self._vectors], self._spec.documents
        for index in sorted(range(len(scores)), key=lambda index: -scores[index])[: self._spec.top_n]:
            text = None if documents is None else {"text": documents[index]}
            yield to_json({"index": index, "relevance_score": scores[index], **given(document=text)})
