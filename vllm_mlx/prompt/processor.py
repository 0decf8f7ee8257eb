"""Requests on their way in and replies on their way out, for one loaded checkpoint. Knows no engine."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path

from ..cache.prompt_index import PromptIndex
from ..core.config import CacheReasoning, EngineConfig
from ..core.errors import ContextLengthExceeded, InvalidParameter, Unsupported
from ..core.events import TokenLogprob
from ..core.messages import ImagePart, MediaPart, VideoPart
from ..core.request import Request, ResolvedSampling, checkpoint_defaults, resolve_sampling
from ..core.sequence import Constraint, PromptInputs, Sequence
from ..disk.kept import NO_MEMORIES, Memories
from ..formats import SchemaBudget, Schemas
from ..formats.pipeline import OutputPipeline, declared_schemas
from ..formats.reply import FinishedReply
from ..formats.tokenizer import Tokenizer, read_json
from ..guidance.constraint_builder import ConstraintBuilder
from ..guidance.grammar_compiler import MAX_BYTES
from ..media.rendered import RenderedMedia
from ..media.sources import media_parts, replace_parts
from ..media.vision import VisionProcessor
from ..util.tasks import Deadline
from .chat import ChatPrompt, ChatPrompts
from .context_window import ContextWindow
from .prompt_changes import ComparedPrompt, PromptChanges
from .reply_formats import CheckpointFormats
from .reply_memory import ReplyMemory
from .template import ChatTemplate, MediaMarkers


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that can run: everything that a sequence in the engine is built from."""

    request: Request
    prompt: PromptInputs
    sampling: ResolvedSampling
    schemas: Schemas  # the parameters of the tools that its replies may call
    chat: ChatPrompt | None = None  # None for a text completion
    compared: ComparedPrompt | None = None  # the prompt, compared with the last one of its conversation
    constraint: Constraint | None = None
    prediction: PromptIndex | None = None
    index: PromptIndex | None = None  # of the prompt; None if no drafts are taken from it
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # the replies share what one has computed

    def sequence(self, seq_id: int, index: int) -> Sequence:
        """Make the engine's work for reply number `index`. Each reply has a seed of its own."""
        request, sampling = self.request, self.sampling
        return Sequence(
            seq_id=seq_id,
            prompt=self.prompt,
            sampling=replace(sampling.tokens, seed=(sampling.tokens.seed + index) % 2**64),
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            stop_token_ids=sampling.stop_token_ids,
            constraint=self.constraint,
            prediction=self.prediction or (),
            prompt_index=self.index,
            cache_salt=request.cache_salt,
            tenant=request.tenant,
            scores_prompt=request.max_prompt_logprobs > 0,
            prompt_logprobs=self.prompt_logprobs,
        )


class RequestProcessor:
    """Prepares requests, and makes the output pipelines of their replies. Threads may share it.

    A chat request becomes ids in `ChatPrompts` (chat.py): the template renders it, the tokenizer encodes it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        config: EngineConfig,
        path: Path,
        *,
        formats: CheckpointFormats,
        max_model_len: int,
        vocab_size: int,
        max_grammars_bytes: int = MAX_BYTES,
        vision: VisionProcessor | None = None,
        memories: Memories = NO_MEMORIES,
        has_drafts: bool = False,
        resumes_anywhere: bool = True,
    ):
        """`vision` is None for a model that takes no images; `memories` keep replies for the next start.

        `has_drafts`: the engine takes drafts from prompts and predictions. `resumes_anywhere`: the model's cached state
        serves prompts that begin with any part of it, so it needs no snapshot points.
        """
        self.tokenizer = tokenizer
        self._vision = vision
        self.formats = formats
        self._max_silent_tokens = config.max_silent_tokens
        self._has_drafts = has_drafts
        self._vocab_size = vocab_size
        self._defaults = config.defaults
        self._checkpoint_defaults = checkpoint_defaults(read_json(path / "generation_config.json"))
        self._cache_reasoning = config.cache_reasoning
        self._window = ContextWindow(tokenizer, max_model_len)
        markers = None if vision is None else MediaMarkers(vision.marker, vision.video_marker)
        self.template = ChatTemplate(
            tokenizer, enable_thinking=config.enable_thinking, markers=markers, calls=formats.replies.calls
        )
        self.replies = ReplyMemory(journal=memories.replies)
        self._chats = ChatPrompts(
            tokenizer,
            self.template,
            self.replies,
            self._window,
            formats.replies,
            formats.judge,
            resumes_anywhere=resumes_anywhere,
        )
        self._changes = PromptChanges(tokenizer.decode)
        self._constraints = ConstraintBuilder(
            tokenizer,
            config,
            vocab_size=vocab_size,
            max_grammars_bytes=max_grammars_bytes,
            reasoning=formats.judge,
            tools=formats.replies.calls,
        )

    def limit_to(self, max_model_len: int) -> None:
        """Set the context for requests that come from now on."""
        self._window.max_model_len = max_model_len

    @property
    def takes_images(self) -> bool:
        return self._vision is not None

    @property
    def no_videos(self) -> str | None:
        """Return the end of the sentence "This model takes no videos: …"; None if it takes videos."""
        return "it takes no images either" if self._vision is None else self._vision.no_videos

    def media_of(self, request: Request) -> tuple[MediaPart, ...]:
        """Return the images and videos of a request. Raises Unsupported if the model takes no such parts."""
        parts = media_parts(request)
        if parts and not self.takes_images:
            kind = "images" if any(isinstance(part, ImagePart) for part in parts) else "videos"
            raise Unsupported(f"This model takes no {kind}. Send text, or serve a vision model.", param="messages")
        if self.no_videos is not None and any(isinstance(part, VideoPart) for part in parts):
            message = f"This model takes no videos: {self.no_videos}. Send the frames as images, or text."
            raise Unsupported(message, param="messages")
        return parts

    def prepare(
        self,
        request: Request,
        rendered: Mapping[MediaPart, RenderedMedia] | None = None,
        *,
        deadline: Deadline | None = None,
        runs: bool = True,
    ) -> PreparedRequest:
        """Turn a request into what the engine runs. `rendered` holds its images and videos; None if it has none.

        With `runs` False, its prompt is only counted.

        Raises RequestError, and Cancelled if the deadline was cancelled. Without `deadline` there is no time limit.
        """
        deadline = Deadline(math.inf, "") if deadline is None else deadline
        rendered_media: tuple[RenderedMedia, ...] = ()
        if rendered is not None:
            rendered_media = tuple(rendered[part] for part in media_parts(request))
            request = replace_parts(request, {part: (_known_part(part, media),) for part, media in rendered.items()})
        budget = SchemaBudget()
        schemas = declared_schemas(request, budget)
        chat = None if request.messages is None else self._chats.build(request, rendered_media, deadline, runs=runs)
        prompt = self._completion(request) if chat is None else chat.inputs
        sampling = resolve_sampling(
            request.sampling,
            num_prompt_tokens=len(prompt.token_ids),
            max_model_len=self._window.max_model_len,
            vocab_size=self._vocab_size,
            eos_token_ids=self.tokenizer.eos_token_ids,
            defaults=self._defaults,
            checkpoint=self._checkpoint_defaults,
        )
        deadline.check()
        compared = self._changes.compare(chat) if chat is not None and runs else None
        deadline.check()
        constraint = self._constraints.constraint(request, prompt, budget)
        prediction = self._prediction(request) if self._has_drafts else None
        index = PromptIndex(prompt.token_ids) if self._has_drafts and runs else None
        return PreparedRequest(request, prompt, sampling, schemas, chat, compared, constraint, prediction, index)

    def _prediction(self, request: Request) -> PromptIndex | None:
        """Return the tokens of a request's prediction, up to one for which the model has no logit."""
        if not request.prediction:
            return None
        try:
            self._window.check_text(request.prediction, param="prediction")
        except ContextLengthExceeded as error:  # clients take this error for one of the messages
            raise InvalidParameter(
                f"`prediction` has at least {error.num_prompt_tokens} tokens, more than the context of "
                f"{error.max_model_len} tokens. Shorten it, or leave it out.",
                param="prediction",
            ) from error
        ids = self.tokenizer.encode(request.prediction, add_special_tokens=False)
        return PromptIndex(tuple(takewhile(lambda token_id: token_id < self._vocab_size, ids)))

    def _completion(self, request: Request) -> PromptInputs:
        """Return the prompt of a text completion, given as a text or as ids."""
        prompt = request.prompt
        assert prompt is not None
        if isinstance(prompt, str):
            self._window.check_text(prompt, param="prompt")
            prompt = tuple(self.tokenizer.encode(prompt, add_special_tokens=True))
        else:
            self._check_vocabulary(prompt)
        self._window.check_ids(prompt, param="prompt")
        if most := request.max_prompt_logprobs:
            self._check_vocabulary(prompt)
            if (num := len(prompt) * (1 + (request.sampling.logprobs or 0))) > most:
                raise InvalidParameter(
                    f"This prompt would return {num} log-probabilities; for each choice of this request the limit is "
                    f"{most}. Lower `logprobs`, send fewer or shorter prompts, or leave `echo` out.",
                    param="logprobs",
                )
        return PromptInputs(token_ids=prompt)

    def _check_vocabulary(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            if not 0 <= token_id < self._vocab_size:
                raise InvalidParameter(
                    f"`prompt` holds the token id {token_id}; this model's ids are 0 to {self._vocab_size - 1}.",
                    param="prompt",
                )

    def output(self, prepared: PreparedRequest) -> OutputPipeline:
        """Make a pipeline for one of the request's replies."""
        return OutputPipeline(
            self.tokenizer,
            prepared.request,
            prepared.prompt,
            self.formats.replies,
            stop_token_ids=prepared.sampling.stop_token_ids,
            clamped_max_tokens=prepared.sampling.clamped_max_tokens,
            schemas=prepared.schemas,
            constraint=prepared.constraint,
            max_silent_tokens=self._max_silent_tokens,
        )

    def remember(self, prepared: PreparedRequest, reply: FinishedReply) -> None:
        """Store a reply before its client sees its end, since the client's next request may follow immediately."""
        if prepared.chat is None:
            return
        self._chats.remember(prepared.chat, reply)
        if prepared.compared is not None:
            self._changes.remember(prepared.compared, prepared.chat, reply)

    def kept_tokens(self, prepared: PreparedRequest, reply: FinishedReply, policy: CacheReasoning | None = None) -> int:
        """Return the tokens of prompt + reply that the next turn can begin with, or fewer than the prompt has.

        `policy` None means the server's, unless the request says whether its reasoning stays.
        """
        chat = prepared.chat
        if chat is None:  # the next prompt of a text completion begins with the complete text
            return len(prepared.prompt.token_ids) + len(reply.token_ids)
        return self._chats.kept_tokens(chat, reply, policy or self._policy(chat.request.keeps_reasoning))

    def _policy(self, keeps_reasoning: bool | None) -> CacheReasoning:
        own = self._cache_reasoning
        if keeps_reasoning is None:
            return own
        return "keep" if keeps_reasoning else "auto" if own == "keep" else own


def _known_part(part: MediaPart, rendered: RenderedMedia) -> MediaPart:
    """Name the part by a digest, so that an image is the same from any source."""
    return type(part)(rendered.digest, text=rendered.text)
