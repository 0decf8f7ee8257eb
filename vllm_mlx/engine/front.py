"""The event loop's view of one model. It outlives the weights, so that prompts can be prepared without them."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field

from ..core.config import Capability, EngineConfig, ModelInfo
from ..core.errors import TemplateError
from ..core.sequence import PromptInputs, Sequence
from ..disk.kept import Memories
from ..formats.reply import FinishedReply
from ..formats.tokenizer import Tokenizer
from ..media.vision import VisionProcessor
from ..prompt.processor import PreparedRequest, RequestProcessor
from ..util.fence import Fence
from .media_requests import MediaRequests
from .monitoring.schema import EngineFacts, ModelFacts
from .preparing import PromptPool

Keep = Callable[[Sequence, int, PromptInputs | None], None]


class ReplyKeeper:
    """Keeps the part of each reply with which the next turn can begin. Belongs to one event loop."""

    def __init__(self, processor: RequestProcessor, pool: PromptPool, keep: Keep | None):
        """`keep` tells the engine how many tokens of a sequence stay in the prefix cache; None if the cache is off."""
        self._processor = processor
        self._pool = pool
        self._keep = keep
        self._trims: set[Future[None]] = set()
        self._is_closed = False

    def take(self, prepared: PreparedRequest, seq: Sequence, finished: FinishedReply, *, is_last: bool) -> None:
        """Remember the reply immediately, because the next turn may follow immediately; trim the cache later.

        An aborted reply counts as far as it was received: clients send that part back. If it `is_last` before a
        question, the engine also learns the beginning of the next prompt.
        """
        if self._is_closed:
            return
        with Fence("the reply, which the next turn will not recognise"):
            self._processor.remember(prepared, finished)
        if self._keep is None:
            return
        if not finished.token_ids:
            self._keep(seq, prepared.num_kept, None)
            return
        args = (self._keep, prepared, seq, finished, is_last)
        trim = self._pool.submit(self._trim, *args, tenant=prepared.request.tenant)
        self._trims.add(trim)
        trim.add_done_callback(self._trims.discard)

    def _trim(
        self, keep: Keep, prepared: PreparedRequest, seq: Sequence, finished: FinishedReply, is_last: bool
    ) -> None:
        """Keep only the part of the reply's state that the next turn can contain. Runs on a prompt thread."""
        num_tokens = max(self._processor.kept_tokens(prepared, finished), prepared.num_kept)
        keep(seq, num_tokens, None)
        if is_last and (following := self._processor.next_prompt(prepared, finished)) is not None:
            keep(seq, num_tokens, following)

    def close(self) -> None:
        """Keep nothing of the replies that end from now on, because the shutdown cuts them."""
        self._is_closed = True

    async def finish(self, timeout_s: float) -> None:
        """Wait until the state of the replies that have ended is trimmed."""
        await asyncio.to_thread(wait, set(self._trims), timeout_s)


@dataclass(slots=True, kw_only=True)
class Front:
    """One of the models, in the order in which they are listed."""

    name: str
    config: EngineConfig
    facts: EngineFacts
    vision: VisionProcessor | None
    processor: RequestProcessor
    media: MediaRequests
    keeper: ReplyKeeper
    memories: Memories
    model_facts: ModelFacts = field(init=False)  # as `/v1/status` reports them
    capabilities: list[Capability] = field(init=False)  # as `/v1/models` reports them

    def measured(self, facts: EngineFacts) -> None:
        """Take facts of a load, or those that the headers tell. The engine thread calls it at the first load."""
        self.facts = facts
        self.processor.limit_to(facts.info.max_model_len)
        if self.vision is not None:
            self.vision.scale_down_to(facts.max_pixels)
            if facts.video_fault is not None:
                self.vision.refuse_videos(f"one was tried at load: {facts.video_fault}")
        self.model_facts = model_facts(self.config, facts, self.processor)
        self.capabilities = [name for name, is_there in _capabilities(facts.info, self.processor) if is_there]

    @property
    def info(self) -> ModelInfo:
        return self.facts.info

    @property
    def tokenizer(self) -> Tokenizer:
        return self.processor.tokenizer


def _capabilities(info: ModelInfo, processor: RequestProcessor) -> Iterator[tuple[Capability, bool]]:
    if info.task != "chat":
        return
    yield "images", info.takes_images
    yield "videos", processor.no_videos is None
    with suppress(TemplateError):  # a rendering may take too long
        yield "tools", processor.formats.calls_name is not None and processor.template.shows_tools
    yield "reasoning", processor.formats.reasoning_name is not None


def model_facts(config: EngineConfig, facts: EngineFacts, processor: RequestProcessor) -> ModelFacts:
    """Describe the checkpoint and how it is served. Its prefill rate was measured at load."""
    info, rule = facts.info, facts.resume_rule
    return {
        "model": info.model,
        "architecture": info.architecture,
        "max_model_len": info.max_model_len,
        "vocab_size": info.vocab_size,
        "weights_bytes": info.weights_bytes,
        "takes_chats": processor.tokenizer.chat_template is not None,
        "template_needs": list(processor.template.needs()),
        "takes_images": info.takes_images,
        "takes_videos": processor.no_videos is None,
        "no_videos": processor.no_videos,
        "max_pixels": facts.max_pixels,
        "no_shared_forward": facts.no_shared_forward,
        "no_drafts": facts.no_drafts,
        "no_head": facts.no_head,
        "bytes_per_token": facts.footprint.bytes_per_token,
        "fixed_bytes_per_row": facts.footprint.fixed_bytes,
        "sliding_windows": [window for window, _ in facts.footprint.windows],
        "resumes_anywhere": rule is not None and rule.resumes_anywhere,
        "keeps_recurrent_state": facts.is_recurrent,
        "copied_whole": list(facts.copied_whole),
        "prefix_cache": config.prefix_cache and rule is not None,
        "no_prefix_cache": facts.no_prefix_cache,
        "reasoning_parser": processor.formats.reasoning_name,
        "tool_call_parser": processor.formats.calls_name,
        "prefill_tokens_per_s_at_load": round(facts.calibration.tokens_per_s, 1),
        "max_num_seqs": config.max_num_seqs,
        "max_stall_ms": config.stall_ms,
        "created": info.created,
    }
