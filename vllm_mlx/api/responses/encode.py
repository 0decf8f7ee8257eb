"""Events → one response, streamed or complete. A streamed text costs one escape and one join."""

from collections.abc import Sequence
from json.encoder import encode_basestring as escape  # in C; leaves non-ASCII as it is

from pydantic_core import to_json

from ...core.errors import VLLMMLXError
from ...core.events import Finished, GenerationEvent, SearchDone, TextDelta, TokenLogprob
from ..blocks import BlockDelta, BlockEnd, BlockEvent, BlockSplitter, BlockStart
from ..openai.replies import ChatLogprobs, ContentLogprob
from ..replies import TokenNames
from . import replies


class ResponseStream:
    """The `StreamEncoder` of Responses. `reply` is the response after the last event.

    A response that is not streamed is the same one: `feed` for every event, then `finish`, or `fail`.
    """

    is_long = False  # a response is kept where it ends, so `finish` does not run on another thread

    def __init__(self, spec: replies.ResponseSpec, names: TokenNames | None = None) -> None:
        """Begin a stream. `names`: of the tokens, if the reply has log-probabilities."""
        self._spec = spec
        self._names = names
        self._new_logprobs: list[ContentLogprob] = []  # of text that is not sent yet
        self._logprobs: list[ContentLogprob] = []  # of the open part
        self._blocks = BlockSplitter()
        self._searches: dict[str, BlockEnd] = {}  # calls whose results are awaited, by their ids
        self._num_events = 0
        self._items: dict[int, replies.OutputItem] = {}  # complete ones, by their place in the output
        self._place = ""  # fields that say which item and part a delta belongs to
        self._summary_place = ""
        self._shows_arguments = True
        self.reply = replies.response(spec, "in_progress")

    def open(self) -> bytes:
        return self._response("created") + self._response("in_progress")

    def keep_alive(self) -> bytes:
        self.reply = replies.response(self._spec, "in_progress", self._output)
        return self._response("in_progress")

    def feed(self, index: int, event: GenerationEvent) -> bytes:
        searched = self._searched(event) if isinstance(event, SearchDone) else b""
        if isinstance(event, TextDelta):
            self._new_logprobs += _named(event.logprobs, self._names)
        status: replies.ItemStatus = replies.final_status(event) if isinstance(event, Finished) else "completed"
        wire = searched + b"".join([self._block(block, status) for block in self._blocks.feed(event)])
        if isinstance(event, Finished):
            wire += self._unsearched(status)
            self.reply = replies.response(self._spec, replies.final_status(event), self._output, end=event)
        return wire

    @property
    def _output(self) -> list[replies.OutputItem]:
        return [self._items[index] for index in sorted(self._items)]

    def close(self) -> bytes:
        return self._response(self.reply.status)

    def finish(self) -> bytes:
        """Return the complete response, in place of a stream's end."""
        return self.reply.to_json().encode()

    def fail(self, error: VLLMMLXError) -> bytes:
        """End the open items first, so that the failed response keeps its text. A cut call has no end."""
        wire = b"".join([self._block(block, "incomplete") for block in self._blocks.close()])
        wire += self._unsearched("incomplete")
        self.reply = replies.response(self._spec, "failed", self._output, error=error)
        return wire + self._response("failed")

    def _response(self, name: str) -> bytes:
        return self._event(name, f'"response":{self.reply.to_json()}')

    def _event(self, name: str, fields: str) -> bytes:
        data = f'{{"type":"response.{name}","sequence_number":{self._num_events},{fields}}}'
        self._num_events += 1
        return f"event: response.{name}\ndata: {data}\n\n".encode()

    def _block(self, event: BlockEvent, status: replies.ItemStatus) -> bytes:
        if isinstance(event, BlockDelta):
            return self._delta(event)
        return self._start(event) if isinstance(event, BlockStart) else self._end(event, status)

    def _delta(self, event: BlockDelta) -> bytes:
        delta = f'"delta":{escape(event.text)}'
        match event.kind:
            case "text":
                new, self._new_logprobs = self._new_logprobs, []
                self._logprobs += new
                logprobs = to_json(new).decode() if new else "[]"
                return self._event("output_text.delta", f'{self._place},{delta},"logprobs":{logprobs}')
            case "call" if not self._shows_arguments:
                return b""  # they are shown in another form when they are complete
            case "call":
                return self._event("function_call_arguments.delta", f"{self._place},{delta}")
            case _:
                wire = self._event("reasoning_text.delta", f"{self._place},{delta}")
                if self._spec.shows_summary:
                    wire += self._event("reasoning_summary_text.delta", f"{self._summary_place},{delta}")
                return wire

    def _start(self, event: BlockStart) -> bytes:
        started = replies.item(self._spec, event, "in_progress")
        wire = self._item("added", event.index, started)
        if event.search is not None:
            return wire
        place = f'"item_id":"{started.id}","output_index":{event.index}'
        self._summary_place = f'{place},"summary_index":0'
        self._shows_arguments = isinstance(started, replies.FunctionCall)
        self._place = place if event.kind == "call" else f'{place},"content_index":0'
        match started:
            case replies.OutputMessage():
                return wire + self._part("added", replies.OutputText.of(""))
            case replies.Reasoning():
                if self._spec.shows_summary:
                    wire += self._summary("added", "")
                return wire + self._part("added", replies.ReasoningText(text=""))
            case replies.FunctionCall() | replies.CustomCall():
                return wire
            case replies.WebSearchCall():
                return wire + self._event("web_search_call.in_progress", place)

    def _searched(self, found: SearchDone) -> bytes:
        """End the item of a search, which stays open while the search runs."""
        if (call := self._searches.pop(found.call_id, None)) is None:
            return b""
        ended = replies.item(self._spec, call, "completed", found)
        place = f'"item_id":"{ended.id}","output_index":{call.index}'
        return self._event("web_search_call.completed", place) + self._ended(call.index, ended)

    def _unsearched(self, status: replies.ItemStatus) -> bytes:
        """End the items of searches that did not run before the reply ended."""
        items = {call.index: replies.item(self._spec, call, status) for call in self._searches.values()}
        return b"".join([self._ended(index, item) for index, item in items.items()])

    def _end(self, event: BlockEnd, status: replies.ItemStatus) -> bytes:
        if event.is_broken and not self._spec.stream:
            return b""  # its text follows as content
        if event.call is not None and replies.is_search(self._spec, event.call):
            self._searches[event.call.call_id] = event
            return self._event("web_search_call.searching", self._place)
        if event.kind == "text" and not self._spec.stream:  # tokens without text, which no delta could carry
            self._logprobs, self._new_logprobs = self._logprobs + self._new_logprobs, []
        logprobs, self._logprobs = self._logprobs, []
        status = "incomplete" if event.is_broken else status
        ended = replies.item(self._spec, event, status, logprobs=logprobs)
        if event.call is not None and status == "incomplete":
            self._items[event.index] = ended
            return b""  # Codex runs each call whose item has ended, even an incomplete one
        end_of_part = b"" if event.search is not None else self._end_of_part(ended)
        return end_of_part + self._ended(event.index, ended)

    def _ended(self, index: int, item: replies.OutputItem) -> bytes:
        self._items[index] = item
        return self._item("done", index, item)

    def _end_of_part(self, ended: replies.OutputItem) -> bytes:
        match ended:
            case replies.OutputMessage(content=[part]):
                logprobs = to_json(part.logprobs).decode()
                fields = f'{self._place},"text":{escape(part.text)},"logprobs":{logprobs}'
                return self._event("output_text.done", fields) + self._part("done", part)
            case replies.Reasoning(content=[part]):
                text = f'"text":{escape(part.text)}'
                wire = self._event("reasoning_text.done", f"{self._place},{text}") + self._part("done", part)
                if self._spec.shows_summary:
                    wire += self._event("reasoning_summary_text.done", f"{self._summary_place},{text}")
                    wire += self._summary("done", part.text)
                return wire
            case replies.FunctionCall():
                fields = f'{self._place},"name":{escape(ended.name)},"arguments":{escape(ended.arguments)}'
                return self._event("function_call_arguments.done", fields)
            case replies.CustomCall():
                text, event = escape(ended.input), "custom_tool_call_input"
                wire = self._event(f"{event}.delta", f'{self._place},"delta":{text}')
                return wire + self._event(f"{event}.done", f'{self._place},"input":{text}')
            case _:
                raise AssertionError("a completed item has one part")

    def _item(self, what: str, index: int, item: replies.OutputItem) -> bytes:
        return self._event(f"output_item.{what}", f'"output_index":{index},"item":{item.to_json()}')

    def _part(self, what: str, part: replies.OutputText | replies.ReasoningText) -> bytes:
        return self._event(f"content_part.{what}", f'{self._place},"part":{part.to_json()}')

    def _summary(self, what: str, text: str) -> bytes:
        part = replies.SummaryText(text=text).to_json()
        return self._event(f"reasoning_summary_part.{what}", f'{self._summary_place},"part":{part}')


def _named(tokens: Sequence[TokenLogprob], names: TokenNames | None) -> list[ContentLogprob]:
    return [] if names is None or not tokens else ChatLogprobs.of(tokens, names).content
