"""Token ids as short texts, for JSON."""

import base64
import binascii
import zlib
from array import array
from collections.abc import Sequence

import numpy as np

_LEVEL = 1  # zlib's fastest


def packed_ids(token_ids: Sequence[int]) -> str:
    """About two and a half characters for an id. Bytes of one weight follow each other: the high ones are mostly 0."""
    planes = np.asarray(token_ids, "<u4").view(np.uint8).reshape(-1, 4).T
    return base64.b64encode(zlib.compress(planes.tobytes(), _LEVEL)).decode("ascii")


def unpacked_ids(packed: str) -> "array[int]":
    """Raises ValueError."""
    try:
        data = zlib.decompress(base64.b64decode(packed, validate=True))
    except (zlib.error, binascii.Error) as error:
        raise ValueError(f"it cannot be unpacked: {error}") from error
    planes = np.frombuffer(data, np.uint8).reshape(4, -1)
    return array("I", np.ascontiguousarray(planes.T).view("<u4").astype(np.uint32).tobytes())
