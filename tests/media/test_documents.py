"""Documents become texts and images: within bounds whatever they hold, and the same ones each time."""

import asyncio
import base64
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.support.rows import cases
from vllm_mlx.core.config import MediaConfig
from vllm_mlx.core.errors import Cancelled, InvalidDocument, TimeLimit
from vllm_mlx.core.messages import DocumentPart, ImagePart, TextPart
from vllm_mlx.media.documents import DocumentFile, DocumentReader, DocumentRefusal, DocumentText, ReadDocument
from vllm_mlx.media.loader import MediaLoader
from vllm_mlx.media.processes import Processes
from vllm_mlx.media.sources import MediaRoot
from vllm_mlx.util.tasks import Deadline

from .hosts import HERE, Names, host, reply, web
from .pdf_samples import drawn, encrypted, filled_in, hostile, pdf, show

HELLO = pdf(show("Hello"), show("World"))
FOREVER = "forms that draw forms"


class Reading:
    """A loader as requests use it."""

    def __init__(self, *, takes_images: bool = False, **config: Any) -> None:
        settings = MediaConfig(**config)
        self.loader = MediaLoader(
            settings,
            MediaRoot(settings.media_root),
            fetcher=web(Names({"papers.test": HERE}), **config),
            takes_images=takes_images,
        )

    def __call__(self, source: str | bytes, **options: Any) -> ReadDocument:
        part = DocumentPart(source)
        return asyncio.run(self.loader.read([part], **options))[part]

    def text(self, source: str | bytes) -> str:
        read = self(source)
        assert isinstance(read, DocumentText)
        return "".join(part.text if isinstance(part, TextPart) else "<image>" for part in read.parts)

    def refusal(self, source: str | bytes) -> str:
        read = self(source)
        assert isinstance(read, DocumentRefusal)
        return read.reason


@pytest.fixture
def make() -> Iterator[Any]:
    made: list[Reading] = []

    def reading(**config: Any) -> Reading:
        made.append(Reading(**config))
        return made[-1]

    yield reading
    for each in made:
        asyncio.run(each.loader.close())


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[asyncio.subprocess.Process]:
    """The processes that were started so far."""
    processes: list[asyncio.subprocess.Process] = []
    start = asyncio.create_subprocess_exec

    async def watched(*args: Any, **options: Any) -> asyncio.subprocess.Process:
        processes.append(await start(*args, **options))
        return processes[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", watched)
    return processes


def is_alive(process: asyncio.subprocess.Process) -> bool:
    try:
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_model_that_sees_gets_the_image_and_the_text_of_each_page(make: Any) -> None:
    pages = {"both": "<image>\nHello\n", "images": "<image>\n", "text": "Hello\n"}
    for mode, page in pages.items():
        assert (
            make(takes_images=True, document_pages=mode).text(pdf(show("Hello")))
            == f"[PDF of 1 page]\n\n[Page 1]\n{page}"
        )
    two = "[PDF of 2 pages]\n\n[Page 1]\nHello\n\n[Page 2]\nWorld\n"
    assert make().text(HELLO) == make(takes_images=True, max_images=0).text(HELLO) == two


def test_a_page_looks_as_it_was_drawn(make: Any) -> None:
    read = make(takes_images=True)(pdf(drawn(), box="0 0 200 400"))
    [image] = [part for part in read.parts if isinstance(part, ImagePart)]
    page = Image.open(io.BytesIO(image.source))
    assert page.height == pytest.approx(2 * page.width, abs=2) and 1_100_000 < page.width * page.height < 1_250_000
    upper, lower = (
        page.getpixel((page.width // 2, page.height // 4)),
        page.getpixel((page.width // 2, 3 * page.height // 4)),
    )
    assert min(upper) > 250 and lower[2] > 250 and max(lower[:2]) < 5


def test_what_was_filled_into_a_form_is_read(make: Any) -> None:
    assert make().text(filled_in("Name:", "Ada")) == "[PDF of 1 page]\n\n[Page 1]\nName:\nAda\n"


REFUSED = {
    "encrypted": (encrypted(), "password protected"),
    "cut": (HELLO[:60], "was not valid"),
    "only a header": (b"%PDF-1.7", "was not valid"),
    "no pages": (pdf(), "was not valid"),
    "many pages": (pdf(*[show("x")] * 4), "A maximum of 3 PDF pages may be provided (--max-document-pages)"),
    "much text": (pdf(show("x" * 60), show("y" * 60)), "more than 100 characters of text"),
    "only images": (pdf(drawn()), "have no text, and this model takes no images"),
    "empty": (b"", "it is empty"),
    "only a byte order mark": (b"\xef\xbb\xbf", "it is empty"),
    "long text": (b"x" * 101, "more than 100 characters of text"),
    "no text": (b"PK\x03\x04\x00\x00", "neither a PDF nor text"),
    "too many bytes": (b" " * 3001, "(--max-document-bytes)"),
    "no such file": ("/etc/passwd", "reads no files"),
    "bare base64": ("JVBERi0=", "data:application/pdf;base64,"),
}  # fmt: skip


@pytest.fixture(scope="module")
def narrow() -> Iterator[Reading]:
    reading = Reading(max_document_pages=3, max_document_chars=100, max_document_bytes=3000)
    yield reading
    asyncio.run(reading.loader.close())


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_said(narrow: Reading, name: str) -> None:
    source, words = REFUSED[name]
    assert words in narrow.refusal(source)


def test_images_of_pages_without_text_are_refused_where_the_setting_is_the_reason(make: Any) -> None:
    assert "--document-pages" in make(takes_images=True, document_pages="text").refusal(pdf(drawn()))


def test_every_kind_of_source_reads_the_same(make: Any, tmp_path: Path) -> None:
    (tmp_path / "a.pdf").write_bytes(HELLO)
    reading = make(media_root=str(tmp_path))
    with host() as running:
        running.routes |= {
            "/a.pdf": reply(HELLO, "Content-Type: application/pdf", "Cache-Control: max-age=60"),
            "/a.txt": reply(b"words", "Content-Type: text/plain; charset=utf-8"),
            "/a.html": reply(b"<p>", "Content-Type: text/html"),
        }
        url = running.url("/a.pdf", "papers.test")
        data = "data:application/pdf;base64," + base64.b64encode(HELLO).decode()
        texts = {reading.text(source) for source in (HELLO, data, url, url, str(tmp_path / "a.pdf"))}
        assert texts == {"[PDF of 2 pages]\n\n[Page 1]\nHello\n\n[Page 2]\nWorld\n"}
        assert running.paths() == ["/a.pdf"]
        assert reading.text(running.url("/a.txt", "papers.test")) == "words"
        assert "which is not allowed" in reading.refusal(running.url("/a.html", "papers.test"))


def test_text_is_text_in_any_of_its_encodings(make: Any) -> None:
    reading = make()
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        assert reading.text("naïve\r\ntext".encode(encoding)) == "naïve\ntext"


def test_the_same_bytes_are_read_once_for_one_salt(make: Any, started: list[Any]) -> None:
    reading = make(takes_images=True)
    first = reading(HELLO, salt="a")
    assert reading(HELLO, salt="a") is first and len(started) == 1
    again = reading(HELLO, salt="b")
    assert again == first and len(started) == 2, "read again, to the same bytes"
    damaged = reading(b"%PDF-1.7", salt="a")
    assert reading(b"%PDF-1.7", salt="a") is damaged and len(started) == 3


COSTLY = {FOREVER, "a form that draws itself", "endless path"}


@pytest.fixture(scope="module")
def samples() -> dict[str, bytes]:
    return hostile()


@pytest.mark.parametrize("name", cases(hostile(), [*COSTLY, *list(hostile())[::3]]))
def test_a_hostile_file_costs_no_more_than_its_limits(samples: dict[str, bytes], started: list[Any], name: str) -> None:
    config, max_memory_bytes = MediaConfig(max_document_s=0.5), 150 << 20

    async def read() -> ReadDocument:
        reader = DocumentReader(config, Processes(max_memory_bytes), takes_images=True)
        return await reader.read(DocumentFile(samples[name], max_chars=1000), Deadline(60, ""))

    before = sum(os.times()[2:4])
    found = asyncio.run(read())
    used_s = sum(os.times()[2:4]) - before
    assert used_s < 1.5 and not is_alive(started[0])
    if isinstance(found, DocumentRefusal):
        assert "(--max-document-s)" in found.reason or "memory" in found.reason or "was not valid" in found.reason
    else:
        assert found.num_bytes < 3_000_000
    if name in COSTLY:
        assert isinstance(found, DocumentRefusal) and ("-s)" in found.reason or "memory" in found.reason)


def test_a_process_ends_with_the_request_it_works_for(samples: dict[str, bytes], started: list[Any]) -> None:
    async def leave(how: str) -> None:
        reader = DocumentReader(MediaConfig(), Processes(1 << 40), takes_images=False)
        file, deadline = DocumentFile(samples[FOREVER], max_chars=1000), Deadline(60, "late")
        work = asyncio.create_task(reader.read(file, deadline))
        while not started:
            await asyncio.sleep(0.01)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    asyncio.run(leave("cancel"))
    assert not is_alive(started[0])


def test_the_deadline_of_a_request_ends_the_reading(make: Any, samples: dict[str, bytes], started: list[Any]) -> None:
    reading = make(max_document_s=50)
    with pytest.raises(TimeLimit, match="too late"):
        reading(samples[FOREVER], deadline=Deadline(0.5, "too late"))
    assert not is_alive(started[0])
    gone = Deadline(60, "")
    gone.cancel()
    with pytest.raises((Cancelled, TimeLimit)):
        reading(HELLO, deadline=gone)


def test_a_loader_that_closes_leaves_no_process(samples: dict[str, bytes], started: list[Any]) -> None:
    reading = Reading(max_document_s=50)

    async def close() -> None:
        work = asyncio.create_task(reading.loader.read([DocumentPart(samples[FOREVER])]))
        while not started:
            await asyncio.sleep(0.01)
        await reading.loader.close()
        with pytest.raises(Exception, match="shutting down"):
            await work

    asyncio.run(close())
    assert not is_alive(started[0])


def test_a_request_may_hold_so_many(make: Any) -> None:
    reading = make(max_documents=1)
    with pytest.raises(InvalidDocument, match="--limit-mm-per-prompt document=2"):
        asyncio.run(reading.loader.read([DocumentPart(b"a"), DocumentPart(b"b")]))
