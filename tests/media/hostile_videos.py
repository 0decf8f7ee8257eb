"""Video files of a few bytes whose tables claim to be huge: boxes of ISO 14496-12, elements of EBML, chunks of RIFF."""

import struct
import zlib
from collections.abc import Mapping

MANY = 40_000_000  # of which FFmpeg's index takes a gigabyte
MOST = (1 << 32) - 1


def u32(*values: int) -> bytes:
    return struct.pack(f">{len(values)}I", *values)


def box(kind: bytes, *content: bytes) -> bytes:
    joined = b"".join(content)
    return u32(8 + len(joined)) + kind + joined


def full(kind: bytes, *content: bytes, flags: int = 0) -> bytes:
    return box(kind, u32(flags), *content)


def mp4(
    tables: Mapping[str, bytes] | None = None,
    *,
    num_samples: int = 1,
    size: tuple[int, int] = (64, 48),
    num_tracks: int = 1,
    after: bytes = b"",
) -> bytes:
    """An MP4 with one sample of nothing, in which `tables` replace those of their names or are added."""
    entry = box(b"mp4v", bytes(6), b"\0\1", bytes(16), struct.pack(">HH", *size), bytes(50))
    parts = {
        "stsd": full(b"stsd", u32(1), entry),
        "stts": full(b"stts", u32(1, num_samples, 1)),
        "stsc": full(b"stsc", u32(1, 1, num_samples, 1)),
        "stsz": full(b"stsz", u32(1, num_samples)),
        "stco": full(b"stco", u32(1, 40)),
        **(tables or {}),
    }
    extra = box(b"mvex", full(b"trex", u32(1, 1, 1, 1, 0)))
    matrix = u32(1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
    source = box(b"dinf", full(b"dref", u32(1), full(b"url ", flags=1)))
    media = box(
        b"mdia",
        full(b"mdhd", u32(0, 0, 1000, num_samples, 0)),
        full(b"hdlr", u32(0), b"vide", bytes(13)),
        box(b"minf", full(b"vmhd", u32(0, 0)), source, box(b"stbl", *parts.values())),
    )
    head = full(b"tkhd", u32(0, 0, 1, 0, num_samples, 0, 0, 0, 0), matrix, u32(size[0] << 16, size[1] << 16))
    movie = full(b"mvhd", u32(0, 0, 1000, num_samples, 1 << 16, 1 << 24, 0, 0), matrix, u32(0, 0, 0, 0, 0, 0, 2))
    tracks = box(b"trak", head, media) * num_tracks
    return box(b"ftyp", b"isom\0\0\2\0isom") + box(b"moov", movie, tracks, extra) + after + box(b"mdat", bytes(64))


def fragments(*counts: int) -> bytes:
    """Fragments whose runs state no sizes, so that a sample costs no byte."""
    runs = b"".join(full(b"trun", u32(count)) for count in counts)
    header = full(b"tfhd", u32(1, 1, 1), flags=0x18)  # track, duration and size of a sample
    return box(b"moof", full(b"mfhd", u32(1)), box(b"traf", header, runs))


def element(number: int, *content: bytes, size: int | None = None) -> bytes:
    """`size`: what it claims."""
    joined = b"".join(content)
    head = number.to_bytes((number.bit_length() + 7) // 8)
    return head + ((1 << 56) | (len(joined) if size is None else size)).to_bytes(8) + joined


def matroska(
    *elements: bytes, kind: bytes = b"matroska", width: int = 64, private: bytes = b"", extra: bytes = b""
) -> bytes:
    """A file of one track of JPEGs, with the elements before its only frame."""
    video = element(0xE0, element(0xB0, width.to_bytes(4)), element(0xBA, b"\x30"))
    number, track_type = element(0xD7, b"\1") + element(0x73C5, b"\1"), element(0x83, b"\1")
    track = element(0xAE, number, track_type, element(0x86, b"V_MJPEG"), private, extra, video)
    frame = element(0x1F43B675, element(0xE7, b"\0"), element(0xA3, b"\x81\0\0\x80" + bytes(20)))
    head = element(0x1A45DFA3, element(0x4282, kind))
    return head + element(0x18538067, element(0x1549A966), element(0x1654AE6B, track), *elements, frame)


def chunk(kind: bytes, content: bytes, size: int | None = None) -> bytes:
    return kind + struct.pack("<I", len(content) if size is None else size) + content + bytes(len(content) % 2)


def avi(*, length: int = 10, sample_size: int = 0, index: bytes = b"", extra: bytes = b"", scale: int = 1) -> bytes:
    """An AVI of one stream: `extra` is part of its header, `index` follows its frames."""
    main = struct.pack("<14I", 100_000, 0, 0, 0x10, length, 0, 1, 0, 64, 48, 0, 0, 0, 0)
    stream = b"vidsFMP4" + struct.pack("<10I", 0, 0, 0, scale, 10, 0, length, 0, 0, sample_size) + bytes(8)
    picture = struct.pack("<IiiHH4s5I", 40, 64, 48, 1, 24, b"FMP4", 0, 0, 0, 0, 0)
    streams = b"strl" + chunk(b"strh", stream) + chunk(b"strf", picture) + extra
    header = b"hdrl" + chunk(b"avih", main) + chunk(b"LIST", streams)
    content = b"AVI " + chunk(b"LIST", header) + chunk(b"LIST", b"movi" + chunk(b"00dc", bytes(8))) + index
    return chunk(b"RIFF", content)


def zlib_bomb() -> bytes:
    """A header of the decoder that inflates to far more than the file."""
    packed, zeros, num = zlib.compressobj(9), bytes(1 << 20), 1 << 11
    begin, same = (packed.compress(zeros) + packed.flush(zlib.Z_FULL_FLUSH) for _ in range(2))
    checksum = ((num * len(zeros) % 65521) << 16) + 1  # Adler-32 of zeros
    data = begin + same * (num - 1) + packed.flush()[:-4] + u32(checksum)
    encoding = element(0x6D80, element(0x6240, element(0x5032, b"\3"), element(0x5034, element(0x4254, b"\0"))))
    return matroska(private=element(0x63A2, data), extra=encoding)


CUE = element(0xBB, element(0xB3, b"\1"), element(0xB7, element(0xF7, b"\1"), element(0xF1, b"\1")))
HOSTILE = {
    "stsz": mp4(num_samples=MANY),
    "stsz three tracks": mp4(num_samples=MANY, num_tracks=3),
    "stz2": mp4({"stsz": full(b"stz2", u32(4, MANY))}, num_samples=MANY),
    "stsz most": mp4(num_samples=MOST),
    "stts": mp4({"stts": full(b"stts", u32(1, MANY, 1))}),
    "stts most": mp4({"stts": full(b"stts", u32(MOST, 1, 1))}),
    "ctts": mp4({"ctts": full(b"ctts", u32(1, MANY, 1))}, num_samples=1000),
    "ctts most": mp4({"ctts": full(b"ctts", u32(MOST >> 4, MANY, 1))}),
    "stsc": mp4({"stsc": full(b"stsc", u32(1, 1, MANY, 1))}),
    "stsc most": mp4({"stsc": full(b"stsc", u32(MOST >> 4, 1, 1, 1))}),
    "stco": mp4({"stco": full(b"stco", u32(MOST >> 4, 40))}),
    "co64": mp4({"stco": full(b"co64", u32(MOST >> 5, 0, 40))}),
    "stss": mp4({"stss": full(b"stss", u32(MOST >> 4, 1))}),
    "sbgp": mp4({"sbgp": full(b"sbgp", b"rap ", u32(MOST >> 4, MANY, 1))}),
    "elst": mp4({"elst": box(b"edts", full(b"elst", u32(MOST >> 6, 1, 0, 1 << 16)))}),
    "trun": mp4(after=fragments(MANY)),
    "trun many": mp4(after=fragments(*[MANY] * 20)),
    "sidx": mp4(after=full(b"sidx", u32(1, 1000, 0, 0), struct.pack(">HH", 0, 65535), u32(1, 1, 1))),
    "wide": mp4(size=(65535, 1)),
    "large": mp4(size=(65535, 65535)),
    "mkv size": matroska(element(0x1C53BB6B, size=(1 << 56) - 2)),
    "mkv private": matroska(private=element(0x63A2, bytes(16), size=1 << 30)),
    "mkv cues": matroska(element(0x1C53BB6B, CUE * 50_000)),
    "mkv wide": matroska(width=MOST >> 1),
    "mkv tracks": matroska(*[element(0x1654AE6B, element(0xAE, element(0xD7, b"\1"), element(0x83, b"\1")) * 30_000)]),
    "mkv deep": matroska(b"".join(element(0x1043A770, size=1 << 40) for _ in range(20_000))),
    "mkv zlib": zlib_bomb(),
    "webm size": matroska(element(0x1F43B675, size=(1 << 56) - 2), kind=b"webm"),
    "avi length": avi(length=MOST),
    "avi sample": avi(length=MOST, sample_size=1),
    "avi scale": avi(scale=MOST),
    "avi idx1": avi(index=chunk(b"idx1", struct.pack("<4sIII", b"00dc", 16, 4, 8) * 100_000)),
    "avi idx1 most": avi(index=chunk(b"idx1", struct.pack("<4sIII", b"00dc", 16, 4, 8), size=MOST >> 1)),
    "avi indx": avi(extra=chunk(b"indx", struct.pack("<HBBI4sIII", 4, 0, 0, MOST >> 4, b"00dc", 0, 0, 0) + bytes(16))),
}  # fmt: skip
