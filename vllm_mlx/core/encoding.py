"""The declarations of an encoder: a checkpoint that gives vectors of texts, or scores of documents. Values only."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Task = Literal["chat", "embedding", "rerank"]
Pooling = Literal["cls", "mean", "max", "lasttoken"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderFacts:
    """The declarations of a checkpoint's files, or of the settings in their place."""

    task: Task  # never "chat"
    max_tokens: int  # of the longest input, with the tokens that the tokenizer adds
    is_causal: bool = False  # a chat model that scores by the logits of two tokens
    answer_ids: tuple[int, ...] = ()  # these tokens, where the files name them; else yes and no
    pooling: Pooling | None = None  # None for a reranker
    dense: Mapping[str, str] = field(default_factory=dict)  # activations of the layers behind it, by their folders
    normalize: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)  # texts that go before an input, by name
    default_prompt: str | None = None  # the name of the prompt where a request names none
    lowercase: bool = False  # texts are read in small letters
    has_types: bool = False  # the model tells the texts of a pair apart by the types of their tokens
    num_dimensions: int = 1  # of a vector; 1 for scores
    dimensions: tuple[int, ...] = ()  # lengths to which a vector may be cut; a range is named in full
