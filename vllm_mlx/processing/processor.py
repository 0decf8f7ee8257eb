"""Words ↔ ids for one loaded checkpoint: a request's prompt and settings on the way in, its text on the way out."""

from dataclasses import dataclass
from pathlib import Path

from ..core.config import CacheReasoning, EngineConfig
from ..core.request import Request
from ..core.sequence import PromptInputs
from ..parsers import resolve_formats
from .chat import ChatPrompt
from .next_turn import NextTurn
from .output import OutputProcessor
from .prompt import PromptProcessor
from .reply import Reply
from .reply_memory import ReplyMemory
from .sampling import ResolvedSampling, checkpoint_defaults, resolve_sampling
from .template import ChatTemplate
from .tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that can run."""

    request: Request
    prompt: PromptInputs
    sampling: ResolvedSampling
    chat: ChatPrompt | None = None  # None: a text completion


class Processor:
    """Safe to call from several threads. Raises ConfigError for unknown formats."""

    def __init__(self, tokenizer: Tokenizer, config: EngineConfig, path: Path, *, max_model_len: int, vocab_size: int):
        self.tokenizer = tokenizer
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
            ChatTemplate(tokenizer, enable_thinking=config.enable_thinking),
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            reasoning=self.reasoning,
            tools=self.tools,
            memory=self.replies,
        )
        self._next_turn = NextTurn(self._prompts.chats)
        self._cache_reasoning = config.cache_reasoning

    def prepare(self, request: Request) -> Prepared:
        """Raises RequestError."""
        prompt, chat = self._prompts.process(request)
        sampling = resolve_sampling(
            request.sampling,
            num_prompt_tokens=len(prompt.token_ids),
            max_model_len=self._max_model_len,
            vocab_size=self._vocab_size,
            eos_token_ids=self.tokenizer.eos_token_ids,
            defaults=self._defaults,
            checkpoint=self._checkpoint_defaults,
        )
        return Prepared(request, prompt, sampling, chat)

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

    def kept_tokens(self, prepared: Prepared, reply: Reply, policy: CacheReasoning | None = None) -> int:
        """How many tokens of prompt + reply a next turn can begin with; fewer than the prompt has where that changes.

        `policy`: None is the server's.
        """
        chat = prepared.chat
        if chat is None:  # what goes on a text is that text
            return len(prepared.prompt.token_ids) + len(reply.token_ids)
        kept = self._next_turn.kept_tokens(
            chat,
            reply,
            policy or self._cache_reasoning,
            starts_in_reasoning=prepared.prompt.starts_in_reasoning,
        )
        return kept + len(prepared.prompt.token_ids) - len(chat.token_ids)
