"""When the thoughts of a reply end, told from its token ids alone: what a grammar waits for. Knows no tokenizer."""

from collections import deque
from collections.abc import Callable, Sequence

from .formats import Place
from .generic import TOOL_FORMATS
from .reasoning_formats import REASONING_FORMATS

Marker = tuple[int, ...]
_SUFFIX = 32  # tokens that are decoded to find a tag that is plain text


class ReasoningGate:
    """One reply's, so never shared. Once thoughts have ended, they have ended: a later opening tag changes nothing."""

    def is_reasoning_end(self, ids: Sequence[int]) -> bool:
        """Whether the last tag of thoughts in `ids` ends one."""
        raise NotImplementedError

    def is_reasoning_end_streaming(self, ids: Sequence[int], delta_ids: Sequence[int]) -> bool:
        """Whether thoughts have ended with `delta_ids`, the tokens sampled since the last call and the end of `ids`."""
        return self.is_reasoning_end(ids)


class TokenGate(ReasoningGate):
    """`starts` and `ends` are tags as ids. A step costs as much as its delta, at any history.

    `turn_ids` begin a turn: no tag before the last of them counts. `num_free` is, of the delta that ended the thoughts,
    how many tokens belong to them, the tag included; what follows is bound by the grammar.
    """

    def __init__(self, starts: Sequence[Marker], ends: Sequence[Marker], *, turn_ids: frozenset[int] = frozenset()):
        self.has_ended = False
        self.num_free: int | None = None
        self._turn_ids = turn_ids
        self._tags = [(tag, True) for tag in ends if tag] + [(tag, False) for tag in starts if tag]
        self._tags.sort(key=lambda tag: len(tag[0]), reverse=True)
        self._last_ids = frozenset(tag[-1] for tag, _ in self._tags)
        self._suffix: deque[int] = deque(maxlen=max((len(tag) for tag, _ in self._tags), default=1))

    def is_reasoning_end(self, ids: Sequence[int]) -> bool:
        return self.last_tag_ends(ids) is True

    def last_tag_ends(self, ids: Sequence[int]) -> bool | None:
        """Whether the last tag of this turn ends a thought; None: there is no tag."""
        for end in range(len(ids), 0, -1):
            if ids[end - 1] in self._last_ids:
                for tag, is_end in self._tags:
                    if tuple(ids[max(0, end - len(tag)) : end]) == tag:
                        return is_end
            if ids[end - 1] in self._turn_ids:
                return None
        return None

    def is_reasoning_end_streaming(self, ids: Sequence[int], delta_ids: Sequence[int]) -> bool:
        if self.has_ended:
            self.num_free = 0
            return True
        for index, token_id in enumerate(delta_ids):
            self._suffix.append(token_id)
            if token_id in self._last_ids and self._is_end():
                self.has_ended = True
                self.num_free = index + 1
                return True
        return False

    def _is_end(self) -> bool:
        suffix = tuple(self._suffix)
        return next((is_end for tag, is_end in self._tags if suffix[-len(tag) :] == tag), False)


class TextGate(ReasoningGate):
    """For tags that are plain text, which tokenizers merge with what stands around them.

    `decode` gives the text of ids; a step decodes no more than the last few tokens.
    """

    def __init__(self, starts: Sequence[str], ends: Sequence[str], decode: Callable[[Sequence[int]], str]):
        self.has_ended = False
        self.num_free: int | None = None
        self._starts = tuple(starts)
        self._ends = tuple(ends)
        self._decode = decode
        self._suffix: deque[int] = deque(maxlen=_SUFFIX)

    def is_reasoning_end(self, ids: Sequence[int]) -> bool:
        text = self._decode(ids)
        last_start = max((text.rfind(tag) for tag in self._starts), default=-1)
        return max(text.rfind(tag) for tag in self._ends) > last_start

    def is_reasoning_end_streaming(self, ids: Sequence[int], delta_ids: Sequence[int]) -> bool:
        if self.has_ended:
            self.num_free = 0
            return True
        for index, token_id in enumerate(delta_ids):
            self._suffix.append(token_id)
            text = self._decode(list(self._suffix))
            if any(tag in text for tag in self._ends):
                self.has_ended = True
                self.num_free = index + 1
                return True
        return False


def make_gate(
    reasoning: str,
    *,
    token_id: Callable[[str], int | None],  # of a text that is one token
    encode: Callable[[str], Sequence[int]],
    decode: Callable[[Sequence[int]], str],
    tools: str | None = None,  # the tags that open a call end thoughts, too
    turn_ids: frozenset[int] = frozenset(),
) -> ReasoningGate:
    """The gate of a reasoning format for one tokenizer: by ids where each tag holds a token of its own."""
    format = REASONING_FORMATS[reasoning]
    starts, ends = format.gate or (format.opens, format.closes)

    def marker(tag: str) -> Marker:
        known = token_id(tag)
        return (known,) if known is not None else tuple(encode(tag))

    main_end = marker(ends[0])
    if len(main_end) > 1 and not any(token_id(part) is not None for part in format.atoms):
        return TextGate(starts, ends, decode)
    calls = TOOL_FORMATS[tools].openings if tools is not None else ()
    call_ids = [token_id(opening.marker) for opening in calls if opening.place is Place.ANYWHERE]
    all_ends = [*map(marker, ends), *((call_id,) for call_id in call_ids if call_id is not None)]
    return TokenGate([marker(tag) for tag in starts], all_ends, turn_ids=turn_ids)
