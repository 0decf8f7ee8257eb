"""Request → ids: renders, tokenizes, checks. Any thread may call it."""

import math
from collections.abc import Sequence
from dataclasses import replace

from ..core.deadline import Deadline
from ..core.errors import ContextLengthExceeded, InvalidParameter, TemplateError
from ..core.request import Request
from ..core.sequence import MediaItem, PromptInputs
from ..formats import reasoning_markers
from ..media.rendered import RenderedMedia
from ..tokens.token_floor import TokenFloor
from ..tokens.tokenizer import Tokenizer
from .chat import ChatPrompt, ChatPrompts
from .encoded import Base, Encoded
from .points import SnapshotPoints
from .reply_memory import ReplyMemory
from .splice import Splicer
from .template import ChatTemplate

_COUNTED_TOKENS = 32_768  # a prompt that need not have more is tokenised anyway, so that the client reads its length


class PromptProcessor:
    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        *,
        max_model_len: int,
        vocab_size: int | None = None,  # of the model; None: the tokenizer's
        reasoning: str | None = None,  # names of the formats
        tools: str | None = None,
        memory: ReplyMemory | None = None,
    ):
        self._tokenizer = tokenizer
        self._points = SnapshotPoints(template)
        splicer = Splicer(tokenizer, reasoning=reasoning, tools=tools)
        memory = ReplyMemory() if memory is None else memory
        self.chats = ChatPrompts(tokenizer, template, splicer, memory, self._check_text)
        self._floor = TokenFloor(tokenizer)
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size if vocab_size is not None else tokenizer.vocab_size
        self._markers = reasoning_markers(reasoning) if reasoning is not None else None

    def process(
        self, request: Request, renditions: Sequence[RenderedMedia] = (), deadline: Deadline | None = None
    ) -> tuple[PromptInputs, ChatPrompt | None]:
        """`renditions`: of the request's images. Raises RequestError where the model can take no such prompt."""
        if request.messages is not None:
            return self._chat(request, renditions, Deadline(math.inf, "") if deadline is None else deadline)
        token_ids = self._completion(request)
        self._check_length(request, token_ids)
        return PromptInputs(token_ids=tuple(token_ids)), None

    def _chat(
        self, request: Request, renditions: Sequence[RenderedMedia], deadline: Deadline
    ) -> tuple[PromptInputs, ChatPrompt]:
        assert request.messages is not None
        if not request.messages:
            raise InvalidParameter("`messages` must not be empty.", param="messages")
        chat, encoded = self.chats.build(request, deadline)
        self._check_length(request, chat.token_ids)
        media, edges = _place(chat, encoded, renditions)
        points = self._points.plan(chat.request, encoded, deadline)
        inputs = PromptInputs(
            token_ids=chat.token_ids,
            media=media,
            snapshot_points=tuple(num_tokens for _, num_tokens in points),
            starts_in_reasoning=self._starts_in_reasoning(chat.token_ids),
        )
        return inputs, replace(chat, marks=tuple(sorted({*points, *edges})))

    def _check_length(self, request: Request, token_ids: Sequence[int]) -> None:
        if not token_ids:
            raise InvalidParameter("The prompt is empty: give at least one token.", param=_field(request))
        if len(token_ids) >= self._max_model_len:
            raise ContextLengthExceeded(num_prompt_tokens=len(token_ids), max_model_len=self._max_model_len)

    def _check_text(self, text: str, base: Base | None = None) -> None:
        """Refuses, before it is tokenised, a text that cannot fit. `base`: ids that stand for the text's start."""
        most = max(self._max_model_len, _COUNTED_TOKENS)
        if len(text) < most:
            return
        least = self._floor.least_tokens(text)
        if base is not None:
            least = min(least, base.num_tokens - 1 + self._floor.least_tokens(text[base.num_chars :]))
        if least >= most:
            raise ContextLengthExceeded(num_prompt_tokens=least, max_model_len=self._max_model_len, is_least=True)

    def _completion(self, request: Request) -> list[int]:
        prompt = request.prompt
        assert prompt is not None
        if isinstance(prompt, str):
            self._check_text(prompt)
            return self._tokenizer.encode(prompt, add_special_tokens=True)
        for token_id in prompt:
            if not 0 <= token_id < self._vocab_size:
                raise InvalidParameter(
                    f"`prompt` holds the token id {token_id}; this model's ids are 0 to {self._vocab_size - 1}.",
                    param="prompt",
                )
        return list(prompt)

    def _starts_in_reasoning(self, token_ids: Sequence[int]) -> bool:
        """Whether the last tag of thoughts in the last turn opens one. Any other added token begins a turn."""
        if self._markers is None:
            return False
        tail: list[int] = []
        for token_id in reversed(token_ids):
            added = self._tokenizer.added_token(token_id)
            if added is not None:
                if added[0] in self._markers:
                    return added[0] == self._markers[0]
                break
            tail.append(token_id)
        if self._tokenizer.marker_tokens.issuperset(self._markers):
            return False
        text = self._tokenizer.decode(tail[::-1])
        opened, closed = (text.rfind(marker) for marker in self._markers)
        return opened > closed


def _place(
    chat: ChatPrompt, encoded: Encoded, renditions: Sequence[RenderedMedia]
) -> tuple[tuple[MediaItem, ...], list[tuple[int, int]]]:
    """Each image at its tokens, and the boundaries (characters, tokens) before them."""
    media: list[MediaItem] = []
    edges = []
    for start, rendition in zip(chat.image_starts, renditions, strict=True):
        char = start + rendition.num_lead_chars
        edge = encoded.boundary(char)
        offset = edge[1]
        if edge[0] != char or chat.token_ids[offset : offset + len(rendition.token_ids)] != rendition.token_ids:
            raise TemplateError("The model's tokenizer cannot place the images of this conversation.", param="messages")
        media += rendition.placed(offset)
        edges.append(edge)
    if media and media[-1].end == len(chat.token_ids):
        raise InvalidParameter("The prompt must not end with an image: let text follow it.", param="messages")
    return tuple(media), edges


def _field(request: Request) -> str:
    return "prompt" if request.messages is None else "messages"
