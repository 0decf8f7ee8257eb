"""Requests on their way in and replies on their way out, for one loaded checkpoint. Knows no engine.

The prompt of a chat begins with the ids of the prompt and reply that it continues.
"""

import math
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path

from ..cache.prompt_index import PromptIndex
from ..core.config import CacheReasoning, EngineConfig
from ..core.errors import ContextLengthExceeded, InvalidParameter, RequestError, TemplateError, Unsupported
from ..core.events import TokenLogprob
from ..core.messages import ImagePart, MediaPart, Message, VideoPart
from ..core.request import (
    Request,
    ResolvedSampling,
    TextInputs,
    TokenSampling,
    checkpoint_defaults,
    resolve_sampling,
)
from ..core.sequence import Constraint, MediaItem, PromptInputs, Sequence
from ..disk.kept import NO_MEMORIES, Memories
from ..formats import SchemaBudget, Schemas
from ..formats.pipeline import OutputPipeline, declared_schemas
from ..formats.reply import FinishedReply
from ..formats.tokenizer import Tokenizer, read_json
from ..formats.vectors import VectorOutput
from ..guidance.constraint_builder import ConstraintBuilder
from ..guidance.grammar_compiler import MAX_BYTES
from ..media.rendered import RenderedMedia
from ..media.sources import media_parts, replace_parts
from ..media.vision import VisionProcessor
from ..util.tasks import Deadline
from .context_window import ContextWindow
from .encoded import EncodedText, common_prefix
from .fill import FillIn
from .points import conversation_end, next_requests, plan_points
from .prompt_changes import ComparedPrompt, PromptChanges
from .remembered import Boundary, ChatPrompt, KnownPrefix, RememberedReply
from .reply_formats import CheckpointFormats
from .reply_memory import RecalledConversation, ReplyMemory, text_digest
from .splice import Splicer
from .template import ChatTemplate, MediaMarkers
from .texts import TextTokenizer

_SENTINEL = re.compile("sentinel(0*)")
_NO_SAMPLING = ResolvedSampling(
    tokens=TokenSampling(), max_tokens=0, clamped_max_tokens=None, min_tokens=0, stop_token_ids=frozenset()
)
_LEAST_AHEAD = 64  # tokens; computing fewer ahead of a question has no visible gain


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
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # computed once for all replies

    @property
    def num_kept(self) -> int:
        """Return the prompt's tokens that stay in the prefix cache: of a fill-in, those before the cursor's line."""
        points = self.prompt.snapshot_points
        return points[-1] if points and self.chat is None else self.prompt.num_tokens

    def sequence(self, seq_id: int, index: int) -> Sequence:
        """Make the engine's work for reply number `index`. Each reply has its own seed."""
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

    The template renders a chat, the tokenizer encodes it. Each prompt of a conversation extends the one before: the
    model's own ids of an earlier reply are used wherever the template still writes their text.
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
        texts: TextTokenizer | None = None,
    ):
        """`vision` is None for a model that takes no images, `texts` for one that generates.

        `memories` keep replies for the next start. `has_drafts`: the engine takes drafts from prompts and predictions.
        `resumes_anywhere`: the model's cached state serves prompts that begin with any part of it, so it needs no
        snapshot points.
        """
        self.tokenizer = tokenizer
        self._vision, self._texts = vision, texts
        self.formats = formats
        self._max_silent_tokens = config.max_silent_tokens
        self._has_drafts = has_drafts
        self._vocab_size = vocab_size
        self._defaults = config.defaults
        self._checkpoint_defaults = checkpoint_defaults(read_json(path / "generation_config.json"))
        self._cache_reasoning = config.cache_reasoning
        self._looks_ahead = config.looks_ahead
        self._window = ContextWindow(tokenizer, max_model_len)
        self._fill_in = FillIn(tokenizer)
        markers = None if vision is None else MediaMarkers(vision.marker, vision.video_marker)
        self.template = ChatTemplate(
            tokenizer, enable_thinking=config.enable_thinking, markers=markers, calls=formats.replies.calls
        )
        self.replies = ReplyMemory(journal=memories.replies)
        self._splicer = Splicer(tokenizer, formats.replies)
        self._resumes_anywhere = resumes_anywhere
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
        if self._texts is not None:
            facts = self._texts.facts
            self._texts.facts = replace(facts, max_tokens=min(facts.max_tokens, max_model_len))

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
        deadline: Deadline | None = None,
        runs: bool = True,
    ) -> PreparedRequest:
        """Turn a request into work for the engine. `rendered` holds its images and videos; None if it has none.

        With `runs` False, its prompt is only counted.

        Raises RequestError, and Cancelled if the deadline was cancelled. Without `deadline` there is no time limit.
        """
        deadline = Deadline(math.inf, "") if deadline is None else deadline
        if request.texts is not None:
            return self._prepare_texts(request, request.texts, deadline)
        rendered_media: tuple[RenderedMedia, ...] = ()
        if rendered is not None:
            rendered_media = tuple(rendered[part] for part in media_parts(request))
            request = replace_parts(request, {part: (_known_part(part, media),) for part, media in rendered.items()})
        budget = SchemaBudget()
        schemas = declared_schemas(request, budget)
        chat = None if request.messages is None else self._chat(request, rendered_media, deadline, runs=runs)
        prompt = self._completion(request) if chat is None else chat.inputs
        sampling = resolve_sampling(
            request.sampling,
            num_prompt_tokens=len(prompt.token_ids),
            max_model_len=self._window.max_model_len,
            vocab_size=self._vocab_size,
            eos_token_ids=self.tokenizer.eos_token_ids
            | (self._fill_in.end_ids if chat is None and prompt.snapshot_points else frozenset()),
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

    def _prepare_texts(self, request: Request, inputs: TextInputs, deadline: Deadline) -> PreparedRequest:
        assert self._texts is not None, "other models refuse the request"
        prompt = PromptInputs(token_ids=(), texts=self._texts.prepare(inputs, deadline))
        return PreparedRequest(request, prompt, _NO_SAMPLING, {})

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
        else:
            self._check_vocabulary(prompt)
        if request.suffix:
            self._window.check_text(request.suffix, param="suffix")
            prompt = self._fill_in.prompt(prompt, request.suffix)
        elif isinstance(prompt, str):
            prompt = tuple(self.tokenizer.encode(prompt, add_special_tokens=True))
        self._window.check_ids(prompt, param="prompt")
        if most := request.max_prompt_logprobs:
            self._check_vocabulary(prompt)
            if (num := len(prompt) * (1 + (request.sampling.logprobs or 0))) > most:
                raise InvalidParameter(
                    f"This prompt would return {num} log-probabilities; for each choice of this request the limit is "
                    f"{most}. Lower `logprobs`, send fewer or shorter prompts, or leave `echo` out.",
                    param="logprobs",
                )
        point = self._fill_in.resume_point(prompt)
        return PromptInputs(token_ids=prompt, snapshot_points=() if point is None else (point,))

    def _check_vocabulary(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            if not 0 <= token_id < self._vocab_size:
                raise InvalidParameter(
                    f"`prompt` holds the token id {token_id}; this model's ids are 0 to {self._vocab_size - 1}.",
                    param="prompt",
                )

    def output(self, prepared: PreparedRequest) -> OutputPipeline | VectorOutput:
        """Make the output of one of the request's replies."""
        if prepared.prompt.texts is not None:
            inputs, is_scaled = prepared.request.texts, self._texts is not None and self._texts.facts.normalize
            dimensions = None if inputs is None else inputs.dimensions
            return VectorOutput(prepared.prompt.num_tokens, dimensions=dimensions, normalize=is_scaled)
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
        if reply.is_complete and reply.token_ids:  # no client sends a reply back that was cut inside a tool call
            self.replies.add(_remembered(prepared.chat, reply), prepared.chat.token_ids)
        if prepared.compared is not None:
            self._changes.remember(prepared.compared, prepared.chat, reply)

    def kept_tokens(self, prepared: PreparedRequest, reply: FinishedReply, policy: CacheReasoning | None = None) -> int:
        """Return the length of the longest start of prompt + reply that a next prompt can begin with.

        It may end in the prompt; for a text completion, it is everything. `policy` None means the server's, unless the
        request says whether its reasoning stays.
        """
        chat, num_prompt = prepared.chat, len(prepared.prompt.token_ids)
        if chat is None:  # the next prompt of a text completion begins with the complete text, unless it is a fill-in
            return prepared.num_kept + (0 if prepared.prompt.snapshot_points else len(reply.token_ids))
        policy = policy or self._policy(chat.request.keeps_reasoning)
        if policy == "keep" or (policy == "drop" and not reply.has_reasoning):
            return num_prompt + len(reply.token_ids)
        return num_prompt if policy == "drop" else self._reproduced_tokens(chat, reply)

    def next_prompt(self, prepared: PreparedRequest, reply: FinishedReply) -> PromptInputs | None:
        """Return the beginning that the prompts of all next questions share, with one token more.

        It ends before an image that cannot be placed. Returns None if the server computes none ahead, it has few tokens
        that are not stored, the template refuses a question, or the reply has calls.
        """
        chat = prepared.chat
        if not self._looks_ahead or chat is None or self._policy(chat.request.keeps_reasoning) == "keep":
            return None
        if reply.calls or not reply.is_complete:
            return None
        sentinel = _absent(chat.text, repr(reply.message))
        later = next(next_requests(chat.request, full_message(chat.request, reply.message), sentinel))
        try:
            text = self.template.probe(later)
            encoded = self._encode(text, self._recall(later), later, Deadline(math.inf, ""))
        except RequestError:
            return None
        end = encoded.before_space(encoded.boundary_before(text.rfind(sentinel))).num_tokens
        media = tuple(_placed_again(chat.inputs, encoded.token_ids[:end]))
        if len(media) < len(chat.inputs.media):
            end = media[-1].end if media else 0
        num_stored = common_prefix((*chat.token_ids, *reply.token_ids), encoded.token_ids[:end])
        if end - num_stored < _LEAST_AHEAD:
            return None
        points = tuple(point for point in chat.inputs.snapshot_points if point <= num_stored)
        return PromptInputs(token_ids=encoded.token_ids[: end + 1], media=media, snapshot_points=points)

    def _policy(self, keeps_reasoning: bool | None) -> CacheReasoning:
        own = self._cache_reasoning
        if keeps_reasoning is None:
            return own
        return "keep" if keeps_reasoning else "auto" if own == "keep" else own

    def _chat(
        self, request: Request, rendered_media: Items[RenderedMedia], deadline: Deadline, *, runs: bool
    ) -> ChatPrompt:
        """Render, tokenize and check a conversation; `rendered_media` are its images and videos, in order.

        A prompt that is only counted, rather than run, has no boundaries apart from those before its media.
        Raises RequestError if the model cannot take such a prompt, and the deadline's error.
        """
        if not request.messages:
            raise InvalidParameter("`messages` must not be empty.", param="messages")
        recalled = self._recall(request)
        request = replace(request, messages=recalled.messages)
        deadline.check()
        rendered = self.template.render_prompt(request)
        deadline.check()
        encoded = self._encode(rendered.text, recalled, request, deadline)
        media, edges = _place(encoded, rendered.media_starts, rendered_media)
        points: tuple[Boundary, ...] = ()
        if runs and not self._resumes_anywhere:
            points = plan_points(self.template, request, encoded, deadline)
        elif runs:
            edges += conversation_end(self.template, request, encoded)
        inputs = PromptInputs(
            token_ids=encoded.token_ids,
            media=media,
            snapshot_points=tuple(point.num_tokens for point in points),
            starts_in_reasoning=self.formats.judge is not None and self.formats.judge.is_open(encoded.token_ids),
        )
        return ChatPrompt(
            request=request,
            key=recalled.key,
            text=rendered.text,
            inputs=inputs,
            known_prefix=encoded.known_prefix,
            boundaries=tuple(sorted({*points, *edges})),
            rules=rendered.rules,
        )

    def _reproduced_tokens(self, prompt: ChatPrompt, reply: FinishedReply) -> int:
        """Render prompts that can follow the reply, at most twice, and compare the ids up to the following text."""
        entry, sentinel = _remembered(prompt, reply), _absent(prompt.text, repr(reply.message))
        ids = (*prompt.token_ids, *reply.token_ids)
        longest = 0
        for later in next_requests(prompt.request, full_message(prompt.request, reply.message), sentinel):
            with suppress(TemplateError):  # the template may refuse that request
                text = self.template.probe(later).partition(sentinel)[0]
                if text.startswith(prompt.text):
                    encoded = EncodedText(self.tokenizer, text, self._known_prefix(entry, text, later))
                    longest = max(longest, common_prefix(ids, encoded.token_ids))
                else:
                    longest = max(longest, entry.boundary_before(common_prefix(prompt.text, text)).num_tokens)
        return longest

    def _recall(self, request: Request) -> RecalledConversation:
        """Find remembered replies. A message that the new reply is to continue stays as the client sent it."""
        assert request.messages is not None
        tools = (*request.tools, *request.unlisted_tools)
        num_sent = len(request.messages) - request.continue_final_message
        recalled = self.replies.recall(request.cache_salt, request.messages[:num_sent], tools)
        return replace(recalled, messages=(*recalled.messages, *request.messages[num_sent:]))

    def _encode(self, text: str, recalled: RecalledConversation, request: Request, deadline: Deadline) -> EncodedText:
        """Tokenize the prompt's text after the known ids, unless it is too long for the model."""
        entry = recalled.longest(text)
        known = None if entry is None else self._known_prefix(entry, text, request)
        num_chars, num_tokens = (0, 0) if known is None else (known.num_chars, known.num_tokens)
        self._window.check_text(text, param="messages", known_chars=num_chars, known_tokens=num_tokens)
        deadline.check()
        encoded = EncodedText(self.tokenizer, text, known)
        deadline.check()
        self._window.check_ids(encoded.token_ids, param="messages")
        return encoded

    def _known_prefix(self, entry: RememberedReply, text: str, request: Request) -> KnownPrefix | None:
        """Return the ids that `entry` gives for the start of `text`, which begins with the entry's prompt."""
        rest = text[entry.text_length :]
        splice = self._splicer.splice(rest, entry.reply, request, entry.tail[-8:], entry.starts_in_reasoning)
        if splice.num_tokens:
            return KnownPrefix(entry, entry.text_length + splice.num_chars, entry.num_prompt_tokens + splice.num_tokens)
        return self._known_of_prompt(entry, text)

    def _known_of_prompt(self, entry: RememberedReply, text: str) -> KnownPrefix | None:
        """Return the prompt's ids up to its last added token, after which any text is tokenized as it would be alone.

        Without an added token after the base, return the ids of the base.
        """
        for index in range(len(entry.tail) - 1, -1, -1):
            added = self.tokenizer.added_token(entry.tail[index])
            if added is not None:
                position = text.rfind(added[0], entry.base_end.num_chars, entry.text_length)
                if position < 0:
                    break
                return KnownPrefix(entry, position + len(added[0]), entry.base_end.num_tokens + index + 1)
        return entry.base


def _known_part(part: MediaPart, rendered: RenderedMedia) -> MediaPart:
    """Name the part by a digest, so that an image is the same from any source."""
    return type(part)(rendered.digest, text=rendered.text)


def full_message(request: Request, reply: Message) -> Message:
    """Return a reply's message in the conversation. It begins with the text that the client began the reply with."""
    if not request.continue_final_message or not request.messages:
        return reply
    return replace(request.messages[-1], parts=(*request.messages[-1].parts, *reply.parts))


def _place(
    encoded: EncodedText, media_starts: Items[int], rendered_media: Items[RenderedMedia]
) -> tuple[tuple[MediaItem, ...], list[Boundary]]:
    """Place each image or video at the offset of its tokens. Returns them, and the boundaries before them."""
    media: list[MediaItem] = []
    edges: list[Boundary] = []
    for start, item in zip(media_starts, rendered_media, strict=True):
        num_chars = start + item.num_lead_chars
        edge = encoded.boundary_before(num_chars)
        ids = encoded.token_ids[edge.num_tokens : edge.num_tokens + len(item.token_ids)]
        if edge.num_chars != num_chars or ids != item.token_ids:
            raise TemplateError("The model's tokenizer cannot place the images of this conversation.", param="messages")
        media += item.placed(edge.num_tokens)
        edges.append(edge)
    if media and media[-1].end == len(encoded.token_ids):
        raise InvalidParameter("The prompt must not end with an image: let text follow it.", param="messages")
    return tuple(media), edges


def _placed_again(inputs: PromptInputs, token_ids: Items[int]) -> Iterator[MediaItem]:
    """Yield the images and videos of a prompt where their tokens are in a later one, up to one that is not there."""
    end = 0
    for item in inputs.media:
        tokens = inputs.token_ids[item.offset : item.end]
        starts = (at for at in range(end, len(token_ids)) if token_ids[at] == tokens[0])
        start = next((at for at in starts if token_ids[at : at + item.length] == tokens), None)
        if start is None:
            return
        yield replace(item, offset=start, inputs={})  # its features must be there
        end = start + item.length


def _remembered(prompt: ChatPrompt, reply: FinishedReply) -> RememberedReply:
    known = prompt.known_prefix
    num_known = 0 if known is None else known.num_tokens
    message = full_message(prompt.request, reply.message)
    return RememberedReply(
        salt=prompt.request.cache_salt,
        key=prompt.key,
        text_length=len(prompt.text),
        text_digest=text_digest(prompt.text).digest(),
        base=known,
        tail=array("I", prompt.token_ids[num_known:]),
        boundaries=prompt.boundaries,
        reply=replace(reply, message=message, token_ids=array("I", reply.token_ids)),
        starts_in_reasoning=prompt.inputs.starts_in_reasoning,
    )


def _absent(*texts: str) -> str:
    """Return a text that occurs in none of these: `sentinel` and one zero more than follows it in any of them."""
    runs = (found.group(1) for text in texts for found in _SENTINEL.finditer(text))
    return "sentinel" + "0" * (max(map(len, runs), default=0) + 1)
