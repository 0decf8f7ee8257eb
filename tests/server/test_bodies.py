"""A long body is read as a short one is, whichever parser reads it."""

import json
import math
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_mlx.server.bodies import LARGE_BYTES, parse

from .fakes import FakeEngine
from .running import serving

PADDING = " " * LARGE_BYTES
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec=None)),
    lambda values: st.lists(values, max_size=4) | st.dictionaries(st.text(), values, max_size=4),
    max_leaves=20,
)


@given(JSON, st.booleans())
def test_long_and_short_bodies_say_the_same(value: Any, ascii_only: bool) -> None:
    try:
        body = json.dumps(value, ensure_ascii=ascii_only).encode()
    except UnicodeEncodeError:  # a lone surrogate is JSON only as an escape
        body = json.dumps(value).encode()
    assert repr(parse(body + PADDING.encode())) == repr(parse(body)) == repr(json.loads(body))


@pytest.mark.parametrize(
    "body",
    [
        b"[1" + b"0" * 100 + b"]",
        b"[1e400, -1e400, 1.5e-320, 0.1]",
        b'{"a": 1, "a": 2}',
        "\ufeff[1]".encode(),
        "[1]".encode("utf-16"),
        b"[" * 300 + b"]" * 300,
        b'["\\ud83d", "\\ud83d\\ude42"]',
    ],
)
def test_what_is_odd_is_read_alike(body: bytes) -> None:
    space = PADDING.encode("utf-16")[2:] if body.startswith(b"\xff\xfe") else PADDING.encode()
    assert parse(body + space) == parse(body)


def test_what_is_no_number_is_read_alike() -> None:
    assert all(map(math.isnan, [parse(b"NaN" + PADDING.encode()), parse(b"NaN")]))


@pytest.mark.parametrize("body", ['{"messages": [', "[1,]", "{'a': 1}", '"\t"', "", "\x00", '{"a" 1}', "01", "nul"])
def test_what_is_no_json_is_told_alike(body: str) -> None:
    refusals = set()
    with serving(FakeEngine()) as running, running.http(headers={"content-type": "application/json"}) as http:
        for content in (body, PADDING + body + PADDING):
            answer: httpx.Response = http.post("/v1/chat/completions", content=content)
            assert answer.status_code == 400
            refusals.add(answer.json()["error"]["message"])
    assert len(refusals) == 1 or not body
