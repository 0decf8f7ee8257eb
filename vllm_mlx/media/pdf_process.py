"""Reads one PDF in a process of its own. Knows no server.

A refusal is `ENCRYPTED`, `DAMAGED`, `TOO_MUCH_TEXT`, or the number of pages.
"""

import io
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from .own_process import Refused, serve

TEXT, IMAGE = b"t", b"i"  # kinds of frames; the text of a page follows its image, if it has one
ENCRYPTED, DAMAGED, TOO_MUCH_TEXT = "encrypted", "damaged", "text"
_IMAGE_RATIO = 20  # limit of long side to short side; a longer page has no image
_MAX_SCALE = 300 / 72  # a page is measured in points, 72 to an inch
_LEAST_SIDE = 32
_JPEG = {"format": "JPEG", "quality": 85, "subsampling": 0}
_NEEDS_PASSWORD = 4  # FPDF_ERR_PASSWORD
_CONTROLS = {code: None for code in (*range(32), 0x7F, 0xFFFE, 0xFFFF) if chr(code) not in "\n\t"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PdfLimits:
    pages: Literal["both", "images", "text"]  # which contents of each page are read
    page_pixels: int
    max_pages: int
    max_chars: int
    max_s: float  # computing time
    max_memory_bytes: int

    @property
    def shows_images(self) -> bool:
        return self.pages != "text"


def main() -> None:
    limits = PdfLimits(**json.loads(sys.argv[1]))
    serve(partial(read_pdf, limits=limits), limits.max_s, limits.max_memory_bytes)


def read_pdf(data: bytes, limits: PdfLimits) -> Iterator[tuple[bytes, bytes]]:
    """Yield the image of each page, if it is shown, and then its text. Raises `Refused`."""
    import pypdfium2 as pdfium

    try:
        document = pdfium.PdfDocument(data)
        num_pages = len(document)
    except pdfium.PdfiumError as error:
        raise Refused(ENCRYPTED if getattr(error, "err_code", 0) == _NEEDS_PASSWORD else DAMAGED) from error
    if num_pages > limits.max_pages:
        raise Refused(str(num_pages))
    if num_pages < 1:
        raise Refused(DAMAGED)
    document.init_forms()  # otherwise what was typed into a form is not rendered
    num_chars = num_damaged = 0
    for number in range(num_pages):
        try:
            image, text = _read_page(document, number, limits, limits.max_chars - num_chars)
        except pdfium.PdfiumError:
            image, text = None, "(This page is damaged.)"
            num_damaged += 1
        num_chars += len(text)
        if image is not None:
            yield IMAGE, image
        yield TEXT, text.encode("utf-8", "replace")
    if num_damaged == num_pages:
        raise Refused(DAMAGED)


def _read_page(document: Any, number: int, limits: PdfLimits, max_chars: int) -> tuple[bytes | None, str]:
    page = _page(document, number)
    image = _image(page, limits.page_pixels) if limits.shows_images else None
    text = _text(page, max_chars) if image is None or limits.pages == "both" else ""
    page.close()
    return image, text


def _page(document: Any, number: int) -> Any:
    """Open a page whose annotations, such as the fields of a form, are part of its content."""
    import pypdfium2.raw as library

    page = document[number]
    if library.FPDFPage_GetAnnotCount(page) <= 0 or library.FPDFPage_Flatten(page, library.FLAT_NORMALDISPLAY) != 1:
        return page
    page.close()
    return document[number]


def _text(page: Any, max_chars: int) -> str:
    content = page.get_textpage()
    if content.count_chars() > max_chars:
        raise Refused(TOO_MUCH_TEXT)
    text = content.get_text_range(errors="replace").replace("\r\n", "\n").replace("\r", "\n").translate(_CONTROLS)
    content.close()
    return "\n".join(line.rstrip() for line in text.split("\n")).strip()


def _image(page: Any, max_pixels: int) -> bytes | None:
    """Return the page as a JPEG of about `max_pixels` at most; None if it is far too long or too small."""
    width, height = page.get_size()
    if not (width > 0 and height > 0 and 1 / _IMAGE_RATIO <= width / height <= _IMAGE_RATIO):
        return None
    scale = min(_MAX_SCALE, (max_pixels / (width * height)) ** 0.5)
    if min(width, height) * scale < _LEAST_SIDE:
        return None
    bitmap = page.render(scale=scale, rev_byteorder=True)
    image = bitmap.to_pil().convert("RGB")
    file = io.BytesIO()
    image.save(file, **_JPEG)
    bitmap.close()
    return file.getvalue()


if __name__ == "__main__":
    main()
