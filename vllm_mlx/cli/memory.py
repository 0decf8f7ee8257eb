"""An amount of memory as people write it: `24GB`, `512MiB`, `70%`, `0.7`. Asks no machine."""

import math
import re
from dataclasses import dataclass

_UNITS = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "kib": 2**10,
    "m": 10**6, "mb": 10**6, "mib": 2**20,
    "g": 10**9, "gb": 10**9, "gib": 2**30,
    "t": 10**12, "tb": 10**12, "tib": 2**40,
}  # fmt: skip
_AMOUNT = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([a-z]*|%)\s*", re.IGNORECASE)
_LEAST_BYTES = 10**6  # below it, somebody forgot the unit
_HINT = "give bytes, such as 24GB or 800MiB, or a share of the machine's memory, such as 0.7"


@dataclass(frozen=True, slots=True)
class Bytes:
    count: int

    def to_bytes(self, machine_bytes: int) -> int:
        return self.count


@dataclass(frozen=True, slots=True)
class Share:
    share: float  # share of the machine's memory, in (0, 1]

    def to_bytes(self, machine_bytes: int) -> int:
        return int(self.share * machine_bytes)


MemoryAmount = Bytes | Share


def parse_bytes(value: object) -> int:
    """A number of bytes, such as a file has. Raises ValueError with the accepted forms."""
    match = _AMOUNT.fullmatch(str(value))
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError("give bytes, such as 20MB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def parse_memory(value: object) -> MemoryAmount | None:
    """Up to 1 and in percent it is a share, above 1 it is bytes. Raises ValueError with the accepted forms."""
    if value is None or isinstance(value, Bytes | Share):
        return value
    match = _AMOUNT.fullmatch(str(value))
    if match is None:
        raise ValueError(_HINT)
    number, unit = float(match[1]), match[2].lower()
    if unit == "%":
        number, unit = number / 100, ""
        if number > 1:
            raise ValueError("a share is at most 100%")
    if unit not in _UNITS or not math.isfinite(number) or number <= 0:
        raise ValueError(_HINT)
    if unit == "" and number <= 1:
        return Share(number)
    if number * _UNITS[unit] < _LEAST_BYTES:
        raise ValueError(_HINT)
    return Bytes(int(number * _UNITS[unit]))
