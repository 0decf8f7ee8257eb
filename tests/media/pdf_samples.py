"""PDFs written by hand, honest and hostile. A page is the operators of its content stream."""

import zlib
from collections.abc import Sequence

_FONT = "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"
_BLUE_SQUARE = b"0 0 1 rg 0 0 200 200 re f"


def show(text: str) -> bytes:
    """The operators that write a line of text."""
    return f"BT /F1 24 Tf 20 100 Td ({text}) Tj ET".encode()


def drawn() -> bytes:
    """The operators of a page that is blue and has no text."""
    return _BLUE_SQUARE


def pdf(*pages: bytes, box: str = "0 0 200 200", extra: Sequence[bytes] = (), trailer: str = "") -> bytes:
    """A PDF with these pages. `extra`: further objects, numbered after those of the pages."""
    numbers = [4 + 2 * index for index in range(len(pages))]
    kids = " ".join(f"{number} 0 R" for number in numbers)
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Count {len(pages)} /Kids [{kids}] >>".encode(),
        _FONT.encode(),
    ]
    for number, content in zip(numbers, pages, strict=True):
        resources = "<< /Font << /F1 3 0 R >> /XObject << /X1 " + f"{4 + 2 * len(pages)} 0 R >> >>"
        page = f"<< /Type /Page /Parent 2 0 R /MediaBox [{box}] /Resources {resources} /Contents {number + 1} 0 R >>"
        objects += [page.encode(), stream(content)]
    return document([*objects, *extra], trailer)


def stream(content: bytes, fields: str = "") -> bytes:
    return b"<< %s /Length %d >>\nstream\n%s\nendstream" % (fields.encode(), len(content), content)


def packed(content: bytes, fields: str = "", times: int = 1) -> bytes:
    """A stream that was deflated, `times` times."""
    for _ in range(times):
        content = zlib.compress(content, 9)
    return stream(content, f"{fields} /Filter [{'/FlateDecode ' * times}]")


def encrypted() -> bytes:
    """A PDF that asks for a password: no password fits its keys."""
    keys = "/Filter /Standard /V 1 /R 2 /P -4 /O <" + "ab" * 32 + "> /U <" + "cd" * 32 + ">"
    extra = [f"<< {keys} >>".encode()]
    return pdf(show("secret"), extra=extra, trailer=f"/Encrypt 6 0 R /ID [<{'01' * 16}> <{'01' * 16}>]")


def filled_in(label: str, value: str) -> bytes:
    """A PDF with a form of one field."""
    font, look = "/Font << /F1 3 0 R >>", f"/Tx BMC BT /F1 12 Tf 2 5 Td ({value}) Tj ET EMC".encode()
    field = f"/Type /Annot /Subtype /Widget /FT /Tx /T (field) /V ({value}) /Rect [20 50 120 70] /F 4 /P 4 0 R"
    page = "/Type /Page /Parent 2 0 R /MediaBox [0 0 200 200] /Contents 5 0 R /Annots [7 0 R]"
    return document([
        b"<< /Type /Catalog /Pages 2 0 R /AcroForm << /Fields [7 0 R] /DA (/F1 12 Tf 0 g) >> >>",
        b"<< /Type /Pages /Count 1 /Kids [4 0 R] >>",
        _FONT.encode(),
        f"<< {page} /Resources << {font} >> >>".encode(),
        stream(show(label)),
        stream(look, f"/Type /XObject /Subtype /Form /BBox [0 0 100 20] /Resources << {font} >>"),
        f"<< {field} /AP << /N 6 0 R >> >>".encode(),
    ])  # fmt: skip


def document(objects: Sequence[bytes], trailer: str = "") -> bytes:
    file, places = bytearray(b"%PDF-1.7\n"), []
    for number, content in enumerate(objects, 1):
        places.append(len(file))
        file += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    start = len(file)
    file += b"xref\n0 %d\n0000000000 65535 f \n" % (len(places) + 1)
    file += b"".join(b"%010d 00000 n \n" % place for place in places)
    file += f"trailer << /Size {len(places) + 1} /Root 1 0 R {trailer} >>\nstartxref\n{start}\n%%EOF\n".encode()
    return bytes(file)


def _zeros(megabytes: int) -> bytes:
    """A zlib stream of so many zeros: one block again and again. Its checksum is left out."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    return b"\x78\xda" + block * megabytes + b"\x03\x00"


def _form(content: bytes, number: int) -> bytes:
    resources = f"/Resources << /XObject << /X1 {number} 0 R >> >>"
    return stream(content, f"/Type /XObject /Subtype /Form /BBox [0 0 200 200] {resources}")


def _tree(*pages: str) -> bytes:
    return document([b"<< /Type /Catalog /Pages 2 0 R >>", *(page.encode() for page in pages)])


def hostile() -> dict[str, bytes]:
    """PDFs that cost much, or that lead nowhere."""
    laughs = [_form(b"/X1 Do " * 10, 7 + level) for level in range(12)]
    wide = "/Type /XObject /Subtype /Image /Width 60000 /Height 60000 /ColorSpace /DeviceRGB /BitsPerComponent 8"
    return {
        "bomb": pdf(b"", extra=[packed(zlib.compress(_zeros(4000)), times=0)]),
        "bomb as content": _with_content(
            packed(zlib.compress(_zeros(4000)), times=0).replace(b"<< ", b"<< /Filter [/FlateDecode /FlateDecode] ", 1)
        ),
        "huge image": pdf(b"200 0 0 200 0 0 cm /X1 Do", extra=[stream(_zeros(3000), wide + " /Filter /FlateDecode")]),
        "a tree that is its own branch": _tree("<< /Type /Pages /Count 3 /Kids [2 0 R 2 0 R 2 0 R] >>"),
        "a tree that leads back": _tree(
            "<< /Type /Pages /Count 2 /Kids [3 0 R] >>", "<< /Type /Pages /Parent 2 0 R /Count 2 /Kids [2 0 R] >>"
        ),
        "a count that lies": _tree("<< /Type /Pages /Count 90 /Kids [] >>"),
        "billions of pages": _tree("<< /Type /Pages /Count 2000000000 /Kids [] >>"),
        "a form that draws itself": pdf(b"/X1 Do", extra=[_form(b"/X1 Do " * 100, 6)]),
        "forms that draw forms": pdf(b"/X1 Do", extra=[*laughs, _form(b"0 0 m 9 9 l S", 6)]),
        "endless path": pdf(b"0 0 m " + b"200 200 l 0 1 l " * 400_000 + b"S"),
        "many objects": pdf(drawn(), extra=[b"1"] * 200_000),
        "deep arrays": pdf(drawn(), extra=[b"[" * 500_000 + b"]" * 500_000]),
        "deep operands": pdf(b"[" * 500_000),
        "a page without an end": pdf(drawn(), box="0 0 1e38 1e38"),
        "a page of nothing": pdf(drawn(), box="0 0 0 0"),
        "a page like a thread": pdf(show("thin"), box="0 0 14000 1"),
        "cut": pdf(show("Hello"))[:-200],
        "no end": b"%PDF-1.7\n" + b"1 0 obj\n<<" * 100_000,
        "its own length": pdf(b"", extra=[b"<< /Length 6 0 R >>\nstream\nx\nendstream"]),
    }


def _with_content(content: bytes) -> bytes:
    page = b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 200 200] /Contents 4 0 R >>"
    return document([b"<< /Type /Catalog /Pages 2 0 R >>", b"<< /Type /Pages /Count 1 /Kids [3 0 R] >>", page, content])
