"""Fetching from hosts that are well, slow, endless, lying or elsewhere."""

import asyncio
import gzip
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_mlx.core.config import MediaConfig
from vllm_mlx.core.errors import InvalidImage
from vllm_mlx.media.fetch import MediaFetcher

from .hosts import HERE, Host, Names, drip, host, image, redirect, reply, web

OK = b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\n"
TLS = Path(__file__).parent / "tls"  # a key and a certificate of its own for pictures.test, good until 2126


@pytest.fixture(scope="module")
def server() -> Iterator[Host]:
    with host() as running:
        yield running


@pytest.fixture
def pictures(server: Host) -> Host:
    server.routes.clear()
    server.requests.clear()
    return server


def names(**leads: str | list[str]) -> Names:
    return Names({"pictures.test": HERE, "other.test": HERE, "inside.test": "10.0.0.7", **leads})


def fetch(fetcher: MediaFetcher, url: str, *, timeout_s: float = 5) -> bytes:
    async def run() -> bytes:
        async with asyncio.timeout(timeout_s):
            return await fetcher.fetch(url)

    return asyncio.run(run())


def refusal(fetcher: MediaFetcher, url: str) -> str:
    with pytest.raises(InvalidImage) as caught:
        fetch(fetcher, url)
    return caught.value.message


def test_an_image_is_fetched_under_its_own_name(pictures: Host) -> None:
    pictures.routes["/a.png?x=1"] = image(b"data")
    assert fetch(web(names()), pictures.url("/a.png?x=1#part")) == b"data"
    [head] = pictures.requests
    assert f"\r\nhost: pictures.test:{pictures.port}\r\n" in head.lower()
    assert "accept-encoding: identity" in head.lower() and "cookie" not in head.lower()


def test_redirects_are_followed_hop_by_hop(pictures: Host) -> None:
    pictures.routes |= {
        "/1": redirect("/2", "301 Moved Permanently", "Set-Cookie: a=b"),
        "/2": redirect(pictures.url("/3", "other.test"), "307 Temporary Redirect"),
        "/3": image(b"data"),
    }
    resolver = names()
    assert fetch(web(resolver), pictures.url("/1")) == b"data"
    assert resolver.asked == ["pictures.test", "pictures.test", "other.test"]
    assert not any("cookie" in head.lower() for head in pictures.requests)


@pytest.mark.parametrize(
    "location",
    ["http://inside.test/", "http://10.0.0.1/", "http://[::1]:1/", "//inside.test/a", "file:///etc/passwd",
     "data:image/png;base64,AAAA", "ftp://pictures.test/", "http://user:pw@pictures.test/", "http://\x7f/"],
)  # fmt: skip
def test_a_redirect_leads_nowhere_else_than_an_address_may(pictures: Host, location: str) -> None:
    pictures.routes["/r"] = redirect(location)
    refusal(web(names(**{"10.0.0.1": "10.0.0.1", "::1": "::1"})), pictures.url("/r"))
    assert pictures.paths() == ["/r"]


def test_redirects_end(pictures: Host) -> None:
    pictures.routes["/r"] = redirect("/r")
    assert "--max-media-redirects" in refusal(web(names(), max_media_redirects=2), pictures.url("/r"))
    assert len(pictures.requests) == 3


def test_a_name_is_looked_up_once_and_the_connection_goes_to_what_was_checked(pictures: Host) -> None:
    """Rebinding: a name whose second answer is another address gets no second question."""
    pictures.routes["/a"] = image(b"data")
    resolver = names(**{"turn.test": [HERE, "127.0.0.2"]})
    assert fetch(web(resolver), pictures.url("/a", "turn.test")) == b"data"
    assert resolver.asked == ["turn.test"]
    assert "not on the public internet" in refusal(web(resolver), pictures.url("/a", "turn.test"))
    assert len(pictures.requests) == 1


def test_a_name_that_also_leads_inside_is_refused(pictures: Host) -> None:
    for leads in (f"{HERE},10.0.0.1", f"10.0.0.1,{HERE}", ""):
        assert "public" in refusal(web(names(**{"both.test": leads})), pictures.url("/a", "both.test"))
    assert pictures.requests == []


def test_the_next_address_is_tried(pictures: Host) -> None:
    pictures.routes["/a"] = image(b"data")
    fetcher = MediaFetcher(MediaConfig(), resolve=names(**{"two.test": f"127.0.0.1,{HERE}"}), is_allowed=lambda _: True)
    assert fetch(fetcher, pictures.url("/a", "two.test")) == b"data"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://pictures.test:1/a", "no connection"),
        ("http://none.test/a", "no host none.test"),
        ("http://inside.test/a", "not on the public internet"),
        ("http://user@pictures.test/a", "user name"),
        ("http://user:password@pictures.test/a", "user name"),
        ("http:///a", "names no host"),
        ("http://pictures.test:0/a", "valid port"),
        ("http://pictures.test:99999/a", "valid port"),
        ("http://[::1/a", "valid URL"),
        ("http://pic tures.test/a", "no host"),
        ("http://a\x00b/a", "valid URL"),
        ("http://xn--a/", ""),
        ("http://" + "a" * 300 + ".test/", ""),
        ("http://pictures.test/" + "a" * 70_000, "valid URL"),
    ],
)
def test_addresses_that_cannot_be_asked(url: str, words: str) -> None:
    assert words in refusal(web(names()), url)


def test_private_addresses_are_asked_where_that_is_allowed(pictures: Host) -> None:
    pictures.routes["/a"] = image(b"data")
    assert fetch(MediaFetcher(MediaConfig(allow_private_media=True)), pictures.url("/a", HERE)) == b"data"
    assert "--allow-private-media" in refusal(MediaFetcher(MediaConfig()), pictures.url("/a", HERE))


def test_the_environment_sets_no_proxy(pictures: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    pictures.routes["/a"] = image(b"data")
    assert fetch(web(names()), pictures.url("/a")) == b"data"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (reply(b"", status="404 Not Found"), "status 404"),
        (reply(b"", status="500 Oops"), "status 500"),
        (reply(b"", status="206 Partial Content"), "status 206"),
        (reply(b"", status="304 Not Modified"), "status 304"),
        (reply(b"x", "Content-Type: text/html; charset=utf-8"), "`text/html`"),
        (reply(gzip.compress(bytes(10**7)), "Content-Type: image/png", "Content-Encoding: gzip"), "compressed"),
        (reply(b"", "Content-Type: image/png", length=10**12), "--max-image-bytes"),
        (reply(b"abc", "Content-Type: image/png", length=10), "closed the connection"),
        (drip(OK + b"\r\n", b"x" * 65536, pause_s=0), "--max-image-bytes"),
        (
            drip(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1000\r\n" + b"x" * 4096 + b"\r\n", pause_s=0),
            "--max-image",
        ),
        (drip(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"zz\r\n", pieces=1), "closed the connection"),
        (drip(b"SSH-2.0-server\r\n", b"", pieces=1), "does not answer as HTTP"),
        (drip(b"", b"", pieces=1), "does not answer as HTTP"),
        (drip(OK, b"X-Filler: " + b"x" * 1000 + b"\r\n", pause_s=0), "does not answer as HTTP"),
    ],
)
def test_answers_that_are_no_image(pictures: Host, answer: object, words: str) -> None:
    pictures.routes["/a"] = answer
    assert words in refusal(web(names(), max_image_bytes=100_000), pictures.url("/a"))


def test_the_kinds_of_content_are_a_setting(pictures: Host) -> None:
    pictures.routes |= {
        "/none": reply(b"data"),
        "/octets": reply(b"data", "Content-Type: Application/Octet-Stream"),
        "/html": reply(b"data", "Content-Type: text/html"),
    }
    for path in ("/none", "/octets"):
        assert fetch(web(names()), pictures.url(path)) == b"data"
    assert fetch(web(names(), media_content_type=("*",)), pictures.url("/html")) == b"data"


@pytest.mark.parametrize(
    "answer",
    [drip(OK, b"X: y\r\n"), drip(OK + b"\r\n", b"x"), drip(b"", b""), drip(OK + b"Content-Length: 9\r\n\r\n", b"", 9)],
)
def test_a_slow_answer_can_be_given_up_at_any_moment(pictures: Host, answer: object) -> None:
    pictures.routes["/a"] = answer
    with pytest.raises(TimeoutError):
        fetch(web(names()), pictures.url("/a"), timeout_s=0.2)


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_who_gives_up_leaves_no_connection_open(scheme: str) -> None:
    """Nor in the middle of a handshake that the host does not answer."""

    async def run(silent: Host) -> None:
        fetcher = web(names())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await fetcher.fetch(silent.url("/a").replace("http", scheme, 1))
        while silent.num_open:  # for ever, if it stays open
            await asyncio.sleep(0.01)

    with host() as silent:
        silent.routes["/a"] = drip(b"", b"", pieces=50)
        asyncio.run(run(silent))
        assert silent.num_open == 0


@pytest.fixture(scope="module")
def secure() -> Iterator[Host]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(TLS / "certificate.pem", TLS / "key.pem")
    with host(context) as running:
        yield running


def test_a_certificate_is_checked_for_the_name_and_not_for_the_address(secure: Host) -> None:
    secure.routes["/a"] = image(b"data")
    trusting = ssl.create_default_context(cafile=str(TLS / "certificate.pem"))
    good = secure.url("/a").replace("http:", "https:")
    assert fetch(web(names(), tls=trusting), good) == b"data"
    for name in ("other.test", HERE):
        wrong = secure.url("/a", name).replace("http:", "https:")
        assert "certificate" in refusal(web(names(**{HERE: HERE}), tls=trusting), wrong)
    assert "certificate" in refusal(web(names()), good), "nobody vouches for it"
