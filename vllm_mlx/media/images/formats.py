"""What a file is by its first bytes, for those that are no picture this server reads. Decodes nothing."""

import re

# Pillow is asked for these alone: each further format is more code that strangers' files reach.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "AVIF")
_HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
_STARTS = (
    (b"%PDF-", "a PDF. Send its pages as images, or its text"),
    (b"%!PS", "PostScript"),
    (b"\x1f\x8b", "compressed with gzip. Send the file that is in it"),
    (b"PK\x03\x04", "a ZIP archive"),
    (b"\x00\x00\x01\x00", "an icon (ICO). Send a PNG"),
    (b"II*\0", "a TIFF. Send a PNG"),
    (b"MM\0*", "a TIFF. Send a PNG"),
    (b"8BPS", "a Photoshop document. Send a PNG"),
    (b"\x00\x00\x00\x0cjP  ", "a JPEG 2000. Send a PNG or a JPEG"),
    (b"\xff\x4f\xff\x51", "a JPEG 2000. Send a PNG or a JPEG"),
    (b"\x00\x00\x00\x0cJXL ", "a JPEG XL. Send a PNG or a JPEG"),
    (b"\xff\x0a", "a JPEG XL. Send a PNG or a JPEG"),
    (b"\x1a\x45\xdf\xa3", "a video"),
    (b"{", "JSON"),
    (b"data:", "a data URL inside a data URL"),
)
_OWN_STARTS = (b"\x89PNG", b"\xff\xd8\xff", b"RIFF", b"GIF8", b"BM")
_MARKUP = re.compile(rb"^(?:\xef\xbb\xbf)?\s*<")


def what_else(data: bytes, unknown: str = f"no image that this server reads ({', '.join(FORMATS)})") -> str:
    """The end of the sentence "it is …": what the file is instead, as far as it can be told; else, `unknown`."""
    start = bytes(data[:2048])
    if not start:
        return "empty"
    if _MARKUP.match(start):
        if b"<svg" in start.lower():
            return "an SVG, which is drawn by a program and not decoded. Send it as a PNG"
        return "a page of markup (HTML or XML)"
    if start.startswith(_OWN_STARTS) or start[4:12] == b"ftypavif":
        return "broken, or of a rare kind: its header cannot be read. Save it anew as a PNG"
    if start[4:8] == b"ftyp":
        return "an HEIC. Send it as a JPEG or a PNG" if start[8:12] in _HEIF_BRANDS else "a video"
    for prefix, name in _STARTS:
        if start.startswith(prefix):
            return name
    return unknown
