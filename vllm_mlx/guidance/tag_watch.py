"""Finds the tags of reasoning and calls in a reply, token by token. The cost of a token never grows."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ..core.sequence import Tag

Marker = tuple[int, ...]
_SUFFIX = 32  # tokens that are decoded to find a tag in plain text


@dataclass(frozen=True, slots=True)
class TagIds:
    """The tags of reasoning and of calls, as token ids."""

    starts: tuple[Marker, ...]
    ends: tuple[Marker, ...]
    calls: tuple[Marker, ...] = ()

    def longest_first(self) -> list[tuple[Marker, Tag]]:
        kinds = ((self.ends, Tag.END), (self.calls, Tag.CALL), (self.starts, Tag.START))
        tags = [(ids, kind) for tags, kind in kinds for ids in tags if ids]
        return sorted(tags, key=lambda tag: len(tag[0]), reverse=True)


class TokenWatch:
    """Watches for tags that contain a token of their own, and are found by their ids."""

    def __init__(self, tags: TagIds):
        self.leftover: tuple[int, ...] = ()
        self._tags = tags.longest_first()
        self._last_ids = frozenset(ids[-1] for ids, _ in self._tags)
        self._suffix: deque[int] = deque(maxlen=max((len(ids) for ids, _ in self._tags), default=1))

    def feed(self, token_id: int) -> Tag | None:
        self._suffix.append(token_id)
        if token_id not in self._last_ids:
            return None
        suffix = tuple(self._suffix)
        return next((kind for ids, kind in self._tags if suffix[-len(ids) :] == ids), None)

    def last(self, ids: Sequence[int], turn_ids: frozenset[int] = frozenset()) -> tuple[Tag, int] | None:
        """Return the last tag of `ids` and where it ends. The search stops at the last of `turn_ids`."""
        for end in range(len(ids), 0, -1):
            if ids[end - 1] in self._last_ids:
                for tag, kind in self._tags:
                    if tuple(ids[max(0, end - len(tag)) : end]) == tag:
                        return kind, end
            if ids[end - 1] in turn_ids:
                return None
        return None


class TextWatch:
    """Watches for tags that are plain text, which tokenizers merge with the text around them.

    `leftover`: the text behind the last tag that its last token contained, as ids of its own.
    """

    def __init__(
        self,
        starts: Iterable[str],
        ends: Iterable[str],
        encode: Callable[[str], Sequence[int]],
        decode: Callable[[Sequence[int]], str],
    ):
        self._tags = [(tag, Tag.END) for tag in ends if tag] + [(tag, Tag.START) for tag in starts if tag]
        self._encode = encode
        self._decode = decode
        self._suffix: deque[int] = deque(maxlen=_SUFFIX)
        self.leftover: tuple[int, ...] = ()

    def feed(self, token_id: int) -> Tag | None:
        """Return the tag that this token completes. A found tag restarts the search, so none is found twice."""
        self._suffix.append(token_id)
        text = self._decode(list(self._suffix))
        found = max(((text.rfind(tag), tag, kind) for tag, kind in self._tags), default=(-1, "", None))
        position, tag, kind = found
        if position < 0:
            return None
        self._suffix.clear()
        rest = text[position + len(tag) :].strip()
        self.leftover = tuple(self._encode(rest)) if rest else ()
        return kind
