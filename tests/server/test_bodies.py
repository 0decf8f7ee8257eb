"""What a body may hold, how it is read, and what of it runs beside the event loop."""

import gc
import json
import math
import re
import tracemalloc
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi.exceptions import RequestValidationError
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from tests.support.running import Running, serving
from vllm_mlx.api.anthropic.schema import MessagesBody
from vllm_mlx.api.error_replies import describe
from vllm_mlx.api.openai.schema import ChatCompletionBody, CompletionBody, TextContent
from vllm_mlx.api.responses.schema import ResponsesBody
from vllm_mlx.api.text import well_formed
from vllm_mlx.api.wire import Items, UnknownFields
from vllm_mlx.core.errors import InvalidParameter
from vllm_mlx.core.events import Started, TextDelta
from vllm_mlx.core.messages import TextPart
from vllm_mlx.core.request import RequestLimits
from vllm_mlx.server import json_bytes
from vllm_mlx.server.bodies import _read
from vllm_mlx.server.json_bytes import LARGE_BYTES, MAX_PARTS, MAX_TEXT_BYTES, MAX_VALUES, read_json
from vllm_mlx.util.json_values import with_texts

from .fakes import FakeEngine, Pause, finished

PADDING = " " * LARGE_BYTES
MESSAGES = [{"role": "user", "content": "Hi."}]
texts = st.text(st.characters(codec=None)) | st.text('\\"nu,[{\ud83d\ude42d83')
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda values: st.lists(values, max_size=4) | st.dictionaries(texts, values, max_size=4),
    max_leaves=20,
)


@pytest.fixture
def http(server: Running) -> Iterator[httpx.Client]:
    with server.http(headers={"content-type": "application/json"}) as client:
        yield client


@given(JSON)
def test_json_is_read_with_half_a_surrogate_pair_replaced(value: Any) -> None:
    body = json.dumps(value)
    assert repr(read_json(body.encode())) == repr(with_texts(json.loads(body), well_formed))


@pytest.mark.parametrize(
    ("body", "value"),
    [
        (b"[1" + b"0" * 100 + b"]", [10**100]),
        (b"[1e400, -1e400, 1.5e-320, 0.1]", [math.inf, -math.inf, 1.5e-320, 0.1]),
        (b'{"a": 1, "a": 2}', {"a": 2}),
        ("\ufeff[1]".encode(), [1]),
        (b'["\\ud83d", "\\ud83d\\ude42", "\\\\ud83d", "\\ude42\\ud83d"]', ["\ufffd", "🙂", "\\ud83d", "\ufffd\ufffd"]),
        (b'{"\\uD83D": "\\ud83d\\ud83d\\ude42"}', {"\ufffd": "\ufffd🙂"}),
    ],
)
def test_odd_json_is_read(body: bytes, value: Any) -> None:
    assert read_json(body) == value


def test_not_a_number_is_read() -> None:
    assert math.isnan(read_json(b"NaN"))


@pytest.mark.parametrize(
    "body",
    ['{"messages": [', "[1,]", "{'a': 1}", '"\t"', "", "\x00", '{"a" 1}', "01", "nul", "1" * 5000, "[1]\0", '"\xed"'],
)
def test_text_that_is_not_json_is_refused(http: httpx.Client, body: str) -> None:
    for content in (body, PADDING + body + PADDING):
        answer = http.post("/v1/chat/completions", content=content.encode("latin-1"))
        assert answer.status_code == 400
        assert not content or "not valid JSON" in answer.json()["error"]["message"]


@given(JSON)
def test_elements_are_counted_exactly(value: Any) -> None:
    body = json.dumps(value).encode()
    outside = re.sub(rb'"(?:[^"\\]|\\.)*"', b"", body)
    num_parts = outside.count(b"[") + outside.count(b"{") + len(re.findall(rb'"(?:[^"\\]|\\.)*"', body))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_bytes, "MAX_PARTS", num_parts)
        read_json(body)
        patch.setattr(json_bytes, "MAX_PARTS", num_parts - 1)
        with pytest.raises(InvalidParameter):
            read_json(body)


ITEM = '{"type":"text","text":""}'
TOO_MANY = {
    "blocks": '{"messages":[{"role":"user","content":[' + ",".join([ITEM] * (MAX_PARTS // 5)) + "]}]}",
    "objects": '{"messages":[],"metadata":[' + ",".join(["{}"] * MAX_PARTS) + "]}",
    "lists": '{"messages":[' + "[]," * MAX_PARTS + "0]}",
    "texts": '{"prompt":[' + '"",' * MAX_PARTS + '""]}',
    "names": '{"prompt":{' + '"a":0,' * MAX_PARTS + '"a":0}}',
    "numbers": '{"prompt":[' + "0," * MAX_VALUES + "0]}",
}


@pytest.mark.parametrize("body", TOO_MANY.values(), ids=TOO_MANY)
def test_too_many_elements_are_refused_before_they_are_parsed(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_bytes, "from_json", None)
    with pytest.raises(
        InvalidParameter, match=f"more than {MAX_PARTS} objects, lists, texts .* more than {MAX_VALUES} values"
    ):
        read_json(body.encode())


LONG_TEXTS = {
    "escapes": "\\n" * (MAX_TEXT_BYTES // 2 + 2**15),
    "backslashes": "\\\\" * (MAX_TEXT_BYTES // 2 + 2**15),
    "letters": "é" * (MAX_TEXT_BYTES // 2 + 1),
    "one letter beyond ASCII": "a" * MAX_TEXT_BYTES + "é",
    "half a surrogate pair": "a" * MAX_TEXT_BYTES + "\\ud83d",
    "one letter beyond ASCII, between quotes": ("a" * 60_000 + '\\"') * (MAX_TEXT_BYTES // 60_000 + 1) + "é",
}


@pytest.mark.parametrize("text", LONG_TEXTS.values(), ids=LONG_TEXTS)
def test_text_that_takes_the_parser_long_is_bounded(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_bytes, "from_json", None)
    with pytest.raises(InvalidParameter, match=f"{MAX_TEXT_BYTES} bytes of text"):
        read_json(f'["{text}"]'.encode())


def test_long_images_beside_texts_are_taken() -> None:
    image = (
        "data:image/png;base64,"
        + "A\\/AAAAA\\u002BAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA" * 10_000
        + "A" * MAX_TEXT_BYTES
    )
    assert len(read_json(f'["é, \\"", "{image}", "é"]'.encode())) == 3


def test_long_texts_full_of_punctuation_are_taken() -> None:
    prose = 'Well, [sic] {so}, "quoted", and so on, ' * 100_000
    assert read_json(json.dumps([prose]).encode()) == [prose]


def test_a_million_token_ids_are_taken() -> None:
    ids = [7] * 1_000_000
    assert CompletionBody.model_validate(read_json(json.dumps({"prompt": ids}).encode())).prompt == ids


def test_the_bound_is_named_over_http(http: httpx.Client) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"):
        refused = http.post(path, content=TOO_MANY["lists"])
        assert refused.status_code == 400 and str(MAX_PARTS) in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("wire", "body", "names"),
    [
        (ChatCompletionBody, {"messages": [0] * 9_000}, "`messages[0]`"),
        (ChatCompletionBody, {"messages": [{"role": "user", "content": [0] * 9_000}]}, "`messages[0].content[0]`"),
        (ChatCompletionBody, {"messages": MESSAGES, "tools": [0] * 9_000}, "`tools[0]`"),
        (ChatCompletionBody, {"messages": MESSAGES, "logit_bias": dict.fromkeys(map(str, range(9_000)), "")}, "300"),
        (CompletionBody, {"prompt": [{}] * 900}, "`prompt[0]`"),
        (CompletionBody, {"prompt": [1] * 900 + [{}] * 900}, "`prompt[0]`"),
        (MessagesBody, {"max_tokens": 1, "messages": [0] * 9_000}, "`messages[0]`"),
        (ResponsesBody, {"input": [0] * 9_000}, "`input[0]"),
        (ResponsesBody, {"input": "a", "metadata": dict.fromkeys(map(str, range(9_000)), 0)}, "16"),
    ],
)
def test_only_the_first_wrong_element_is_described(wire: Any, body: Any, names: str) -> None:
    with pytest.raises(RequestValidationError) as refused:
        _read(json.dumps(body).encode(), TypeAdapter(wire), RequestLimits(), UnknownFields())
    errors = [{**each, "loc": each["loc"][1:]} for each in refused.value.errors()]
    assert len(errors) <= 8
    assert names in describe(errors, body).message


def test_messages_are_counted_before_they_are_validated(http: httpx.Client) -> None:
    refused = http.post("/v1/chat/completions", content=json.dumps({"messages": [0] * 10_001}))
    assert "--max-messages" in refused.json()["error"]["message"]


def test_prompts_are_counted_before_they_are_validated(http: httpx.Client) -> None:
    refused = http.post("/v1/completions", content=json.dumps({"prompt": [{}, *[""] * 5_000]}))
    assert refused.status_code == 400
    refused = http.post("/v1/completions", content=json.dumps({"prompt": [""] * 5_000}))
    assert "--max-choices" in refused.json()["error"]["message"]


def test_other_threads_run_between_the_items_of_a_list() -> None:
    """The list is read by Python code, which gives the interpreter's lock away."""
    seen = []
    adapter: TypeAdapter[Any] = TypeAdapter(Items[int])

    class Telling(list):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[Any]:
            for item in super().__iter__():
                seen.append(item)
                yield item

    assert adapter.validate_python(Telling([1, 2, 3])) == [1, 2, 3] == seen
    with pytest.raises(ValidationError):
        adapter.validate_python(Telling(["a", 2, 3]))
    assert 3 not in seen[3:], "it stops at what is wrong"


def test_no_other_json_becomes_a_list() -> None:
    for value in ({"a": 1}, "ab", 1, None):
        with pytest.raises(ValidationError):
            TypeAdapter(Items[Any]).validate_python(value)


def test_long_and_short_bodies_make_the_same_request(server: Running, http: httpx.Client) -> None:
    for padding in ("", PADDING):
        body = json.dumps({"messages": [{"role": "user", "content": "Cut \ud83d off"}]})
        assert http.post("/v1/chat/completions", content=body + padding).status_code == 200
    first, second = server.engine.requests[-2:]
    assert first.messages == second.messages
    assert first.messages[0].parts == (TextPart("Cut \ufffd off"),)


def test_the_wire_types_of_a_request_are_gone_while_its_reply_runs() -> None:
    content = [{"type": "text", "text": PADDING}, {"type": "text", "text": "Hi."}]
    alive: list[int] = []

    def play(request: Any, index: int) -> Any:
        alive.append(sum(isinstance(each, TextContent) for each in gc.get_objects()))
        return (Started(7, 0), TextDelta("a"), finished())

    with serving(FakeEngine(play)) as running, running.http() as client:
        for stream in (False, True):
            body = {"messages": [{"role": "user", "content": content}], "stream": stream}
            assert client.post("/v1/chat/completions", json=body).status_code == 200
    assert alive == [0, 0]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_body_goes_once_it_is_decoded(is_streamed: bool) -> None:
    """While the reply is made, the decoded text is there once: 8 MB, and neither the bytes nor the wire type."""
    body = {"messages": [{"role": "user", "content": "h" * 8_000_000}], "max_tokens": 5, "stream": is_streamed}
    content, held = json.dumps(body).encode(), []

    def measured() -> bool:
        gc.collect()
        held.append(tracemalloc.get_traced_memory()[0])
        return True

    engine = FakeEngine(lambda _, __: (Started(1, 0), TextDelta("hello"), Pause(until=measured), finished()))
    with serving(engine, max_body_bytes=10_000_000) as server, server.http() as client:
        tracemalloc.start()
        try:
            del body
            reply = client.post("/v1/chat/completions", content=content, headers={"content-type": "application/json"})
        finally:
            tracemalloc.stop()
    assert reply.status_code == 200, reply.text
    assert 7_000_000 < held[-1] < 12_000_000
