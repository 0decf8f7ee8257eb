"""Data URLs, as clients write them, and what is neither data nor an address."""

import base64
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_mlx.core.errors import InvalidImage
from vllm_mlx.media.sources import Inline, LocalFile, Remote, count_frames, label, parse_source, split_frames

DATA = bytes(range(256)) * 3
PLAIN = base64.b64encode(DATA).decode()


def read(source: str | bytes, max_bytes: int = 10**6) -> bytes:
    inline = parse_source(source)
    assert isinstance(inline, Inline)
    return inline.read(max_bytes)


@pytest.mark.parametrize(
    "source",
    [
        DATA,
        f"data:image/png;base64,{PLAIN}",
        f"DATA:image/png;BASE64,{PLAIN}",
        f"data:;base64,{PLAIN}",
        f"data:image/png;charset=x;base64,{PLAIN}",
        f"data:image/png;base64,{PLAIN.rstrip('=')}",
        f"data:image/png;base64, {PLAIN[:76]}\r\n{PLAIN[76:]}\n",
        "data:image/png;base64," + PLAIN.replace("+", "%2B").replace("/", "%2f").replace("=", "%3D"),
        "data:image/png;base64,%0A" + PLAIN.replace("+", "%2b").replace("=", "%3d%0d%20"),
        "data:image/png," + "".join(f"%{byte:02x}" for byte in DATA),
    ],
)
def test_every_way_to_write_data(source: str | bytes) -> None:
    assert read(source) == DATA


@given(st.binary(max_size=3000), st.booleans())
def test_what_was_written_is_read(data: bytes, padded: bool) -> None:
    text = base64.b64encode(data).decode()
    assert read("data:image/png;base64," + (text if padded else text.rstrip("="))) == data


def test_long_data_is_read_in_pieces() -> None:
    data = DATA * 5000
    assert read("data:image/png;base64," + base64.b64encode(data).decode(), 10**7) == data


@pytest.mark.parametrize(
    "text", ["!!!!", "AAA=A", "A", "AAAA====AAAA", "AA\x00A", "ÄÖÜß", "-_-_", f"{PLAIN[:8]}=={PLAIN}"]
)
def test_what_is_not_base64_is_refused(text: str) -> None:
    with pytest.raises(InvalidImage, match="base64"):
        read(f"data:image/png;base64,{text}")


def test_data_without_a_comma_is_refused() -> None:
    with pytest.raises(InvalidImage, match="comma"):
        read("data:image/png;base64" + "A" * 5000)


@pytest.mark.parametrize("source", [DATA, f"data:image/png;base64,{PLAIN}", "data:,%41%41%41" + "x" * 2000])
def test_too_much_data_is_refused(source: str | bytes) -> None:
    with pytest.raises(InvalidImage, match="--max-image-bytes"):
        read(source, 100)


def test_long_data_comes_as_base64() -> None:
    with pytest.raises(InvalidImage, match="without base64"):
        read("data:image/png," + "%41" * 400_000)


def test_escapes_that_hide_base64_are_no_base64() -> None:
    with pytest.raises(InvalidImage, match="not valid base64"):
        read("data:image/png;base64," + "%41" * 400_000)


def test_addresses_and_files() -> None:
    assert parse_source(" HTTPS://example.com/a ") == Remote("HTTPS://example.com/a")
    assert parse_source("file:///a%20b.png") == LocalFile("/a b.png")
    assert parse_source("file://localhost/a.png") == LocalFile("/a.png")
    assert parse_source("/a b.png") == LocalFile("/a b.png")
    with pytest.raises(InvalidImage, match="another machine"):
        parse_source("file://server/a.png")


@pytest.mark.parametrize("source", ["", "a.png", "../a.png", "~/a.png", "ftp://host/a.png", "javascript:1", PLAIN])
def test_what_is_none_of_these_is_refused(source: str) -> None:
    with pytest.raises(InvalidImage, match="base64,"):
        parse_source(source)


def test_errors_call_a_source_by_its_start() -> None:
    assert label(f"data:image/png;base64,{PLAIN}") == "data:image/png;base64,…"
    assert label(b"12345") == "5 bytes"
    assert len(label("https://example.com/" + "x" * 10**6)) < 100


def test_base64_between_white_space_takes_no_object_for_each_piece() -> None:
    """A long text of `AA AA AA` was once split at each space."""
    text = "data:image/png;base64," + "AA " * 600_000
    tracemalloc.start()
    try:
        assert len(read(text, 10**7)) == 900_000
        assert tracemalloc.get_traced_memory()[1] < 5 * len(text)
    finally:
        tracemalloc.stop()


def test_the_frames_of_a_video_are_counted_without_being_made() -> None:
    joined = "data:video/jpeg;base64,AAAA,BBBB"
    frames = split_frames(joined)
    assert frames == ("data:image/jpeg;base64,AAAA", "data:image/jpeg;base64,BBBB")
    assert count_frames(joined) == count_frames(frames) == 2
    assert count_frames("data:video/mp4;base64,AAAA") is None and count_frames(b",,") is None


@pytest.mark.parametrize("head", ["/", "file:///"])
def test_a_path_of_very_many_parts_is_refused_before_it_is_taken_apart(head: str) -> None:
    with pytest.raises(InvalidImage, match="longer than 16384 characters"):
        parse_source(head + "../" * 10_000)
