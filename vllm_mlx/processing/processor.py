"""Words ↔ ids for one loaded checkpoint: a request's prompt and settings on the way in, its text on the way out."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from ..core.config import CacheReasoning, EngineConfig
from ..core.constraint import Constraint
from ..core.errors import Unsupported
from ..core.messages import ImagePart
from ..core.request import Request
from ..core.sequence import PromptInputs
from ..parsers import resolve_formats
from .chat import ChatPrompt
from .guidance import Guidance
from .images.parts import image_parts, replace_images
from .images.picture import Picture
from .next_turn import NextTurn
from .output import OutputProcessor
from .prompt import PromptProcessor
from .prompt_changes import Compared, PromptChanges
from .reply import Reply
from .reply_memory import ReplyMemory
from .sampling import ResolvedSampling, checkpoint_defaults, resolve_sampling
from .template import ChatTemplate
from .tokenizer import Tokenizer
from .vision import Rendition, VisionProcessor


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that can run."""

    request: Request
    prompt: PromptInputs
    sampling: ResolvedSampling
    chat: ChatPrompt | None = None  # None: a text completion
    compared: Compared | None = None  # with the last prompt of its conversation
    constraint: Constraint | None = None


class Processor:
    """Safe to call from several threads. Raises ConfigError for unknown formats."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        config: EngineConfig,
        path: Path,
        *,
        max_model_len: int,
        vocab_size: int,
        vision: VisionProcessor | None = None,
    ):
        """`vision`: None for a model that takes no images."""
        self.tokenizer = tokenizer
        self._vision = vision
        self.reasoning, self.tools = resolve_formats(
            config.reasoning_parser,
            config.tool_call_parser,
            chat_template=tokenizer.chat_template,
            vocabulary=tokenizer,
        )
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._defaults = config.defaults
        self._checkpoint_defaults = checkpoint_defaults(path)
        self.replies = ReplyMemory()
        self._prompts = PromptProcessor(
            tokenizer,
            ChatTemplate(
                tokenizer,
                enable_thinking=config.enable_thinking,
                image_marker=None if vision is None else vision.marker,
            ),
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            reasoning=self.reasoning,
            tools=self.tools,
            memory=self.replies,
        )
        self._changes = PromptChanges(tokenizer.decode)
        self._guidance = Guidance(tokenizer, config, vocab_size=vocab_size, reasoning=self.reasoning, tools=self.tools)
        self._next_turn = NextTurn(self._prompts.chats)
        self._cache_reasoning = config.cache_reasoning

    @property
    def takes_images(self) -> bool:
        return self._vision is not None

    def images_of(self, request: Request) -> tuple[ImagePart, ...]:
        """Whose pictures `prepare` needs. Raises Unsupported where the model takes none."""
        parts = image_parts(request)
        if parts and not self.takes_images:
            raise Unsupported("This model takes no images. Send text, or serve a vision model.", param="messages")
        return parts

    def prepare(self, request: Request, pictures: Mapping[str | bytes, Picture] = MappingProxyType({})) -> Prepared:
        """`pictures`: of the request's images, by their source. Raises RequestError."""
        request, renditions = self._show(request, pictures)
        prompt, chat = self._prompts.process(request, renditions)
        sampling = resolve_sampling(
            request.sampling,
            num_prompt_tokens=len(prompt.token_ids),
            max_model_len=self._max_model_len,
            vocab_size=self._vocab_size,
            eos_token_ids=self.tokenizer.eos_token_ids,
            defaults=self._defaults,
            checkpoint=self._checkpoint_defaults,
        )
        compared = None if chat is None else self._changes.compare(chat)
        return Prepared(request, prompt, sampling, chat, compared, self._guidance.constraint(request, prompt))

    def _show(self, request: Request, pictures: Mapping[str | bytes, Picture]) -> tuple[Request, tuple[Rendition, ...]]:
        """Images known by what they show, so that one picture is the same from whichever source."""
        parts = self.images_of(request)
        if not parts or self._vision is None:
            return request, ()
        shown = {part: self._vision.show(pictures[part.source], part.max_side) for part in dict.fromkeys(parts)}
        known = {part: ImagePart(rendition.digest, text=rendition.text) for part, rendition in shown.items()}
        return replace_images(request, known), tuple(shown[part] for part in parts)

    def output(self, prepared: Prepared) -> OutputProcessor:
        """For one of the request's replies."""
        return OutputProcessor(
            self.tokenizer,
            prepared.request,
            prepared.prompt,
            reasoning=self.reasoning,
            tools=self.tools,
            stop_token_ids=prepared.sampling.stop_token_ids,
            clamped_max_tokens=prepared.sampling.clamped_max_tokens,
        )

    def remember(self, prepared: Prepared, reply: Reply) -> None:
        """A reply that ended by itself, before the client sees its end: its next prompt will ask for it."""
        if prepared.chat is not None:
            self._prompts.chats.remember(prepared.chat, reply, starts_in_reasoning=prepared.prompt.starts_in_reasoning)
        if prepared.chat is not None and prepared.compared is not None:
            self._changes.remember(prepared.compared, prepared.chat, reply)

    def kept_tokens(self, prepared: Prepared, reply: Reply, policy: CacheReasoning | None = None) -> int:
        """How many tokens of prompt + reply a next turn can begin with; fewer than the prompt has where that changes.

        `policy`: None is the request's, or else the server's.
        """
        chat = prepared.chat
        if chat is None:  # what goes on a text is that text
            return len(prepared.prompt.token_ids) + len(reply.token_ids)
        kept = self._next_turn.kept_tokens(
            chat,
            reply,
            policy or chat.request.cache_reasoning or self._cache_reasoning,
            starts_in_reasoning=prepared.prompt.starts_in_reasoning,
        )
        return kept + len(prepared.prompt.token_ids) - len(chat.token_ids)
