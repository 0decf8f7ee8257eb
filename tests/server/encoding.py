"""An engine without a model that computes made-up vectors and scores: each is known from its text."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from vllm_mlx.core.catalogue import Catalogue, Entry
from vllm_mlx.core.config import ModelConfig
from vllm_mlx.core.encoding import Task
from vllm_mlx.core.errors import InvalidParameter
from vllm_mlx.core.events import Finished, FinishReason, Started, Usage, Vectors
from vllm_mlx.core.request import Request

from .fakes import FakeEngine, FakeGeneration, Script, hello

DIMENSIONS = 8
TASKS: dict[str, Task] = {"coder": "chat", "e5": "embedding", "judge": "rerank"}  # by the name of the model


def vector(text: str | tuple[int, ...], size: int | None = None) -> Any:
    seed = sum(text) if isinstance(text, tuple) else sum(text.encode())
    return np.random.default_rng(seed).standard_normal(size or DIMENSIONS).astype(np.float32)


def score(query: str, document: str) -> float:
    """The share of the query's words in the document."""
    words = query.split()
    return sum(word in document for word in words) / max(1, len(words))


def encoded(request: Request, index: int) -> Script:
    texts = request.texts
    if texts is None:
        return hello(request, index)
    num_tokens = sum(map(len, texts.texts))
    if texts.query is None:
        vectors = [vector(text, texts.dimensions) for text in texts.texts]
    else:
        vectors = [score(texts.query, str(text)) for text in texts.texts]
    return (
        Started(num_tokens, 0),
        Vectors(vectors),
        Finished(FinishReason.STOP, Usage(prompt_tokens=num_tokens, completion_tokens=0)),
    )


@dataclass
class FakeEncoders(FakeEngine):
    """It serves the models of `names`."""

    play: Any = encoded
    names: tuple[str, ...] = tuple(TASKS)
    others: list[FakeEngine] = field(default_factory=list)

    def __post_init__(self) -> None:
        infos = [replace(self.info, task=TASKS[name]) for name in self.names]
        self.info, self.others = infos[0], [FakeEngine(info=info) for info in infos[1:]]

    @property
    def fronts(self) -> list[FakeEngine]:
        return [self, *self.others]

    async def submit(self, request: Request) -> FakeGeneration:
        """It refuses an empty list, as an engine does."""
        if request.texts is not None and not request.texts.texts:
            raise InvalidParameter("The list is empty.", param="input")
        return await super().submit(request)

    @property
    def models(self) -> Catalogue:
        return Catalogue(tuple(Entry(config=ModelConfig(model=name), name=name) for name in self.names))
