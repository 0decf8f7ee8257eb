"""Conversation → prompt: a prompt begins with the ids of the prompt and reply that it continues."""

import math
import re
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from ..core.config import CacheReasoning
from ..core.errors import InvalidParameter, TemplateError
from ..core.messages import Message
from ..core.request import Request
from ..core.sequence import MediaItem, PromptInputs
from ..formats import ReplyFormats
from ..formats.reply import FinishedReply
from ..formats.tokenizer import Tokenizer
from ..guidance.reasoning import CheckpointReasoning
from ..media.rendered import RenderedMedia
from ..util.tasks import Deadline
from .context_window import ContextWindow
from .encoded import EncodedText, common_prefix
from .points import conversation_end, next_requests, plan_points
from .remembered import Boundary, KnownPrefix, RememberedReply
from .reply_memory import RecalledConversation, ReplyMemory, TextDigest
from .splice import Splicer
from .template import ChatTemplate

_SENTINEL = re.compile("sentinel(0*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """The prompt of one chat request, and what is needed to remember the reply to it."""

    request: Request  # in its messages, remembered replies have replaced what the client sent for them
    key: bytes  # identifies the messages in the reply memory
    text: str  # the text that the template rendered
    inputs: PromptInputs
    known_prefix: KnownPrefix | None = None  # the ids that come from an earlier prompt and its reply
    boundaries: tuple[Boundary, ...] = ()  # starts of images, and snapshot points or else the conversation's end
    rules: tuple[str, ...] = ()  # the rules by which the conversation was rewritten for its template

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.inputs.token_ids


class ChatPrompts:
    """Makes the prompts of a conversation's turns so that each extends the one before. Threads may share it.

    The model's own ids of an earlier reply are used wherever the template still writes what they say.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        memory: ReplyMemory,
        window: ContextWindow,
        formats: ReplyFormats,
        judge: CheckpointReasoning | None,
        *,
        resumes_anywhere: bool = True,
    ):
        """`judge`: the reader of open reasoning in prompts. `resumes_anywhere`: prompts get no snapshot points."""
        self._tokenizer = tokenizer
        self._template = template
        self._memory = memory
        self._window = window
        self._splicer = Splicer(tokenizer, formats)
        self._judge = judge
        self._resumes_anywhere = resumes_anywhere

    def build(
        self,
        request: Request,
        rendered_media: Sequence[RenderedMedia] = (),
        deadline: Deadline | None = None,
        *,
        runs: bool = True,
    ) -> ChatPrompt:
        """Render, tokenize and check a conversation; `rendered_media` are its images and videos, in order.

        A prompt that is only counted, rather than run, has no boundaries apart from those before its media.
        Raises RequestError if the model cannot take such a prompt, and what the deadline raises.
        """
        if not request.messages:
            raise InvalidParameter("`messages` must not be empty.", param="messages")
        deadline = Deadline(math.inf, "") if deadline is None else deadline
        recalled = self._recall(request)
        request = replace(request, messages=recalled.messages)
        deadline.check()
        rendered = self._template.render_prompt(request)
        deadline.check()
        encoded = self._encode(rendered.text, recalled, request, deadline)
        media, edges = _place(encoded, rendered.media_starts, rendered_media)
        points: tuple[Boundary, ...] = ()
        if runs and not self._resumes_anywhere:
            points = plan_points(self._template, request, encoded, deadline)
        elif runs:
            edges += conversation_end(self._template, request, encoded)
        inputs = PromptInputs(
            token_ids=encoded.token_ids,
            media=media,
            snapshot_points=tuple(point.num_tokens for point in points),
            starts_in_reasoning=self._judge is not None and self._judge.is_open(encoded.token_ids),
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

    def remember(self, prompt: ChatPrompt, reply: FinishedReply) -> None:
        """Store a reply for later prompts, unless it was cut inside a tool call: no client sends such a reply back."""
        if reply.is_complete and reply.token_ids:
            self._memory.add(_remembered(prompt, reply), prompt.token_ids)

    def kept_tokens(self, prompt: ChatPrompt, reply: FinishedReply, policy: CacheReasoning) -> int:
        """Return the length of the longest start of prompt + reply that a next prompt can begin with.

        It may end in the prompt.
        """
        if policy == "keep" or (policy == "drop" and not reply.has_reasoning):
            return len(prompt.token_ids) + len(reply.token_ids)
        return len(prompt.token_ids) if policy == "drop" else self._reproduced_tokens(prompt, reply)

    def _reproduced_tokens(self, prompt: ChatPrompt, reply: FinishedReply) -> int:
        """Render what can follow the reply, at most twice, and compare the ids up to the text that follows."""
        entry, sentinel = _remembered(prompt, reply), _absent(prompt.text, repr(reply.message))
        ids = (*prompt.token_ids, *reply.token_ids)
        longest = 0
        for later in next_requests(prompt.request, full_message(prompt.request, reply.message), sentinel):
            with suppress(TemplateError):  # the template may refuse that request
                text = self._template.probe(later).partition(sentinel)[0]
                if text.startswith(prompt.text):
                    encoded = EncodedText(self._tokenizer, text, self._known_prefix(entry, text, later))
                    longest = max(longest, common_prefix(ids, encoded.token_ids))
                else:
                    longest = max(longest, entry.boundary_before(common_prefix(prompt.text, text)).num_tokens)
        return longest

    def _recall(self, request: Request) -> RecalledConversation:
        """Find remembered replies. A message that the new reply is to continue stays as the client sent it."""
        assert request.messages is not None
        tools = (*request.tools, *request.unlisted_tools)
        num_sent = len(request.messages) - request.continue_final_message
        recalled = self._memory.recall(request.cache_salt, request.messages[:num_sent], tools)
        return replace(recalled, messages=(*recalled.messages, *request.messages[num_sent:]))

    def _encode(self, text: str, recalled: RecalledConversation, request: Request, deadline: Deadline) -> EncodedText:
        """Tokenize the prompt's text after the known ids, unless it is too long for the model."""
        entry = recalled.longest(text)
        known = None if entry is None else self._known_prefix(entry, text, request)
        num_chars, num_tokens = (0, 0) if known is None else (known.num_chars, known.num_tokens)
        self._window.check_text(text, param="messages", known_chars=num_chars, known_tokens=num_tokens)
        deadline.check()
        encoded = EncodedText(self._tokenizer, text, known)
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
            added = self._tokenizer.added_token(entry.tail[index])
            if added is not None:
                position = text.rfind(added[0], entry.base_end.num_chars, entry.text_length)
                if position < 0:
                    break
                return KnownPrefix(entry, position + len(added[0]), entry.base_end.num_tokens + index + 1)
        return entry.base


def full_message(request: Request, reply: Message) -> Message:
    """Return a reply's message in the conversation. It begins with the text that the client began the reply with."""
    if not request.continue_final_message or not request.messages:
        return reply
    return replace(request.messages[-1], parts=(*request.messages[-1].parts, *reply.parts))


def _place(
    encoded: EncodedText, media_starts: Sequence[int], rendered_media: Sequence[RenderedMedia]
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


def _remembered(prompt: ChatPrompt, reply: FinishedReply) -> RememberedReply:
    known = prompt.known_prefix
    num_known = 0 if known is None else known.num_tokens
    message = full_message(prompt.request, reply.message)
    return RememberedReply(
        salt=prompt.request.cache_salt,
        key=prompt.key,
        text_length=len(prompt.text),
        text_digest=TextDigest(prompt.text).value(),
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
