"""The records of a journal, and what is left of them when they are read in order. Knows no file and no thread.

A record is a line of JSON, and for one that keeps a value a second line with the value.
"""

import json
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Kept:
    """A value that a journal keeps. It is used whenever one is used whose `base` it is."""

    name: str
    salt: str
    base: str | None
    body: bytes
    frame: bytes  # that holds it

    def value(self) -> Any:
        """Raises ValueError if it is no JSON."""
        return json.loads(_text(self.body))


def put_record(name: str, salt: str, base: str | None, value: Any) -> bytes:
    """Keep a value, in place of an earlier one of the same name. It counts as used now."""
    return _line("put", name, salt, base) + b"\n" + _bytes(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def drop_record(names: Iterable[str]) -> bytes:
    return _line("drop", *names)


def use_record(names: Iterable[str]) -> bytes:
    """Count values as used, one after the other, and after each its bases."""
    return _line("use", *names)


class Replay:
    """What is kept after a number of records."""

    def __init__(self) -> None:
        self.values: dict[str, Kept] = {}  # in the order in which they were put
        self.order: OrderedDict[str, None] = OrderedDict()  # their names, those first whose last use is longest ago
        self.unread: list[bytes] = []  # frames of records that cannot be read here
        self.has_gaps = False  # whether there were values that are not kept

    @property
    def num_bytes(self) -> int:
        return sum(len(kept.frame) for kept in self.values.values()) + sum(map(len, self.unread))

    def take(self, record: bytes, frame: bytes) -> None:
        """Apply the next record, which `frame` holds. One that cannot be understood is left as it is."""
        line, _, body = record.partition(b"\n")
        match _words(line):
            case ["put", str(name), str(salt), str() | None as base]:
                self._put(Kept(name, salt, base, body, frame))
            case ["drop", *names]:
                self._drop(names)
            case ["use", *names]:
                for name in names:
                    self._use(name)
            case _:
                self.unread.append(frame)

    def clear(self, salts: str) -> None:
        """Drop the values of salts that begin with `salts`. What cannot be read may have any salt."""
        self._drop([name for name, kept in self.values.items() if kept.salt.startswith(salts)])
        if not salts:
            self.unread.clear()

    def shrink(self, max_bytes: int) -> list[str]:
        """Drop what cannot be read, then what was not used for longest. Returns the names of dropped values."""
        excess = self.num_bytes - max_bytes
        while excess > 0 and self.unread:
            excess -= len(self.unread.pop(0))
        dropped = []
        while excess > 0 and self.order:
            name = next(iter(self.order))
            excess -= len(self.values[name].frame)
            self._drop([name])
            dropped.append(name)
        return dropped

    def _put(self, kept: Kept) -> None:
        self._drop([kept.name])
        self.values[kept.name] = kept
        self._use(kept.name)

    def _drop(self, names: Iterable[Any]) -> None:
        for name in names:
            self.has_gaps |= self.values.pop(name, None) is not None
            self.order.pop(name, None)

    def _use(self, name: str | None) -> None:
        seen = set()
        while name is not None and name not in seen and name in self.values:
            seen.add(name)
            self.order[name] = None
            self.order.move_to_end(name)
            name = self.values[name].base


def _line(*items: str | None) -> bytes:
    return _bytes(json.dumps(items, ensure_ascii=False, separators=(",", ":")))


def _words(line: bytes) -> list[Any]:
    """Empty if they are none."""
    try:
        words = json.loads(_text(line))
    except (ValueError, RecursionError):
        return []
    is_line = isinstance(words, list) and all(word is None or isinstance(word, str) for word in words)
    return words if is_line else []


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")
