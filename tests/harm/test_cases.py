"""Attacks are drawn again by their number, and are JSON but where they mean not to be."""

import json

import pytest

from tests.server.fakes import FakeEngine
from tests.support.harm.cases import Drawing
from tests.support.harm.fields import Document
from tests.support.harm.protocols import PROTOCOLS
from tests.support.harm.values import Raw, dumps
from tests.support.running import named
from vllm_mlx.server.app import create_app
from vllm_mlx.server.config import ServerConfig


@pytest.fixture(scope="module")
def document() -> Document:
    return Document(create_app(FakeEngine(), ServerConfig(models=named("tiny"))).openapi())


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_number_draws_the_same_attack_again(document: Document, protocol: str) -> None:
    drawings = [Drawing(protocol, document, most_bytes=20_000, is_huge=False) for _ in range(2)]
    first, second = ([drawing.draw(seed) for seed in range(60)] for drawing in drawings)
    assert first == second
    assert len({case.kind for case in first}) > 30


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_smaller_scale_draws_a_smaller_attack_of_the_same_kind(document: Document, protocol: str) -> None:
    drawing = Drawing(protocol, document, most_bytes=20_000, is_huge=False)
    for seed in range(30):
        whole, smaller = drawing.draw(seed), drawing.draw(seed, 1 / 4)
        assert smaller.attack.path == whole.attack.path
        assert smaller.attack.num_bytes <= 1.2 * whole.attack.num_bytes
        assert smaller.repeat == f"{whole.repeat} --scale 0.25"


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("num_bytes", [100, 5_000, 300_000])
def test_a_benign_request_is_about_as_large_as_the_attack(protocol: str, num_bytes: int) -> None:
    found = len(dumps(PROTOCOLS[protocol].conversation(num_bytes)))
    assert num_bytes / 2 < found < 1.2 * num_bytes + 2_500


def test_raw_parts_stand_in_a_body_as_they_are() -> None:
    body = {"a": [Raw("1e999"), Raw('{"b":1,"b":2}')], "c": "\ud83d"}
    assert dumps(body) == b'{"a":[1e999,{"b":1,"b":2}],"c":"\\ud83d"}'
    assert json.loads(dumps({"a": Raw("[0,0]")})) == {"a": [0, 0]}
