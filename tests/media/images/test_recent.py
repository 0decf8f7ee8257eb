"""What is kept of the last turns, and for how long an address needs no asking."""

import numpy as np
import pytest

from vllm_mlx.media.images.freshness import HEURISTIC_S, fresh_s
from vllm_mlx.media.images.picture import Picture, Seen
from vllm_mlx.media.images.recent import KnownAddresses, RecentPictures
from vllm_mlx.media.images.web import Fetched


def gray(value: int) -> Picture:
    return Picture.of(np.full((2, 5, 3), value, np.uint8))


def test_pictures_stay_within_their_bytes_and_the_longest_unused_go() -> None:
    recent = RecentPictures(max_bytes=60)
    for number in range(2):
        recent.put(bytes([number]), gray(number))
    assert recent.get(b"\0") is not None
    recent.put(b"\2", gray(2))
    assert recent.num_bytes == 60
    assert [recent.get(bytes([number])) is not None for number in range(3)] == [True, False, True]
    recent.put(b"\3", Picture.of(np.zeros((9, 9, 3), np.uint8)))
    assert recent.get(b"\3") is None and recent.get(b"\0") is not None, "what never fits drops nothing"


def test_of_a_picture_whose_pixels_went_it_is_known_what_it_was() -> None:
    recent = RecentPictures(max_bytes=30)
    for number in range(2):
        recent.put(bytes([number]), gray(number))
    assert recent.get(b"\0") is None
    assert recent.get(b"\0", whole=False) == Seen(gray(0).digest, 10)
    assert isinstance(recent.get(b"\1", whole=False), Picture), "pixels that are there"
    assert recent.get(b"\2", whole=False) is None


def test_addresses_are_many_but_not_endless() -> None:
    known = KnownAddresses()
    answer = Fetched(data=b"data", url="u", fresh_s=5)
    known.put((b"", "first"), answer, b"", 10)
    known.put((b"", "second"), answer, b"", 10)
    for number in range(998):
        known.put((b"", f"http://{number}"), answer, b"", 10)
    first = known.get((b"", "first"))
    assert first is not None and first.fresh_until_s == 15 and first.answer.data is None
    known.put((b"", "last"), answer, b"", 10)
    assert known.get((b"", "first")) is not None and known.get((b"", "second")) is None


@pytest.mark.parametrize(("asked", "led_to"), [("u" * 9000, "u"), ("u", "u" * 9000)])
def test_an_address_that_is_far_too_long_is_not_kept(asked: str, led_to: str) -> None:
    known = KnownAddresses()
    known.put((b"", asked, ""), Fetched(data=b"data", url="u", fresh_s=5), b"", 10)
    known.put((b"", asked, ""), Fetched(data=b"data", url=led_to, fresh_s=5), b"", 10)
    assert known.get((b"", asked, "")) is None


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, HEURISTIC_S),
        ({"cache-control": "max-age=60"}, 60),
        ({"cache-control": "public, Max-Age=60, immutable"}, 60),
        ({"cache-control": 'max-age="60"'}, 60),
        ({"cache-control": "max-age=60", "age": "45"}, 15),
        ({"cache-control": "max-age=60", "age": "99"}, 0),
        ({"cache-control": "max-age=60, s-maxage=5"}, 5),
        ({"cache-control": "max-age=99999999999999999999"}, 86400),
        ({"cache-control": "max-age=60, no-cache"}, 0),
        ({"cache-control": "no-store"}, 0),
        ({"cache-control": "public"}, HEURISTIC_S),
        ({"cache-control": "max-age=x"}, HEURISTIC_S),
        ({"cache-control": "max-age=60", "vary": "*"}, 0),
        ({"cache-control": "max-age=60", "vary": "accept"}, 60),
        ({"expires": "0"}, 0),
        ({"pragma": "no-cache"}, 0),
    ],
)
def test_freshness(headers: dict[str, str], seconds: float) -> None:
    assert fresh_s(200, headers) == seconds


def test_what_moved_for_now_is_asked_again_unless_it_says_for_how_long() -> None:
    assert fresh_s(302, {}) == fresh_s(307, {}) == 0
    assert fresh_s(301, {}) == HEURISTIC_S
    assert fresh_s(302, {"cache-control": "max-age=9"}) == 9
