"""The Python API: generates replies without a server."""

import asyncio
import threading
from collections.abc import Coroutine, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any, TypeVar, cast

from pydantic import ValidationError

from .api.error_replies import describe
from .api.openai.decode import decode_chat
from .api.openai.schema import ChatCompletionBody
from .api.replies import FoldedChoice
from .api.text import well_formed
from .core.config import EngineConfig
from .core.events import Failed, FinishReason, TokenLogprob, Usage
from .core.request import Request, SamplingParams
from .engine.loading import open_disk, start_engine
from .util.json_values import with_texts
from .util.tasks import call_at_exit, together

T = TypeVar("T")
MAX_TOKENS = 256  # of a text that `generate` continues without a limit, as in mlx-lm
Prompt = str | Items[int]
Conversation = Items[Mapping[str, Any]]


@dataclass(slots=True)
class ToolCall:
    call_id: str
    name: str
    arguments: str  # JSON


@dataclass(slots=True)
class Completion:
    """One reply."""

    index: int
    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] | None = None
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None


@dataclass(slots=True)
class RequestOutput:
    """The n replies to one prompt. `text` is the text of the first reply."""

    request_id: str
    num_prompt_tokens: int
    outputs: list[Completion]

    @property
    def text(self) -> str:
        return self.outputs[0].text


class LLM:
    """A loaded checkpoint. Keyword arguments are the fields of EngineConfig. To free it before the program ends, use
    a `with` block or call `close`.

    The prefix cache is kept on disk only if `cache_disk_bytes` is given.

    Raises ConfigError if the model cannot be loaded, RequestError for a request that cannot be served.
    """

    def __init__(self, model: str, **config: Any):
        unknown = config.keys() - {field.name for field in fields(EngineConfig)}
        if unknown:
            names = [field.name for field in fields(EngineConfig)]
            near = [name for key in sorted(unknown) for name in get_close_matches(key, names, 1)]
            hint = f"; similar ones: {', '.join(near)}" if near else ""
            raise TypeError(f"LLM has no setting {', '.join(sorted(unknown))}{hint}")
        engine_config = EngineConfig(model=str(model), **config)
        disk = open_disk(engine_config) if engine_config.cache_disk_bytes else None
        self._engine = start_engine(engine_config, disk)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="llm", daemon=True)
        self._thread.start()
        call_at_exit(self.close)

    def generate(
        self, prompts: Prompt | Items[Prompt], sampling_params: SamplingParams | None = None
    ) -> list[RequestOutput]:
        """Continue one prompt or several at once, given as texts or lists of token ids.

        Results are in the order of the prompts. Without `max_tokens` a reply ends after 256 tokens.
        """
        sampling = sampling_params or SamplingParams()
        if sampling.max_tokens is None:
            sampling = replace(sampling, max_tokens=MAX_TOKENS)
        return self._run_all(
            [
                Request(request_id=f"generate-{number}", prompt=prompt, sampling=sampling)
                for number, prompt in enumerate(_prompts(prompts))
            ]
        )

    def chat(
        self,
        messages: Conversation | Items[Conversation],
        sampling_params: SamplingParams | None = None,
        **fields: Any,
    ) -> list[RequestOutput]:
        """Answer a conversation, or several at once: `[{"role": "user", "content": "…"}, …]`.

        Messages and other keywords are those of a chat completion (`tools=[…]`, `temperature=0`). `sampling_params`
        replace all keywords of sampling.
        """
        if isinstance(messages, str):
            raise TypeError('chat takes a list of messages: [{"role": "user", "content": "…"}]')
        if fields.get("stream"):
            raise TypeError("chat returns complete replies: leave `stream` out")
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        requests = []
        for number, conversation in enumerate(conversations):
            body = _chat_body(with_texts({"messages": list(conversation), **fields}, well_formed))
            decoded = decode_chat(body, reply_id=f"chat-{number}", model="", created=0)
            request = decoded.requests[0]
            requests.append(request if sampling_params is None else replace(request, sampling=sampling_params))
        return self._run_all(requests)

    def close(self) -> None:
        """Shut the engine down and free the model. A second call does nothing."""
        if self._loop.is_closed():
            return
        self._call(self._engine.shutdown(0))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run_all(self, requests: list[Request]) -> list[RequestOutput]:
        if self._loop.is_closed():
            raise RuntimeError("This LLM is closed: make another one")
        return self._call(together(self._run(request) for request in requests))

    async def _run(self, request: Request) -> RequestOutput:
        choices = [FoldedChoice() for _ in range(request.sampling.n)]
        async with await self._engine.submit(request) as generation:
            async for index, event in generation:
                if isinstance(event, Failed):
                    raise event.error
                choices[index].feed(event)
        outputs = [_completion(index, choice) for index, choice in enumerate(choices)]
        return RequestOutput(request.request_id, generation.num_prompt_tokens, outputs)

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        result = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return result.result()
        finally:
            result.cancel()  # Ctrl-C leaves no request running; a finished coroutine ignores this


def _prompts(prompts: Prompt | Items[Prompt]) -> list[str | tuple[int, ...]]:
    """Return one prompt or several as texts and tuples of ids."""
    if isinstance(prompts, str):
        return [well_formed(prompts)]
    if prompts and isinstance(prompts[0], int):
        return [tuple(cast(Items[int], prompts))]
    return [well_formed(item) if isinstance(item, str) else tuple(item) for item in cast(Items[Prompt], prompts)]


def _chat_body(wire: dict[str, Any]) -> ChatCompletionBody:
    try:
        return ChatCompletionBody.model_validate(wire)
    except ValidationError as error:
        raise describe(error.errors(), wire) from error


def _completion(index: int, choice: FoldedChoice) -> Completion:
    calls = [ToolCall(call.call_id, call.name, arguments) for call, arguments in choice.calls]
    return Completion(
        index,
        text=choice.text("text"),
        reasoning=choice.text("reasoning"),
        tool_calls=calls or None,
        logprobs=choice.logprobs or None,
        finish_reason=choice.finished.reason,
        usage=choice.finished.usage,
    )
