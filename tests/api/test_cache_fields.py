"""What a request says about the cache, in the words of each protocol."""

from collections.abc import Callable

import pytest
from pydantic import ValidationError

from tests.support.rows import row
from vllm_mlx.api.anthropic.decode import decode_count_request
from vllm_mlx.api.anthropic.schema import CountTokensBody
from vllm_mlx.core.request import Request

from .anthropic.bodies import HI
from .anthropic.bodies import decode as messages
from .bodies import chat, completion
from .responses.bodies import decode as response


@row("S1-5")
@pytest.mark.parametrize("decode", [chat, messages, response])
def test_reasoning_is_kept_cached_where_a_request_asks_for_it(decode: Callable[..., Request]) -> None:
    assert [decode(cache_reasoning_tokens=asked).keeps_reasoning for asked in (True, False, None)] == [
        True,
        False,
        None,
    ]
    assert decode().keeps_reasoning is None


@pytest.mark.parametrize("decode", [chat, completion, messages, response])
def test_a_salt_keeps_requests_apart(decode: Callable[..., Request]) -> None:
    assert (decode(cache_salt="mine").cache_salt, decode().cache_salt) == ("mine", "")


@pytest.mark.parametrize("decode", [chat, completion, messages, response])
def test_a_salt_is_no_place_for_megabytes(decode: Callable[..., Request]) -> None:
    assert len(decode(cache_salt="x" * 1024).cache_salt) == 1024
    with pytest.raises(ValidationError, match="cache_salt"):
        decode(cache_salt="x" * 1025)


def test_what_is_counted_has_the_salt_of_what_would_run() -> None:
    body = CountTokensBody.model_validate({"messages": HI, "cache_salt": "mine"})
    assert decode_count_request(body, request_id="r").request.cache_salt == "mine"
