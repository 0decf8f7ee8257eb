"""Reads one PDF in a process of its own: the file on standard input, its pages on standard output. Knows no server.

PDFium is C++ code that reads untrusted files: one call may take any time and memory, and cannot be interrupted. A
thread of this process watches both, and ends the process. It can, because PDFium runs without the interpreter's lock.
"""

import ctypes
import io
import json
import os
import resource
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

PDF_FRAME = struct.Struct(">cI")  # the header of a frame: its kind, and the length of its contents
TEXT, IMAGE, REFUSED, END = b"t", b"i", b"r", b"e"  # kinds; the text of a page follows its image, if it has one
TOO_SLOW, TOO_LARGE = 3, 4  # exit statuses
ENCRYPTED, DAMAGED, TOO_MUCH_TEXT = "encrypted", "damaged", "text"
_WATCH_S = 0.01
_IMAGE_RATIO = 20  # limit of long side to short side; a longer page has no image
_MAX_SCALE = 300 / 72  # a page is measured in points, 72 to an inch
_LEAST_SIDE = 32
_JPEG = {"format": "JPEG", "quality": 85, "subsampling": 0}
_NEEDS_PASSWORD = 4  # FPDF_ERR_PASSWORD
_RUSAGE_FORMAT, _FOOTPRINT_FIELD = "=16s10Q", 8  # struct rusage_info_v0 of macOS, and ri_phys_footprint in it
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


class _Refused(Exception):
    """The file cannot be read. Its text is `ENCRYPTED`, `DAMAGED`, `TOO_MUCH_TEXT`, or the number of pages."""


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches every process; the server ends this one
    limits = PdfLimits(**json.loads(sys.argv[1]))
    threading.Thread(target=_watch, args=(limits,), daemon=True).start()
    data = sys.stdin.buffer.read()
    try:
        for kind, payload in read_pdf(data, limits):
            _send(kind, payload)
        _send(END, b"")
    except _Refused as error:
        _send(REFUSED, str(error).encode())
    os._exit(0)  # without PDFium's own cleanup, which may crash on a broken document


def _send(kind: bytes, payload: bytes) -> None:
    sys.stdout.buffer.write(PDF_FRAME.pack(kind, len(payload)) + payload)
    sys.stdout.buffer.flush()


def _watch(limits: PdfLimits) -> None:
    resident_bytes = _memory_of_this_process()
    while True:
        if time.process_time() > limits.max_s:
            os._exit(TOO_SLOW)
        if resident_bytes() > limits.max_memory_bytes:
            os._exit(TOO_LARGE)
        time.sleep(_WATCH_S)


def _memory_of_this_process() -> Callable[[], int]:
    """Return a function that says how many bytes this process takes now, as the system counts them."""
    if sys.platform == "darwin":
        call = ctypes.CDLL(None).proc_pid_rusage
        buffer = ctypes.create_string_buffer(struct.calcsize(_RUSAGE_FORMAT))

        def footprint() -> int:
            call(os.getpid(), 0, buffer)
            return int(struct.unpack(_RUSAGE_FORMAT, buffer.raw)[_FOOTPRINT_FIELD])

        return footprint
    statm = Path("/proc/self/statm")  # not the peak, which a process inherits from the one that started it
    return lambda: int(statm.read_bytes().split()[1]) * resource.getpagesize()


def read_pdf(data: bytes, limits: PdfLimits) -> Iterator[tuple[bytes, bytes]]:
    """Yield the image of each page, if it is shown, and then its text. Raises `_Refused`."""
    import pypdfium2 as pdfium

    try:
        document = pdfium.PdfDocument(data)
        num_pages = len(document)
    except pdfium.PdfiumError as error:
        raise _Refused(ENCRYPTED if getattr(error, "err_code", 0) == _NEEDS_PASSWORD else DAMAGED) from error
    if num_pages > limits.max_pages:
        raise _Refused(str(num_pages))
    if num_pages < 1:
        raise _Refused(DAMAGED)
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
        raise _Refused(DAMAGED)


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
        raise _Refused(TOO_MUCH_TEXT)
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
