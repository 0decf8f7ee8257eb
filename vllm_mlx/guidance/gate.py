"""When the thoughts of a reply end, told from its token ids alone: what a grammar waits for. Knows no tokenizer."""

from collections.abc import Callable, Sequence

from ..core.constraint import Tag, TagWatch
from ..formats.formats import Place
from ..formats.generic import TOOL_FORMATS
from ..formats.reasoning_formats import REASONING_FORMATS
from .watch import Marker, TagIds, TextWatch, TokenWatch


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
        self._turn_ids = turn_ids
        self._watch = TokenWatch(TagIds(tuple(starts), tuple(ends)))
        self._state = _Latch(self._watch)

    @property
    def num_free(self) -> int | None:
        return self._state.num_free

    def is_reasoning_end(self, ids: Sequence[int]) -> bool:
        return self.last_tag_ends(ids) is True

    def last_tag_ends(self, ids: Sequence[int]) -> bool | None:
        """Whether the last tag of this turn ends a thought; None: there is no tag."""
        found = self._watch.last(ids, self._turn_ids)
        return None if found is None else found[0] is Tag.END

    def is_reasoning_end_streaming(self, ids: Sequence[int], delta_ids: Sequence[int]) -> bool:
        return self._state.feed(delta_ids)


class TextGate(ReasoningGate):
    """For tags that are plain text. A step decodes no more than the last few tokens."""

    def __init__(
        self,
        starts: Sequence[str],
        ends: Sequence[str],
        encode: Callable[[str], Sequence[int]],
        decode: Callable[[Sequence[int]], str],
    ):
        self._starts = tuple(starts)
        self._ends = tuple(ends)
        self._decode = decode
        self._state = _Latch(TextWatch(starts, ends, encode, decode))

    @property
    def num_free(self) -> int | None:
        return self._state.num_free

    def is_reasoning_end(self, ids: Sequence[int]) -> bool:
        text = self._decode(ids)
        last_start = max((text.rfind(tag) for tag in self._starts), default=-1)
        return max(text.rfind(tag) for tag in self._ends) > last_start

    def is_reasoning_end_streaming(self, ids: Sequence[int], delta_ids: Sequence[int]) -> bool:
        return self._state.feed(delta_ids)


class _Latch:
    """Whether an end was seen, once and for all."""

    def __init__(self, watch: TagWatch):
        self._watch = watch
        self._has_ended = False
        self.num_free: int | None = None

    def feed(self, delta_ids: Sequence[int]) -> bool:
        if self._has_ended:
            self.num_free = 0
            return True
        for index, token_id in enumerate(delta_ids):
            if self._watch.feed(token_id) is Tag.END:
                self._has_ended = True
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
        return TextGate(starts, ends, encode, decode)
    calls = TOOL_FORMATS[tools].openings if tools is not None else ()
    call_ids = [token_id(opening.marker) for opening in calls if opening.place is Place.ANYWHERE]
    all_ends = [*map(marker, ends), *((call_id,) for call_id in call_ids if call_id is not None)]
    return TokenGate([marker(tag) for tag in starts], all_ends, turn_ids=turn_ids)
