"""Request → ids: renders, tokenizes, checks. Pure, so any thread may call it."""

from ..core.errors import ContextLengthExceeded, InvalidParameter, Unsupported
from ..core.messages import ImagePart, Message, ToolResultPart
from ..core.request import Request
from ..core.sequence import PromptInputs
from ..parsers import reasoning_markers
from .template import ChatTemplate
from .tokenizer import Tokenizer


class PromptProcessor:
    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        *,
        max_model_len: int,
        vocab_size: int | None = None,  # of the model; None: the tokenizer's
        reasoning: str | None = None,  # name of the reasoning format
    ):
        self._tokenizer = tokenizer
        self._template = template
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size if vocab_size is not None else tokenizer.vocab_size
        self._markers = reasoning_markers(reasoning) if reasoning is not None else None

    def process(self, request: Request) -> PromptInputs:
        """Raises RequestError where the request has no prompt that this model can take."""
        token_ids = self._chat(request) if request.messages is not None else self._completion(request)
        if not token_ids:
            raise InvalidParameter("The prompt is empty: give at least one token.", param=_field(request))
        if len(token_ids) >= self._max_model_len:
            raise ContextLengthExceeded(num_prompt_tokens=len(token_ids), max_model_len=self._max_model_len)
        return PromptInputs(
            token_ids=tuple(token_ids),
            starts_in_reasoning=request.messages is not None and self._starts_in_reasoning(token_ids),
        )

    def _chat(self, request: Request) -> list[int]:
        assert request.messages is not None
        if not request.messages:
            raise InvalidParameter("`messages` must not be empty.", param="messages")
        if any(map(_has_image, request.messages)):
            raise Unsupported("This model takes no images.", param="messages")
        return self._tokenizer.encode(self._template.render(request), add_special_tokens=False)

    def _completion(self, request: Request) -> list[int]:
        prompt = request.prompt
        assert prompt is not None
        if isinstance(prompt, str):
            return self._tokenizer.encode(prompt, add_special_tokens=True)
        for token_id in prompt:
            if not 0 <= token_id < self._vocab_size:
                raise InvalidParameter(
                    f"`prompt` holds the token id {token_id}; this model's ids are 0 to {self._vocab_size - 1}.",
                    param="prompt",
                )
        return list(prompt)

    def _starts_in_reasoning(self, token_ids: list[int]) -> bool:
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


def _field(request: Request) -> str:
    return "prompt" if request.messages is None else "messages"


def _has_image(message: Message) -> bool:
    return any(
        isinstance(part, ImagePart)
        or (isinstance(part, ToolResultPart) and any(isinstance(item, ImagePart) for item in part.content))
        for part in message.parts
    )
