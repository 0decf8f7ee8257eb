"""Documents become texts and images: files of text here, PDFs in processes of their own. Knows no conversation."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..core.config import MediaConfig
from ..core.errors import InvalidDocument, Overloaded, setting
from ..core.fair_queue import FairQueue
from ..core.messages import ImagePart, TextPart
from ..core.tasks import Deadline
from . import pdf_process as pdf

_PROCESSES = 3  # PDFs that are read at the same time
_PER_TENANT = 2  # so that nobody waits for one tenant's PDFs
_PAGE_PIXELS = 1_200_000  # a page's image, 110 dots an inch for a sheet of paper: 1,200 to 1,600 tokens
_MAX_MEMORY_BYTES = 1 << 30  # limit of one process
_MAX_IMAGES_BYTES = 128 << 20  # all pages of one PDF, encoded
_HEADER_BYTES = 1024  # a PDF may begin after this many other bytes: readers of PDFs accept that
_OBJECT_BYTES = 500
_RETRY_S = 5.0
_END_S = 1.0  # time for a process to end after its last frame
_KILLED = (-signal.SIGKILL, -signal.SIGTERM)  # exit statuses of a process that the system or a user ended

PagePart = TextPart | ImagePart


@dataclass(frozen=True, slots=True)
class DocumentText:
    """The contents of a document, which replace it in its message."""

    parts: tuple[PagePart, ...]

    @property
    def num_bytes(self) -> int:
        return sum(
            _OBJECT_BYTES + (4 * len(part.text) if isinstance(part, TextPart) else len(part.source))
            for part in self.parts
        )


@dataclass(frozen=True, slots=True)
class DocumentRefusal:
    """The reason why a document cannot be read: the end of the sentence "Document 1 of this request: …"."""

    reason: str
    num_bytes: int = field(default=_OBJECT_BYTES, init=False)


ReadDocument = DocumentText | DocumentRefusal


class DocumentFile:
    """The file of a document. `text` is its text, or None if it is a PDF."""

    def __init__(self, data: bytes, *, max_chars: int):
        """Raises InvalidDocument if it is neither, or its text is empty or too long."""
        self.data = data
        self.text = None if b"%PDF-" in data[:_HEADER_BYTES] else _decoded(data)
        if self.text == "":
            raise InvalidDocument("it is empty.")
        if self.text is not None and len(self.text) > max_chars:
            raise InvalidDocument(_too_much_text(max_chars))


def _decoded(data: bytes) -> str:
    is_wide = data.startswith((b"\xff\xfe", b"\xfe\xff"))
    try:
        text = data.decode("utf-16" if is_wide else "utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise InvalidDocument("it is neither a PDF nor text in UTF-8. Send a PDF, text, or images of its pages.")
    return text.replace("\r\n", "\n")


class DocumentReader:
    """Used on one event loop. The same bytes always become the same parts."""

    def __init__(self, config: MediaConfig, *, takes_images: bool, max_memory_bytes: int = _MAX_MEMORY_BYTES):
        """`takes_images`: whether the model does. `max_memory_bytes`: the limit of a process that reads a PDF."""
        self._config = config
        self._takes_images = takes_images
        self._limits = pdf.PdfLimits(
            pages=config.document_pages if takes_images and config.max_images else "text",
            page_pixels=_PAGE_PIXELS,
            max_pages=config.max_document_pages,
            max_chars=config.max_document_chars,
            max_s=config.max_document_s,
            max_memory_bytes=max_memory_bytes,
        )
        self._places = FairQueue(_PROCESSES, per_key=_PER_TENANT)

    async def read(self, file: DocumentFile, deadline: Deadline, tenant: str = "") -> ReadDocument:
        """Raises Overloaded if no process could read it, and what the deadline raises."""
        if file.text is not None:
            return DocumentText((TextPart(file.text),))
        async with self._places.hold(tenant, deadline):
            deadline.check()
            async with self._process() as process:
                feeding = asyncio.create_task(_feed(process, file.data))
                try:
                    return await self._pages(process)
                finally:
                    feeding.cancel()
                    await asyncio.gather(feeding, return_exceptions=True)

    @asynccontextmanager
    async def _process(self) -> AsyncIterator[asyncio.subprocess.Process]:
        """Start a process, which ends with the block. It inherits no environment, and no file that Python opened."""
        folders = [str(Path(__file__).parents[2]), *(str(Path(folder).absolute()) for folder in sys.path)]
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-S", "-P", "-m", pdf.__name__, json.dumps(asdict(self._limits))),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env={"PYTHONPATH": os.pathsep.join(folders)},
                close_fds=False,  # otherwise it would be forked, which takes long in a process as large as this one
            )
        except OSError as error:
            raise Overloaded(f"No process could be started to read a PDF: {error}.", retry_after_s=_RETRY_S) from error
        is_done = False
        try:
            yield process
            is_done = True
        finally:
            if not is_done:
                process.kill()
            await _end(process)

    async def _pages(self, process: asyncio.subprocess.Process) -> ReadDocument:
        assert process.stdout is not None
        pages: list[tuple[bytes | None, str]] = []
        image: bytes | None = None
        num_bytes = 0
        try:
            while True:
                kind, length = pdf.PDF_FRAME.unpack(await process.stdout.readexactly(pdf.PDF_FRAME.size))
                num_bytes += length
                if num_bytes > _MAX_IMAGES_BYTES + 4 * self._config.max_document_chars:
                    return DocumentRefusal("its pages are too large as images. Send fewer pages.")
                payload = await process.stdout.readexactly(length)
                match kind:
                    case pdf.IMAGE:
                        image = payload
                    case pdf.TEXT:
                        pages.append((image, payload.decode()))
                        image = None
                    case pdf.REFUSED:
                        return self._refusal(payload.decode())
                    case _:
                        return self._document(pages)
        except asyncio.IncompleteReadError:
            return self._failure(await process.wait())

    def _document(self, pages: list[tuple[bytes | None, str]]) -> ReadDocument:
        if not any(image is not None or text for image, text in pages):
            if self._takes_images:
                reason = f"this server reads the text of pages alone ({setting('document_pages')})"
            else:
                reason = "this model takes no images"
            return DocumentRefusal(f"its pages have no text, and {reason}. Send its text.")
        return DocumentText(tuple(_joined(_lines(pages))))

    def _refusal(self, reason: str) -> DocumentRefusal:
        """The message for a reason that the process gave. Clients look for the words of Anthropic's API in it."""
        match reason:
            case pdf.ENCRYPTED:
                words = "it is encrypted: The PDF specified is password protected. Send it without a password."
            case pdf.DAMAGED:
                words = "it is damaged: The PDF specified was not valid."
            case pdf.TOO_MUCH_TEXT:
                words = _too_much_text(self._config.max_document_chars)
            case num_pages:
                limit = f"A maximum of {self._config.max_document_pages} PDF pages may be provided"
                words = f"it has {num_pages} pages: {limit} ({setting('max_document_pages')}). Send a part of it."
        return DocumentRefusal(words)

    def _failure(self, status: int) -> DocumentRefusal:
        """Say why the process ended early. Raises Overloaded if it was not the file's fault."""
        if status in _KILLED:
            message = "The process that read a PDF of this request was killed. Send the request again."
            raise Overloaded(message, retry_after_s=_RETRY_S)
        if status == pdf.TOO_SLOW:
            limit = f"{self._config.max_document_s:g} seconds of computing ({setting('max_document_s')})"
            return DocumentRefusal(f"it takes more than {limit} to read. Send a part of it, or images of its pages.")
        if status == pdf.TOO_LARGE:
            return DocumentRefusal("it takes too much memory to read. Send a part of it, or images of its pages.")
        return self._refusal(pdf.DAMAGED)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Wait for a process that has sent its last frame, and kill it if it does not end."""
    try:
        async with asyncio.timeout(_END_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


async def _feed(process: asyncio.subprocess.Process, data: bytes) -> None:
    """Write the file to the process, which may end before it has read everything."""
    assert process.stdin is not None
    try:
        process.stdin.write(data)
        await process.stdin.drain()
        process.stdin.close()
    except (BrokenPipeError, ConnectionResetError):
        pass


def _too_much_text(max_chars: int) -> str:
    return (
        f"it has more than {max_chars} characters of text, which is the maximum ({setting('max_document_chars')}). "
        "Send a part of it."
    )


def _lines(pages: list[tuple[bytes | None, str]]) -> Iterator[PagePart]:
    yield TextPart(f"[PDF of {len(pages)} pages]\n" if len(pages) > 1 else "[PDF of 1 page]\n")
    for number, (image, text) in enumerate(pages, 1):
        yield TextPart(f"\n[Page {number}]\n")
        if image is not None:
            yield ImagePart(image, is_page=True)
        yield TextPart("\n" if image is not None else "")
        yield TextPart(f"{text}\n" if text else "" if image is not None else "(This page has no text.)\n")


def _joined(parts: Iterator[PagePart]) -> Iterator[PagePart]:
    """Join neighbouring texts."""
    texts: list[str] = []
    for part in parts:
        if isinstance(part, TextPart):
            texts.append(part.text)
        else:
            yield TextPart("".join(texts))
            texts.clear()
            yield part
    yield TextPart("".join(texts))
