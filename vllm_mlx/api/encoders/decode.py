"""Bodies of embeddings and reranking → a request with texts, and the form of the reply."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...core.request import Request, TextInputs
from ..parameters import Decoded, Spec
from .schema import Document, EmbeddingBody, RerankBody


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSpec(Spec):
    """`documents`: the texts to send back with their scores; None sends none."""

    is_base64: bool = False
    is_ranking: bool = False
    documents: Sequence[str] | None = None
    top_n: int | None = None


def decode_texts(body: EmbeddingBody | RerankBody, *, reply_id: str, model: str) -> Decoded[EncoderSpec]:
    common: Any = {"truncate": bool(body.truncate)}
    reply = EncoderSpec(reply_id=reply_id, model=model)
    if isinstance(body, EmbeddingBody):
        reply = replace(reply, is_base64=body.encoding_format == "base64")
        prompt, dimensions = body.prompt_name, body.dimensions
        inputs = TextInputs(texts=_texts(body.input), prompt_name=prompt, dimensions=dimensions, **common)
    else:
        texts = tuple(each.text if isinstance(each, Document) else each for each in body.documents)
        reply = replace(reply, is_ranking=True, documents=texts if body.return_documents else None, top_n=body.top_n)
        inputs = TextInputs(texts=texts, query=body.query, instruction=body.instruction, **common)
    request = Request(request_id=reply_id, texts=inputs, cache_salt=body.cache_salt or "")
    return Decoded(requests=(request,), reply=reply)


def _texts(given: str | list[str] | list[int] | list[list[int]]) -> tuple[str | tuple[int, ...], ...]:
    """Return the texts of a field that is one text, several, one list of token ids, or several such lists."""
    if isinstance(given, str):
        return (given,)
    several: Any = [given] if given and isinstance(given[0], int) else given
    return tuple(text if isinstance(text, str) else tuple(text) for text in several)
