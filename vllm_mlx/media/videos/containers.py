"""Which kind of file a video comes in, by its first bytes. Decodes nothing.

FFmpeg is told what to read and never left to guess: some of what it can guess are lists of other files to open.
"""

from ...core.errors import InvalidImage
from ..images.formats import what_else

_READ = "MP4, QuickTime, WebM, Matroska, AVI, GIF"
_BOXES = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")
_PICTURES = (b"\x89PNG", b"\xff\xd8\xff", b"BM", b"RIFF")
_STILL = (b"avif", b"heic", b"heix", b"mif1")


def container(data: bytes) -> str:
    """FFmpeg's name for it. Raises InvalidImage."""
    start = data[:16]
    if start[4:8] in _BOXES and start[8:12] not in _STILL:
        return "mov"
    if start.startswith(b"\x1a\x45\xdf\xa3"):
        return "matroska"
    if start.startswith(b"RIFF") and start[8:12] == b"AVI ":
        return "avi"
    if start.startswith((b"GIF87a", b"GIF89a")):
        return "gif"
    if start.startswith(_PICTURES):
        raise InvalidImage("it is a picture. Send it as an image.")
    raise InvalidImage(f"it is {what_else(data, f'no video that this server reads ({_READ})')}.")
