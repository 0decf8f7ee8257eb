"""What the event loop has of one model. It stays when the weights leave memory, so that prompts can be prepared."""

from dataclasses import dataclass

from ..core.config import ModelInfo
from ..disk.kept import Memories
from ..formats.tokenizer import Tokenizer
from ..prompt.processor import RequestProcessor
from .generation import Preparations, ReplyKeeper
from .monitoring.schema import EngineFacts, ModelFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """One of the models, in the order in which they are listed."""

    name: str
    facts: EngineFacts
    model_facts: ModelFacts  # as `/v1/status` reports them
    processor: RequestProcessor
    preparations: Preparations
    keeper: ReplyKeeper
    memories: Memories

    @property
    def info(self) -> ModelInfo:
        return self.facts.info

    @property
    def tokenizer(self) -> Tokenizer:
        return self.processor.tokenizer
