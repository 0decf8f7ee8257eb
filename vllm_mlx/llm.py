"""The Python API: generates replies without a server."""

import asyncio
import re
import sys
import threading
from base64 import b64encode
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterator, Mapping
from collections.abc import Sequence as Items
from concurrent.futures import Future
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar, cast
from urllib.parse import unquote, urlsplit

from PIL import Image
from pydantic import ValidationError
from rich.console import Console
from rich.progress import Progress

from .api.error_replies import describe
from .api.openai.decode import ReplySpec, decode_chat
from .api.openai.schema import ChatCompletionBody
from .api.replies import FoldedChoice
from .api.text import well_formed
from .core.config import EngineConfig
from .core.errors import InvalidImage
from .core.events import Failed, FinishReason, ReasoningDelta, TextDelta, TokenLogprob, Usage
from .core.request import Request, SamplingParams
from .engine.loading import open_disk, start_engine
from .util.json_values import with_texts
from .util.tasks import call_at_exit, together

T = TypeVar("T")
MAX_TOKENS = 256  # of a text that `generate` continues without a limit, as in mlx-lm
NOTHING = "nothing is needed here"
VLLM_NAMES = {  # of the settings of vLLM's LLM that have another name here
    "gpu_memory_utilization": "write `memory_budget_bytes`",
    "max_num_batched_tokens": "write `max_prefill_chunk`",
    "enable_prefix_caching": "it is on; `prefix_cache=False` turns it off",
    "limit_mm_per_prompt": "write `media=MediaConfig(…)`",
    "served_model_name": "it is for a server; leave it out",
    "seed": "write `SamplingParams(seed=…)`",
    **dict.fromkeys(("dtype", "quantization", "kv_cache_dtype", "tokenizer_mode"), "the checkpoint decides"),
    **dict.fromkeys(("enforce_eager", "swap_space", "block_size", "enable_chunked_prefill"), NOTHING),
}
Prompt = str | Items[int]
Conversation = Items[Mapping[str, Any]]


@dataclass(slots=True)
class ToolCall:
    call_id: str
    name: str
    arguments: str  # JSON


@dataclass(slots=True)
class Completion:
    """One reply. `token_ids` has all sampled tokens, the stop token included."""

    index: int
    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] | None = None
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    token_ids: list[int] = field(default_factory=list)


@dataclass(slots=True)
class RequestOutput:
    """The n replies to one prompt. `text` is the text of the first reply, `prompt` the text that the model has read."""

    request_id: str
    prompt: str
    prompt_token_ids: list[int]
    outputs: list[Completion]

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a reply that is streamed. The last one is empty and has the complete reply as its `output`."""

    text: str = ""
    reasoning: str = ""
    output: RequestOutput | None = None


class LLM:
    """A loaded checkpoint. Keyword arguments are the fields of EngineConfig. To free it before the program ends, use
    a `with` block or call `close`.

    The prefix cache is kept on disk only if `cache_disk_bytes` is given.

    Raises ConfigError if the model cannot be loaded, RequestError for a request that cannot be served.
    """

    def __init__(self, model: str, **config: Any):
        names = [field.name for field in fields(EngineConfig)]
        if unknown := config.keys() - set(names):
            near = [name for key in sorted(unknown) for name in get_close_matches(key, names, 1)]
            hint = f"; similar ones: {', '.join(near)}" if near else ""
            hint += "".join(f"; {key}: {VLLM_NAMES[key]}" for key in sorted(unknown & VLLM_NAMES.keys()))
            raise TypeError(f"LLM has no setting {', '.join(sorted(unknown))}{hint}")
        engine_config = EngineConfig(model=str(model), **config)
        disk = open_disk(engine_config) if engine_config.cache_disk_bytes else None
        self._engine = start_engine(engine_config, disk)
        self._reads_files = engine_config.media.media_root is None  # else only those of that folder are read
        self._most = max(1, min(2 * engine_config.max_num_seqs, engine_config.max_queue))  # replies asked at a time
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="llm", daemon=True)
        self._thread.start()
        call_at_exit(self.close)

    def generate(
        self, prompts: Prompt | Items[Prompt], sampling_params: SamplingParams | None = None, *, progress: bool = True
    ) -> list[RequestOutput]:
        """Continue one prompt or several together, given as texts or lists of token ids.

        Results are in the order of the prompts. Without `max_tokens` a reply ends after 256 tokens. On a terminal, a
        bar shows the `progress` of several prompts.
        """
        return self._run_all(_texts(prompts, sampling_params), progress=progress)

    def chat(
        self,
        messages: Conversation | Items[Conversation],
        sampling_params: SamplingParams | None = None,
        *,
        progress: bool = True,
        **fields: Any,
    ) -> list[RequestOutput]:
        """Answer a conversation, or several together: `[{"role": "user", "content": "…"}, …]`.

        Messages and other keywords are those of a chat completion (`tools=[…]`, `temperature=0`); images may also be
        paths, `file://` URLs and PIL images. `sampling_params` replace all keywords of sampling.
        """
        if fields.get("stream"):
            raise TypeError("chat returns complete replies: leave `stream` out, or call `LLM.stream`")
        return self._run_all(self._chats(messages, sampling_params, fields), progress=progress)

    def stream(
        self, prompt: str | Conversation, sampling_params: SamplingParams | None = None, **fields: Any
    ) -> Iterator[Delta]:
        """Yield one reply in pieces: a text is continued as by `generate`, a conversation answered as by `chat`."""
        deltas = self._deltas(self._only(prompt, sampling_params, fields))
        try:
            while (delta := self._call(anext(deltas, None))) is not None:
                yield delta
        finally:
            self._call(deltas.aclose())

    async def stream_async(
        self, prompt: str | Conversation, sampling_params: SamplingParams | None = None, **fields: Any
    ) -> AsyncIterator[Delta]:
        """Yield the pieces of `stream`, in a program with an event loop."""
        deltas = self._deltas(self._only(prompt, sampling_params, fields))
        try:
            while (delta := await asyncio.wrap_future(self._start(anext(deltas, None)))) is not None:
                yield delta
        finally:
            await asyncio.wrap_future(self._start(deltas.aclose()))

    def get_tokenizer(self) -> Any:
        """Return the tokenizer of transformers."""
        return self._engine.fronts[0].tokenizer.hf

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

    def _only(self, prompt: str | Conversation, sampling: SamplingParams | None, fields: Mapping[str, Any]) -> Request:
        """Return the request for one reply to one prompt."""
        if isinstance(prompt, str) and fields:
            raise TypeError(f"a text is continued by `sampling_params` alone: leave out {', '.join(sorted(fields))}")
        [request] = _texts(prompt, sampling) if isinstance(prompt, str) else self._chats(prompt, sampling, fields)
        if request.sampling.n > 1:
            raise TypeError("stream yields one reply: leave `n` out")
        return request

    def _chats(
        self, messages: Conversation | Items[Conversation], sampling: SamplingParams | None, fields: Mapping[str, Any]
    ) -> list[Request]:
        if isinstance(messages, str):
            raise TypeError('chat takes a list of messages: [{"role": "user", "content": "…"}]')
        conversations = cast(
            Items[Conversation], [messages] if messages and isinstance(messages[0], Mapping) else messages
        )
        requests = []
        for number, conversation in enumerate(conversations):
            body = _chat_body(
                with_texts({"messages": _with_files(list(conversation), self._reads_files), **fields}, well_formed)
            )
            request = decode_chat(body, ReplySpec(reply_id=f"chat-{number}", model="", created=0)).request
            requests.append(request if sampling is None else replace(request, sampling=sampling))
        return requests

    def _run_all(self, requests: list[Request], *, progress: bool = False) -> list[RequestOutput]:
        places = asyncio.Semaphore(self._most)
        shown = progress and len(requests) > 1 and sys.stderr.isatty()
        with Progress(console=Console(stderr=True), disable=not shown) as bar:
            task = bar.add_task("Replies", total=len(requests))

            async def run(request: Request) -> RequestOutput:
                output = None
                async with places:
                    async for delta in self._deltas(request):
                        output = delta.output
                bar.advance(task)
                assert output is not None, "the last piece has it"
                return output

            return self._call(together(run(request) for request in requests))

    async def _deltas(self, request: Request) -> AsyncGenerator[Delta, None]:
        choices = [FoldedChoice() for _ in range(request.sampling.n)]
        async with await self._engine.submit(request) as generation:
            async for index, event in generation:
                choices[index].feed(event)
                match event:
                    case Failed(error):
                        raise error
                    case TextDelta(text):
                        yield Delta(text=text)
                    case ReasoningDelta(text):
                        yield Delta(reasoning=text)
        replies = list(generation.by_sequence.values())
        ids = list(replies[0].seq.prompt.token_ids)
        text = request.prompt if isinstance(request.prompt, str) else self._engine.fronts[0].tokenizer.decode(ids)
        numbered = enumerate(zip(choices, replies, strict=True))
        outputs = [_completion(index, choice, reply.finished.token_ids) for index, (choice, reply) in numbered]
        yield Delta(output=RequestOutput(request.request_id, text, ids, outputs))

    def _start(self, coroutine: Awaitable[T]) -> Future[T]:
        if self._loop.is_closed():
            raise RuntimeError("This LLM is closed: make another one")
        return asyncio.run_coroutine_threadsafe(_awaited(coroutine), self._loop)

    def _call(self, coroutine: Awaitable[T]) -> T:
        result = self._start(coroutine)
        try:
            return result.result()
        finally:
            result.cancel()  # Ctrl-C leaves no request running; a finished coroutine ignores this


async def _awaited(work: Awaitable[T]) -> T:
    return await work


def _texts(prompts: Prompt | Items[Prompt], sampling: SamplingParams | None) -> list[Request]:
    sampling = sampling or SamplingParams()
    if sampling.max_tokens is None:
        sampling = replace(sampling, max_tokens=MAX_TOKENS)
    numbered = enumerate(_prompts(prompts))
    return [Request(request_id=f"generate-{number}", prompt=prompt, sampling=sampling) for number, prompt in numbered]


def _with_files(value: Any, reads_files: bool) -> Any:
    """Turn PIL images into data URLs, and images named by a path or a `file://` URL if it `reads_files`."""
    if isinstance(value, list):
        return [_with_files(item, reads_files) for item in value]
    if not isinstance(value, Mapping):
        return value
    image = value.get("image_url")
    if image is None:
        return {key: _with_files(item, reads_files) for key, item in value.items()}
    url = image.get("url") if isinstance(image, Mapping) else image
    return {**value, "image_url": {**(image if isinstance(image, Mapping) else {}), "url": _data_url(url, reads_files)}}


def _data_url(image: Any, reads_files: bool) -> Any:
    if isinstance(image, Image.Image):
        buffer = BytesIO()
        image.convert("RGB").save(buffer, "PNG")
        data = buffer.getvalue()
    elif reads_files and isinstance(image, Path | str) and not re.match("(data|https?):", str(image)):
        path = unquote(urlsplit(image).path) if isinstance(image, str) and image.startswith("file:") else image
        try:
            data = Path(path).expanduser().read_bytes()
        except (OSError, ValueError) as error:
            raise InvalidImage(f"The image {str(image)[:200]!r} cannot be read: {error}.", param="messages") from error
    else:
        return image
    return "data:application/octet-stream;base64," + b64encode(data).decode()


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


def _completion(index: int, choice: FoldedChoice, token_ids: Items[int]) -> Completion:
    calls = [ToolCall(call.call_id, call.name, arguments) for call, arguments in choice.calls]
    return Completion(
        index,
        text=choice.text("text"),
        reasoning=choice.text("reasoning"),
        tool_calls=calls or None,
        logprobs=choice.logprobs or None,
        finish_reason=choice.finished.reason,
        usage=choice.finished.usage,
        token_ids=list(token_ids),
    )
