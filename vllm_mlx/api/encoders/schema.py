"""Wire types of requests to encoders: OpenAI's embeddings, and the reranking that Cohere's and Jina's clients ask."""

from typing import ClassVar, Literal

from pydantic import Field

from ..parameters import OPENAI_EXTRAS, PromptFields
from ..wire import Body, ExtraFields, Ignored, Items, Refused, Wire

_SHARED = ("user", "safety_identifier", "service_tier", "priority")
_CUT = "Send `truncate`: it cuts to the length that the model reads."
_OF_CHECKPOINT = "The checkpoint decides it; the operator may set `normalize` of the model."
_PROMPT = "Name one of the model's prompts with `prompt_name`, or put the words before the text."

ENCODER_FIELDS: ExtraFields = {
    **{name: OPENAI_EXTRAS[name] for name in _SHARED},
    "stream": Ignored("it is the default", (False,), "The reply comes whole."),
    "truncation": Refused("Its name is `truncate`."),
    "truncate_prompt_tokens": Refused(_CUT),
    "add_special_tokens": Ignored("it is the default", (True,), "Send token ids to add none."),
}

EMBEDDING_FIELDS: ExtraFields = {
    **ENCODER_FIELDS,
    "messages": Refused("Send texts as `input`."),
    "input_type": Refused(_PROMPT),
    "task": Refused(_PROMPT),
    "normalize": Refused(_OF_CHECKPOINT),
    "normalized": Refused(_OF_CHECKPOINT),
}

RERANK_FIELDS: ExtraFields = {
    **ENCODER_FIELDS,
    "top_k": Refused("Its name is `top_n`."),
    "rank_fields": Ignored("`text` is ranked", (["text"],), "Put everything that is to be ranked into `text`."),
    "max_tokens_per_doc": Refused(_CUT),
    "max_chunks_per_doc": Refused("Documents are not divided. Divide them on your side, or send `truncate`."),
}


class EncoderFields(PromptFields):
    """Fields of both endpoints."""

    truncate: bool | None = Field(default=None, description="Cut texts that are too long, rather than refuse them.")


class EmbeddingBody(Body, EncoderFields):
    extras = EMBEDDING_FIELDS
    task = "embedding"
    input: str | Items[str] | Items[int] | Items[Items[int]]
    dimensions: int | None = Field(default=None, ge=1)
    encoding_format: Literal["float", "base64"] | None = None
    prompt_name: str | None = None


class Document(Wire):
    """A document with data of the client's own, of which the text is read."""

    extras: ClassVar[ExtraFields | None] = {"image": Refused("Images are not ranked.")}
    tolerates_unknown = True
    text: str


class RerankBody(Body, EncoderFields):
    extras = RERANK_FIELDS
    task = "rerank"
    query: str
    documents: Items[str | Document]
    top_n: int | None = Field(default=None, ge=1, description="Documents of the reply; all if left out.")
    return_documents: bool | None = None
    instruction: str | None = Field(default=None, description="For rerankers that read one.")
