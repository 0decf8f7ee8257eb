"""Long values as short texts, for JSON: token ids and numbers."""

import base64
import binascii
import zlib
from array import array
from collections.abc import Sequence

import numpy as np

_LEVEL = 1  # zlib's fastest


def packed_ids(token_ids: Sequence[int]) -> str:
    """About two and a half characters for an id."""
    return packed_array(np.asarray(token_ids, np.uint32))


def unpacked_ids(packed: str) -> "array[int]":
    """Raises ValueError, like the other functions here that unpack."""
    return array("I", unpacked_array(packed, np.dtype(np.uint32)).tobytes())


def packed_array(numbers: np.ndarray) -> str:
    """The numbers without their shape. Bytes of the same weight follow each other: the high ones are mostly equal."""
    flat = np.ascontiguousarray(numbers).reshape(-1)
    little = flat.astype(flat.dtype.newbyteorder("<"))
    return _packed(little.view(np.uint8).reshape(-1, flat.dtype.itemsize).T.tobytes())


def unpacked_array(packed: str, dtype: np.dtype) -> np.ndarray:
    planes = np.frombuffer(_unpacked(packed), np.uint8).reshape(dtype.itemsize, -1)
    return np.ascontiguousarray(planes.T).reshape(-1).view(dtype.newbyteorder("<")).astype(dtype)


def _packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, _LEVEL)).decode("ascii")


def _unpacked(packed: str) -> bytes:
    try:
        return zlib.decompress(base64.b64decode(packed, validate=True))
    except (zlib.error, binascii.Error) as error:
        raise ValueError(f"it cannot be unpacked: {error}") from error
