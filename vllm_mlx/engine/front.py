"""The event loop's view of one model. It outlives the weights, so that prompts can be prepared without them."""

from dataclasses import dataclass, field

from ..core.config import EngineConfig, ModelInfo
from ..disk.kept import Memories
from ..formats.tokenizer import Tokenizer
from ..media.vision import VisionProcessor
from ..prompt.processor import RequestProcessor
from .generation import Preparations, ReplyKeeper
from .monitoring.schema import EngineFacts, ModelFacts
from .monitoring.status import model_facts


@dataclass(slots=True, kw_only=True)
class Front:
    """One of the models, in the order in which they are listed."""

    name: str
    config: EngineConfig
    facts: EngineFacts
    vision: VisionProcessor | None
    processor: RequestProcessor
    preparations: Preparations
    keeper: ReplyKeeper
    memories: Memories
    model_facts: ModelFacts = field(init=False)  # as `/v1/status` reports them

    def measured(self, facts: EngineFacts) -> None:
        """Take facts of a load, or those that the headers tell. The engine thread calls it at the first load."""
        self.facts = facts
        self.processor.limit_to(facts.info.max_model_len)
        if self.vision is not None:
            self.vision.scale_down_to(facts.max_pixels)
            if facts.video_fault is not None:
                self.vision.refuse_videos(f"one was tried at load: {facts.video_fault}")
        self.model_facts = model_facts(self.config, facts, self.processor)

    @property
    def info(self) -> ModelInfo:
        return self.facts.info

    @property
    def tokenizer(self) -> Tokenizer:
        return self.processor.tokenizer
