"""The process that opens one file of a client: a PDF, a video or a large image. Knows no server.

The file comes on standard input; frames of its contents go to standard output. The libraries that read it are native
code: one call may take any time and memory, and cannot be interrupted. A thread of this process watches both, and ends
the process. It can, because they run without the interpreter's lock. A library is imported by the task that needs it.
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
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ..core.errors import InvalidImage, setting

FRAME = struct.Struct(">cI")  # the header of a frame: its kind, and the length of its contents
REFUSED, END = b"r", b"e"  # kinds of frames that every task sends
TEXT, IMAGE = b"t", b"i"  # a PDF's pages: the text of a page follows its image, if it has one
STAMPS, PIXELS = b"s", b"p"  # the width, height and times of a video; one image
SIZE = struct.Struct("=II")  # the beginning of both: width and height
ENCRYPTED, DAMAGED, TOO_MUCH_TEXT = "encrypted", "damaged", "text"  # why a PDF is refused; or its number of pages
TOO_SLOW, TOO_LARGE = 3, 4  # exit statuses
THREADS = 2  # threads of one video decoder: the model needs the other cores
_WATCH_S = 0.01
_RUSAGE_FORMAT, _FOOTPRINT_FIELD = "=16s10Q", 8  # struct rusage_info_v0 of macOS, and ri_phys_footprint in it

_IMAGE_RATIO = 20  # limit of a page's long side to its short side; a longer page has no image
_MAX_SCALE = 300 / 72  # a page is measured in points, 72 to an inch
_LEAST_SIDE = 32
_JPEG = {"format": "JPEG", "quality": 85, "subsampling": 0}
_NEEDS_PASSWORD = 4  # FPDF_ERR_PASSWORD
_CONTROLS = {code: None for code in (*range(32), 0x7F, 0xFFFE, 0xFFFF) if chr(code) not in "\n\t"}

# Every further decoder is more code that clients' files reach. FFmpeg's names of codecs, then of decoders.
_CODECS = frozenset({"h264", "hevc", "av1", "vp8", "vp9", "mpeg4", "mjpeg", "prores", "gif"})
_DECODERS = "h264,hevc,av1,libdav1d,vp8,vp9,mpeg4,mjpeg,prores,gif"
_MAX_FRAMES = 1_000_000  # in a video, counted before any is decoded

Frames = Iterator[tuple[bytes, bytes]]  # kind and contents of each frame


class Refused(Exception):
    """The file cannot be read. Its text is the reason, as the server understands it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task(ABC):
    max_s: float  # computing time
    max_memory_bytes: int

    @abstractmethod
    def read(self, data: bytes) -> Frames:
        """Yield the contents of the file. Raises Refused or InvalidImage."""

    @property
    def argument(self) -> str:
        """Return the argument of the process that does this task."""
        return json.dumps([type(self).__name__, asdict(self)])


@dataclass(frozen=True, slots=True, kw_only=True)
class PdfTask(Task):
    pages: Literal["both", "images", "text"]  # which contents of each page are read
    page_pixels: int
    max_pages: int
    max_chars: int

    def read(self, data: bytes) -> Frames:
        """Yield the image of each page, if it is shown, and then its text."""
        import pypdfium2 as pdfium

        try:
            document = pdfium.PdfDocument(data)
            num_pages = len(document)
        except pdfium.PdfiumError as error:
            raise Refused(ENCRYPTED if getattr(error, "err_code", 0) == _NEEDS_PASSWORD else DAMAGED) from error
        if num_pages > self.max_pages:
            raise Refused(str(num_pages))
        document.init_forms()  # otherwise text typed into a form is not rendered
        num_chars = num_damaged = 0
        for number in range(num_pages):
            try:
                image, text = self._read_page(document, number, self.max_chars - num_chars)
            except pdfium.PdfiumError:
                image, text = None, "(This page is damaged.)"
                num_damaged += 1
            num_chars += len(text)
            if image is not None:
                yield IMAGE, image
            yield TEXT, text.encode("utf-8", "replace")
        if num_damaged == num_pages:  # also if it has no pages
            raise Refused(DAMAGED)

    def _read_page(self, document: Any, number: int, max_chars: int) -> tuple[bytes | None, str]:
        page = _page(document, number)
        image = None if self.pages == "text" else _page_image(page, self.page_pixels)
        text = _page_text(page, max_chars) if image is None or self.pages == "both" else ""
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


def _page_text(page: Any, max_chars: int) -> str:
    content = page.get_textpage()
    if content.count_chars() > max_chars:
        raise Refused(TOO_MUCH_TEXT)
    text = content.get_text_range(errors="replace").replace("\r\n", "\n").replace("\r", "\n").translate(_CONTROLS)
    content.close()
    return "\n".join(line.rstrip() for line in text.split("\n")).strip()


def _page_image(page: Any, max_pixels: int) -> bytes | None:
    """Return the page as a JPEG of about `max_pixels` at most; None if the page is far too long or too small."""
    width, height = page.get_size()
    if not (width > 0 and height > 0 and 1 / _IMAGE_RATIO <= width / height <= _IMAGE_RATIO):
        return None
    scale = min(_MAX_SCALE, (max_pixels / (width * height)) ** 0.5)
    if min(width, height) * scale < _LEAST_SIDE:
        return None
    bitmap = page.render(scale=scale, rev_byteorder=True)
    file = io.BytesIO()
    bitmap.to_pil().convert("RGB").save(file, **_JPEG)
    bitmap.close()
    return file.getvalue()


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoTask(Task):
    """Reads the `wanted` frames of a video, scaled to `size`, or its times if none are wanted.

    Sound and subtitles are ignored. FFmpeg gets the format to read and never guesses it: some formats that it can
    guess are lists of other files to open.
    """

    container: str  # FFmpeg's name of the file format
    max_frame_pixels: int
    wanted: Sequence[int] = ()  # indices, ascending
    size: tuple[int, int] = (0, 0)  # width, height

    def read(self, data: bytes) -> Frames:
        """Yield the times of all frames in seconds, ascending, or each wanted frame."""
        import numpy as np

        with self._opened(data) as (file, stream):
            if not self.wanted:
                size = SIZE.pack(stream.codec_context.width, stream.codec_context.height)
                yield STAMPS, size + np.array(_stamps(file, stream)).tobytes()
                return
            wanted = set(self.wanted)
            for index, frame in enumerate(file.decode(stream)):
                if index in wanted:
                    yield _pixels(_upright(frame, self.size))
                if index >= self.wanted[-1]:
                    break

    @contextmanager
    def _opened(self, data: bytes) -> Iterator[tuple[Any, Any]]:
        """Open the file and its video stream. Errors of the library become InvalidImage."""
        import av

        try:
            # Nothing but these bytes is read: files and addresses that they refer to are ignored.
            options = {"codec_whitelist": _DECODERS, "protocol_whitelist": "none"}
            with av.open(io.BytesIO(data), format=self.container, options=options) as file:
                yield file, _stream(file, self.max_frame_pixels)
        except (av.FFmpegError, ValueError, LookupError, MemoryError, ArithmeticError) as error:
            raise InvalidImage("it is broken: its content ends early or contradicts itself.") from error


def _stream(file: Any, most: int) -> Any:
    from .decode import check_shape

    if not file.streams.video:
        raise InvalidImage("there are no frames in it.")
    stream = file.streams.video[0]
    context = stream.codec_context
    codec = "nothing known" if context is None else context.codec.canonical_name
    if codec not in _CODECS:
        raise InvalidImage(f"it is encoded as {codec[:20]}, which is not read. Send it as H.264.")
    width, height = context.width, context.height
    if width * height <= 0:
        raise InvalidImage("it is broken: it does not say how large its frames are.")
    if width * height > most:
        raise InvalidImage(
            f"its frames have {width} × {height} pixels; this server takes at most {most / 1e6:.1f} megapixels "
            f"({setting('max_image_pixels')}). Send smaller ones."
        )
    check_shape(width, height, "its frames have")
    context.options = {"max_pixels": str(most)}
    context.thread_count = THREADS
    return stream


def _stamps(file: Any, stream: Any) -> list[float]:
    stamps: list[float] = []
    for packet in file.demux(stream):
        stamp = packet.dts if packet.pts is None else packet.pts
        if stamp is None or packet.is_discard:  # the end of the file, or a frame that is cut off
            continue
        stamps.append(float(stamp * packet.time_base))
        if len(stamps) > _MAX_FRAMES:
            raise InvalidImage("it has too many frames.")
    if not stamps:
        raise InvalidImage("there are no frames in it.")
    return sorted(stamps)


def _upright(frame: Any, size: tuple[int, int]) -> Any:
    """Return a numpy array (height, width, 3), turned upright as the file says."""
    import av
    import numpy as np

    bicubic = av.video.reformatter.Interpolation.BICUBIC
    scaled = frame.reformat(*size, format="rgb24", interpolation=bicubic).to_ndarray()
    return np.rot90(scaled, round(frame.rotation / 90))


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageTask(Task):
    max_pixels: int

    def read(self, data: bytes) -> Frames:
        from .decode import ImageFile

        yield _pixels(ImageFile(data, max_pixels=self.max_pixels).pixels())


def _pixels(image: Any) -> tuple[bytes, bytes]:
    return PIXELS, SIZE.pack(*image.shape[1::-1]) + image.tobytes()


_TASKS: tuple[type[Task], ...] = (PdfTask, VideoTask, ImageTask)


def main() -> None:
    """Do the task that the argument names, and end the process."""
    name, settings = json.loads(sys.argv[1])
    task = {kind.__name__: kind for kind in _TASKS}[name](**settings)
    os.nice(10)  # the replies of the server come first if all cores are busy
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches every process; the server ends this one
    threading.Thread(target=_watch, args=(task.max_s, task.max_memory_bytes), daemon=True).start()
    data = sys.stdin.buffer.read()
    try:
        for kind, payload in task.read(data):
            _send(kind, payload)
        _send(END, b"")
    except (Refused, InvalidImage) as error:
        _send(REFUSED, str(error).encode())
    os._exit(0)  # without the libraries' own cleanup, which may crash on a broken file


def _send(kind: bytes, payload: bytes) -> None:
    sys.stdout.buffer.write(FRAME.pack(kind, len(payload)))
    sys.stdout.buffer.write(payload)
    sys.stdout.buffer.flush()


def _watch(max_s: float, max_memory_bytes: int) -> None:
    used_bytes = _memory_of_this_process()
    while True:
        if time.process_time() > max_s:
            os._exit(TOO_SLOW)
        if used_bytes() > max_memory_bytes:
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


if __name__ == "__main__":
    main()
