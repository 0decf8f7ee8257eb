"""Follows one streamed chat through the server: the files in which it changes form, and those that hand it on.

A form is a value that the chat becomes on its way, from the body of the request to the message that carries an event.
Calls and returns in the package are watched in all threads. The walk of a form begins at the file that makes it,
leads over the files that hand it on as an argument or a result, and ends at the file that makes the next form of it.
Files that only look at a value (logs, counts, limits) and helpers that make no form are not on the walk.

`python -m tests.project.walk` writes the walks into docs/architecture.md.
"""

import dataclasses
import json
import re
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from types import FrameType
from typing import Any

import httpx
import mlx.core as mx

from tests.support.running import eventually, serving
from vllm_mlx.api.openai.schema import ChatCompletionBody
from vllm_mlx.cache.node import Match, Node, Piece
from vllm_mlx.cache.snapshot import KVSegment
from vllm_mlx.core.config import EngineConfig
from vllm_mlx.core.events import ReasoningDelta, TextDelta
from vllm_mlx.core.messages import Message, TextPart
from vllm_mlx.core.request import Request
from vllm_mlx.core.sequence import PromptInputs
from vllm_mlx.core.sequence import Sequence as EngineSequence
from vllm_mlx.core.step import Restore, SequenceUpdate, StepOutput, StepPlan
from vllm_mlx.engine.loading import open_disk, start_engine
from vllm_mlx.prompt.encoded import EncodedText
from vllm_mlx.runner.sampler import Sampled

from .sources import PACKAGE, ROOT

PAGE = ROOT / "docs" / "architecture.md"
_MARK = "zanzibar"  # in the question, so that its text is known wherever it is met
_QUESTION = f"Say {_MARK}. " + "Say why. " * 240  # long, so that its state is read faster than computed
_PACKAGE = f"{PACKAGE}/"
_MAX_ITEMS = 8  # of a list that are looked at
_MAX_DEPTH = 3


@dataclass(frozen=True)
class Form:
    """What the chat is for a part of its way."""

    name: str
    matches: Callable[[Any], bool]


def _instance(name: str, *classes: type) -> Form:
    return Form(name, lambda value: isinstance(value, classes))


def _is_event_bytes(value: Any) -> bool:
    return isinstance(value, bytes) and value.startswith(b"data: ") and b'"reasoning_content":' in value


def _holds_question(value: Any) -> bool:
    return isinstance(value, bytes | bytearray) and _MARK.encode() in value


def _asks(message: Message) -> bool:
    """Whether the message has the question: another conversation's next turn may be probed at the same time."""
    return any(isinstance(part, TextPart) and _MARK in part.text for part in message.parts)


def _is_key(value: Any) -> bool:
    """Token ids as the prefix cache packs them: big-endian words."""
    return isinstance(value, bytes) and len(value) >= 32 and not len(value) % 4 and not any(value[::4])


def _is_layer_state(value: Any) -> bool:
    """Keys and values of one layer, piece by piece, taken from the pieces to be joined."""
    if not (isinstance(value, list) and value and isinstance(value[0], tuple)):
        return False
    return all(isinstance(array, mx.array) and array.ndim == 4 for array in value[0])


CHAT = (
    Form("body", lambda value: isinstance(value, dict) and _holds_question(value.get("body"))),
    _instance("ChatCompletionBody", ChatCompletionBody),
    Form("Message", lambda value: isinstance(value, Message) and _asks(value)),
    Form("Request", lambda value: isinstance(value, Request) and any(map(_asks, value.messages or ()))),
    Form("rendered prompt", lambda value: isinstance(value, str) and _MARK in value and "<|im_start|>" in value),
    Form("EncodedText", lambda value: isinstance(value, EncodedText) and _MARK in value.text),
    _instance("PromptInputs", PromptInputs),
    _instance("Sequence", EngineSequence),
    Form("StepPlan", lambda value: isinstance(value, StepPlan) and bool(value.decode)),
    Form("logits", lambda value: isinstance(value, mx.array) and value.ndim > 1 and value.shape[-1] >= 1000),
    _instance("Sampled", Sampled),
    Form("StepOutput", lambda value: isinstance(value, StepOutput) and bool(value.tokens)),
    Form("SequenceUpdate", lambda value: isinstance(value, SequenceUpdate) and bool(value.tokens)),
    _instance("GenerationEvent", TextDelta, ReasoningDelta),
    Form("bytes of an event", _is_event_bytes),
    Form("ASGI message", lambda value: isinstance(value, dict) and _is_event_bytes(value.get("body"))),
)
CACHED_TURN = (
    _instance("Sequence", EngineSequence),
    Form("packed token ids", _is_key),
    _instance("Node", Node),
    _instance("Piece", Piece),
    Form("Match", lambda value: isinstance(value, Match) and bool(value.length)),
    _instance("Restore", Restore),
    Form("keys and values", _is_layer_state),
)
RESTORED_TURN = (
    Form("packed token ids", _is_key),
    Form("bytes of a tensor", lambda value: isinstance(value, memoryview) and bool(value.nbytes)),
    _instance("KVSegment", KVSegment),
    _instance("Node", Node),
)


@dataclass
class Sighting:
    """One value of a form: the files that made it (innermost first), and from where each other file has it."""

    form: int
    value: Any  # kept, so that its id stays its own
    makers: tuple[str, ...]
    number: int  # in the order of making
    sources: dict[str, str | None] = field(default_factory=dict)
    last: str = ""

    def path_to(self, file: str) -> list[str]:
        path = [file]
        while (source := self.sources[path[0]]) is not None:
            path.insert(0, source)
        return path


class Tracer:
    """Notes where each value of some forms is first met, and who gave it to whom."""

    def __init__(self, forms: Sequence[Form]) -> None:
        self._forms = forms
        self._seen: dict[int, Sighting] = {}
        self.order: list[Sighting] = []

    def observe(self, frame: FrameType, event: str, value: Any) -> None:
        if event == "call" and _is_ours(frame):
            self._called(frame)
        elif event == "return" and _is_ours(frame):
            self._returned(frame, value)

    def _called(self, frame: FrameType) -> None:
        code = frame.f_code
        num_names = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4) + bool(code.co_flags & 8)
        names = [name for name in code.co_varnames[:num_names] if name not in ("self", "cls")]
        files = _files(frame)
        giver = files[1:2] if _is_ours(frame.f_back) else ()
        for name in names:
            for number, value in self._held(frame.f_locals.get(name)):
                self._hand_over(number, value, giver, files[0], files[1:] or files)

    def _returned(self, frame: FrameType, value: Any) -> None:
        files = _files(frame)
        taker = files[1] if len(files) > 1 and _is_ours(frame.f_back) else files[0]
        for number, held in self._held(value):
            self._hand_over(number, held, files[:1], taker, files)

    def _hand_over(self, form: int, value: Any, giver: tuple[str, ...], taker: str, makers: tuple[str, ...]) -> None:
        if form and not self.order:
            return  # something else goes on: the status is asked for every second, and looks at what is stored
        sighting = self._seen.get(id(value)) or self._add(form, value, makers)
        for file in (*giver, taker):
            if file not in sighting.sources:
                sighting.sources[file] = giver[0] if giver and file != giver[0] else sighting.last
            sighting.last = file

    def _add(self, form: int, value: Any, makers: tuple[str, ...]) -> Sighting:
        sighting = Sighting(form, value, makers, len(self.order), {makers[0]: None}, makers[0])
        self._seen[id(value)] = sighting
        self.order.append(sighting)
        return sighting

    def _held(self, value: Any, depth: int = 0) -> Iterator[tuple[int, Any]]:
        for number, form in enumerate(self._forms):
            if form.matches(value):
                yield number, value
                return
        if depth == _MAX_DEPTH:
            return
        match value:
            case list() | tuple():
                members: Sequence[Any] = value[:_MAX_ITEMS]
            case dict():
                members = list(value.values())[:_MAX_ITEMS]
            case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
                members = [getattr(value, each.name, None) for each in dataclasses.fields(value)]
            case _:
                return
        for member in members:
            yield from self._held(member, depth + 1)


def _is_ours(frame: FrameType | None) -> bool:
    return frame is not None and frame.f_code.co_filename.startswith(_PACKAGE)


def _files(frame: FrameType | None) -> tuple[str, ...]:
    """The package's files on the stack, innermost first, neighbours once."""
    files: list[str] = []
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_PACKAGE) and files[-1:] != [name[len(_PACKAGE) :]]:
            files.append(name[len(_PACKAGE) :])
        frame = frame.f_back
    return tuple(files)


@dataclass(frozen=True)
class Leg:
    """The files of one form, from the one that makes it to the one that makes the next."""

    form: str
    files: tuple[str, ...]


def walk(forms: Sequence[Form], order: Sequence[Sighting]) -> list[Leg]:
    """Of each form the first value that was made after that of the form before."""
    chain: list[Sighting] = []
    for number, form in enumerate(forms):
        later = [each for each in order if each.form == number and (not chain or each.number > chain[-1].number)]
        assert later, f"no {form.name} was met"
        chain.append(later[0])
    legs = [Leg(forms[each.form].name, _leg(each, after, order)) for each, after in pairwise(chain)]
    return [*legs, Leg(forms[-1].name, chain[-1].makers[:1])]


def _leg(value: Sighting, after: Sighting, order: Sequence[Sighting]) -> tuple[str, ...]:
    """From the making of `value` to that of the next form. A form may be made again of itself in between."""
    direct = _handed(value, after)
    if direct is not None:
        return direct
    for other in reversed(order[value.number + 1 : after.number]):
        if other.form == value.form and (first := _handed(value, other)) and (second := _handed(other, after)):
            return (*first, *second)
    return (*value.path_to(value.last), after.makers[0])


def _handed(value: Sighting, after: Sighting) -> tuple[str, ...] | None:
    """To the nearest file on the stack of the next one's making that has the value, then down that stack."""
    for place, file in enumerate(after.makers):
        if file in value.sources:
            return (*value.path_to(file), *reversed(after.makers[:place]))
    return None


def files_of(legs: Sequence[Leg]) -> list[str]:
    return list(dict.fromkeys(file for leg in legs for file in leg.files))


def makers_of(legs: Sequence[Leg]) -> list[str]:
    """The files that change the form of what is on the walk; the others hand it on."""
    return list(dict.fromkeys(leg.files[0] for leg in legs))


def counted(name: str, legs: Sequence[Leg]) -> str:
    return f"{name}: {len(files_of(legs))} files, of which {len(makers_of(legs))} change the form"


def walks() -> dict[str, list[Leg]]:
    """Of a chat request, of the turn after it, whose prompt extends it, and of one after a restart."""
    with tempfile.TemporaryDirectory() as folder:
        found, messages = _walks(folder)
        with _served(folder) as (client, traced), traced(RESTORED_TURN) as order:
            _ask(client, messages)
            assert client.get("/v1/status").json()["cache"]["disk"]["hits"], "nothing was read from disk"
    found["turn after a restart"] = walk(RESTORED_TURN, order)
    return found


def _walks(folder: str) -> tuple[dict[str, list[Leg]], list[dict[str, str]]]:
    """The walks of the first process, and the messages of a next turn."""
    found = {}
    with _served(folder) as (client, traced):
        question = [_user(_QUESTION)]
        with traced(CHAT) as order:
            reply, num_tokens = _ask(client, question)
        found["chat"] = walk(CHAT, order)
        eventually(lambda: _is_stored(client, num_tokens))
        eventually(lambda: _is_written(client, num_tokens))
        with traced(CACHED_TURN) as order:
            messages = [*question, {"role": "assistant", "content": reply}, _user("Again.")]
            _ask(client, messages)
        assert client.get("/v1/status").json()["cache"]["hits"], "the second turn found nothing"
        found["cached turn"] = walk(CACHED_TURN, order)
    return found, messages


@contextmanager
def _served(folder: str) -> Iterator[tuple[httpx.Client, Any]]:
    """A server whose threads are all watched, where a block asks for it."""
    watch: list[Tracer] = []
    failures: list[Exception] = []

    def observe(frame: FrameType, event: str, value: Any) -> None:
        try:
            for tracer in watch:
                tracer.observe(frame, event, value)
        except Exception as error:  # it would be raised in the watched code, and end the watching
            failures.append(error)

    @contextmanager
    def traced(forms: Sequence[Form]) -> Iterator[list[Sighting]]:
        watch.append(Tracer(forms))
        yield watch[0].order
        watch.clear()
        assert not failures, failures

    config = EngineConfig(
        model="demo", max_model_len=2048, memory_budget_bytes=2 << 30, text_only=True, cache_dir=folder
    )
    threading.setprofile(observe)
    try:
        with serving(start_engine(config, open_disk(config))) as running, running.http() as client:
            yield client, traced
    finally:
        threading.setprofile(None)


def _is_stored(client: httpx.Client, num_tokens: int) -> bool:
    """Whether a prompt of so many tokens can be resumed a token before its end."""
    return _can_resume(client.get("/v1/cache").json()["data"], num_tokens)


def _is_written(client: httpx.Client, num_tokens: int) -> bool:
    """Whether it can after a restart, and nothing waits to be written to disk any more, which would be traced too."""
    seen = client.get("/v1/cache").json()
    return _can_resume(seen["disk"], num_tokens) and not seen["cache"]["disk"]["num_waiting_bytes"]


def _can_resume(entries: Sequence[Mapping[str, Any]], num_tokens: int) -> bool:
    return any(entry["end"] >= num_tokens - 1 and entry["state_bytes"] for entry in entries)


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _ask(client: httpx.Client, messages: list[dict[str, str]]) -> tuple[str, int]:
    """Ask for a streamed reply of one token, since several may come together. Its text, and the prompt's length."""
    body = {"messages": messages, "stream": True, "temperature": 0, "max_tokens": 1}
    answer = client.post("/v1/chat/completions", json={**body, "stream_options": {"include_usage": True}})
    assert answer.status_code == 200 and "[DONE]" in answer.text
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    texts = [choice["delta"].get("content") or "" for event in events for choice in event["choices"]]
    return "".join(texts), events[-1]["usage"]["prompt_tokens"]


def table(legs: Sequence[Leg]) -> str:
    lines = ["| form | made in | on its way to the file that makes the next |", "| --- | --- | --- |"]
    for leg in legs:
        made, *through = (f"`{file}`" for file in dict.fromkeys(leg.files))
        lines.append(f"| {leg.form} | {made} | {', '.join(through)} |")
    return "\n".join(lines)


def render(page: str, found: Mapping[str, Sequence[Leg]]) -> str:
    """The page with each `<!-- walk: NAME -->` table as it was traced. A name that was not traced is a KeyError."""
    block = re.compile(r"(<!-- walk: ([\w ]+) -->\n).*?(\n<!-- end -->)", re.DOTALL)
    return block.sub(lambda match: match[1] + table(found[match[2]]) + match[3], page)


if __name__ == "__main__":
    found = walks()
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")
    for name, legs in found.items():
        print(f"{counted(name, legs)}\n{table(legs)}\n")
