"""Finds where one checkpoint's reasoning begins and ends, by token ids, in prompts and in replies."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ..core.config import ReasoningStrings
from ..core.sequence import ReasoningRule, Tag, TagWatch
from ..formats import Calls, ReasoningFormat
from ..formats.tokenizer import Tokenizer

Marker = tuple[int, ...]
_SUFFIX = 32  # tokens that are decoded to find a tag in plain text
_LAYOUT = ("\n", "\n\n")


@dataclass(frozen=True, slots=True)
class PromptState:
    """The state of reasoning at the end of a prompt: `tag` is the last tag of its last turn."""

    tag: Tag | None
    start: int = 0  # index of the start tag
    behind: tuple[int, ...] = ()  # the token ids that follow an opening tag


class CheckpointReasoning:
    """Decides where reasoning begins and ends: in prompts, for constraints and, by its format, for parsers."""

    def __init__(
        self, tokenizer: Tokenizer, reasoning: ReasoningFormat | None, strings: ReasoningStrings | None = None
    ):
        """`reasoning`: the format; `strings`: the user's own tags, which are added to it. At least one is set."""
        self._tokenizer = tokenizer
        self.format = _format(reasoning, strings, tokenizer)
        self.tags = self.format.bounds
        self._forced = None if strings is None else self._marker(strings.end)
        self._starts = tuple(map(self._marker, self.tags.starts))
        self._ends = tuple(map(self._marker, self.tags.ends))
        self._reads_text = len(self._ends[0]) > 1 and not any(atom in tokenizer for atom in self.tags.atoms)

    def rule(
        self,
        prompt: Sequence[int],
        *,
        budget: int | None,
        may_think: bool,
        tools: Calls | None,
        bounds_reply: bool,
    ) -> ReasoningRule:
        """Return the rule for a reply to this prompt. `tools`: the format of the calls that end reasoning.

        `bounds_reply`: a grammar constrains the text that follows the reasoning.
        """
        state = self.prompt_state(prompt)
        is_open = state.tag is Tag.START or (self.tags.is_implied and state.tag is None and may_think)
        return ReasoningRule(
            new_watch=lambda: self._watch(tools),
            starts=self._starts,
            end=self._end(state.start, bounds_reply),
            is_open=is_open,
            may_open=not is_open and may_think and state.tag is None,
            budget=budget,
            prompt_reasoning=self._without_layout(state.behind),
            layout=tuple(ids[0] for text in _LAYOUT if len(ids := self._encode(text)) == 1),
        )

    def is_open(self, prompt: Sequence[int]) -> bool:
        """Return whether the prompt has opened reasoning, so that the reply starts inside it."""
        return self.prompt_state(prompt).tag is Tag.START

    def prompt_state(self, ids: Sequence[int]) -> PromptState:
        """Find the tag that decides. Tags before the first added token of the last turn belong to earlier turns."""
        if self._reads_text:
            return self._text_state(ids)
        found = TokenWatch(self._starts, self._ends).last(ids, self._turn_ids)
        if found is None:
            return PromptState(None)
        tag, end = found
        written = (number for number, start in enumerate(self._starts) if tuple(ids[end - len(start) : end]) == start)
        return PromptState(tag, next(written, 0), tuple(ids[end:]))

    def _text_state(self, ids: Sequence[int]) -> PromptState:
        begin = next((at + 1 for at in range(len(ids) - 1, -1, -1) if self._tokenizer.added_token(ids[at])), 0)
        text = self._tokenizer.decode(ids[begin:])
        starts = [(text.rfind(tag), number) for number, tag in enumerate(self.tags.starts)]
        last_end = max(text.rfind(tag) for tag in self.tags.ends)
        position, number = max(starts, default=(-1, 0))
        if position > last_end:
            behind = text[position + len(self.tags.starts[number]) :]
            return PromptState(Tag.START, number, tuple(self._encode(behind)))
        return PromptState(Tag.END if last_end >= 0 else None)

    @cached_property
    def _turn_ids(self) -> frozenset[int]:
        """Return the added tokens that are in no tag of reasoning."""
        return frozenset(self._tokenizer.added.ids.values()).difference(*self._starts, *self._ends)

    def _watch(self, tools: Calls | None) -> TagWatch:
        if self._reads_text:
            return TextWatch(self.tags.starts, self.tags.ends, self._encode, self._tokenizer.decode)
        opening = tools.tags if tools is not None else ()
        calls = tuple((call_id,) for tag in opening if (call_id := self._tokenizer.token_id(tag)) is not None)
        return TokenWatch(self._starts, self._ends, calls)

    def _end(self, start: int, bounds_reply: bool) -> Marker:
        if self._forced is not None:
            return self._forced
        end = self.tags.end_for(start)
        return self._marker(end if bounds_reply else end + self.tags.header.lead)

    def _marker(self, tag: str) -> Marker:
        known = self._tokenizer.token_id(tag)
        return (known,) if known is not None else tuple(self._encode(tag))

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _without_layout(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """Drop white space after an opening tag, because the template wrote it."""
        skipped = 0
        while skipped < len(ids) and not self._tokenizer.token_text(ids[skipped]).strip():
            skipped += 1
        return ids[skipped:]


def _format(
    reasoning: ReasoningFormat | None, strings: ReasoningStrings | None, tokenizer: Tokenizer
) -> ReasoningFormat:
    if reasoning is None:
        assert strings is not None
        own = [token for token in tokenizer.marker_tokens if token in strings.end]
        return ReasoningFormat((strings.start,), (max(own, key=len) if own else strings.end.strip(),))
    if strings is None or strings.start in reasoning.bounds.starts:
        return reasoning
    headed = reasoning.headed and replace(reasoning.headed, starts=(*reasoning.headed.starts, strings.start))
    return replace(reasoning, opens=(*reasoning.opens, strings.start), headed=headed)


# Watching a reply, token by token: the cost of a token does not grow with the reply


class TokenWatch:
    """Watches for tags that contain an added token, so that token ids identify them."""

    def __init__(self, starts: Sequence[Marker], ends: Sequence[Marker], calls: Sequence[Marker] = ()):
        self.leftover: tuple[int, ...] = ()
        kinds = ((ends, Tag.END), (calls, Tag.CALL), (starts, Tag.START))
        tags = [(ids, kind) for tags, kind in kinds for ids in tags if ids]
        self._tags = sorted(tags, key=lambda tag: len(tag[0]), reverse=True)
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

    `leftover`: the text after the last tag, if the tag's last token contains such text; it is tokenized again.
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
        """Return the tag that this token completes. A found tag restarts the search, so it is not found twice."""
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
