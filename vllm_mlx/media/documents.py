"""Documents become texts and images: files of text here, PDFs in worker processes. Knows no conversation."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ..core.config import MediaConfig
from ..core.errors import InvalidDocument, setting
from ..core.messages import ImagePart, TextPart
from ..util.tasks import Deadline
from .processes import TOO_MUCH, Frame, Processes, ReadingFailed
from .worker import ENCRYPTED, IMAGE, TOO_LARGE, TOO_MUCH_TEXT, TOO_SLOW, PdfTask

_PAGE_PIXELS = 1_200_000  # a page's image, 110 dots an inch for a sheet of paper: 1,200 to 1,600 tokens
_MAX_IMAGES_BYTES = 128 << 20  # all pages of one PDF, encoded
_HEADER_BYTES = 1024  # a PDF may begin after this many other bytes: readers of PDFs accept that
_OBJECT_BYTES = 500

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
    """The file of a document. `text` is its text; None for a PDF."""

    def __init__(self, data: bytes, *, max_chars: int):
        """Raise InvalidDocument if the file is neither text nor a PDF, or if the text is empty or too long."""
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
    """Reads documents, on one event loop. The same bytes always become the same parts."""

    def __init__(self, config: MediaConfig, processes: Processes, *, takes_images: bool):
        """`takes_images`: whether the model takes images."""
        self._config = config
        self._processes = processes
        self._takes_images = takes_images
        self._task = PdfTask(
            pages=config.document_pages if takes_images and config.max_images else "text",
            page_pixels=_PAGE_PIXELS,
            max_pages=config.max_document_pages,
            max_chars=config.max_document_chars,
            max_s=config.max_document_s,
            max_memory_bytes=processes.max_memory_bytes,
        )

    async def read(self, file: DocumentFile, deadline: Deadline, tenant: str = "") -> ReadDocument:
        """Return a document's content. Raises Overloaded if no process can start, and the deadline's error."""
        if file.text is not None:
            return DocumentText((TextPart(file.text),))
        max_bytes = _MAX_IMAGES_BYTES + 4 * self._config.max_document_chars
        try:
            return self._document(await self._processes.read(self._task, file.data, max_bytes, deadline, tenant))
        except ReadingFailed as error:
            return self._failure(error)

    def _document(self, frames: Sequence[Frame]) -> ReadDocument:
        pages: list[tuple[bytes | None, str]] = []
        image: bytes | None = None
        for kind, payload in frames:
            if kind == IMAGE:
                image = payload
            else:
                pages.append((image, payload.decode()))
                image = None
        if not any(image is not None or text for image, text in pages):
            if self._takes_images:
                reason = f"this server reads the text of pages alone ({setting('document_pages')})"
            else:
                reason = "this model takes no images"
            return DocumentRefusal(f"its pages have no text, and {reason}. Send its text.")
        return DocumentText(tuple(_joined(_lines(pages))))

    def _failure(self, error: ReadingFailed) -> DocumentRefusal:
        """Return the refusal of a PDF. Clients look for the words of Anthropic's API in it."""
        if error.reason.isdecimal():
            limit = f"A maximum of {self._config.max_document_pages} PDF pages may be provided"
            words = f"it has {error.reason} pages: {limit} ({setting('max_document_pages')}). Send a part of it."
            return DocumentRefusal(words)
        limit = f"{self._config.max_document_s:g} seconds of computing ({setting('max_document_s')})"
        known: dict[str | int, str] = {
            TOO_MUCH: "its pages are too large as images. Send fewer pages.",
            TOO_SLOW: f"it takes more than {limit} to read. Send a part of it, or images of its pages.",
            TOO_LARGE: "it takes too much memory to read. Send a part of it, or images of its pages.",
            ENCRYPTED: "it is encrypted: The PDF specified is password protected. Send it without a password.",
            TOO_MUCH_TEXT: _too_much_text(self._config.max_document_chars),
        }
        damaged = "it is damaged: The PDF specified was not valid."
        return DocumentRefusal(known.get(error.reason or error.status, damaged))


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
