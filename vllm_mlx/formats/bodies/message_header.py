"""Reads headers of messages and of reasoning, which give the kind of the text after them."""

import re
from collections.abc import Callable
from functools import lru_cache, partial

from .body import Body, BodyContext, BodyStatus, Chooser, NewBody, skip_white
from .compose import StepsBody, Tag
from .json_body import ObjectBody

HEADER_TAGS = ("<|message|>", "<|start|>", "<|channel|>", "<|constrain|>")  # the first one ends a header
_MAX_HEADER = 512
_WORDS = ("analysis", "commentary", "final", "assistant", "user", "system", "developer", "tool", "json", "code")
_CHANNEL_NAME = rf"(?:{'|'.join(_WORDS[:3])})(?![a-z])"
_ROLE = rf"(?:{'|'.join(_WORDS[3:8])})(?:(?![a-z])|(?={_CHANNEL_NAME}))"
_WORD = r"[a-z][a-z0-9_./:-]*+"
_DASHES = "–—−-"  # a model may begin a header with them
_UNREAD = re.compile(rf"(?:\s*[A-Za-z0-9_./:={_DASHES}]*+){{3}}\s*")  # words of a header, if a tag follows them
_NAME = r"[^\s<{\ud800-\udfff]+"
_RECIPIENT = re.compile(rf"\bto=({_NAME})")
_END_CALL = "<|call|>"
READERS = frozenset({"assistant", "user", "system", "developer", "all", "self"})
_NOT_TOOLS = READERS | {"browser", "python", "container"}  # the last three are tools that only their vendor has
_SUFFIX = re.compile(r"[\w-]{0,64}")
_CHANNEL = re.compile(r"[^\S\n]*(?:[\w-]+(?:[^\S\n]*(?=\n|\Z))?)?", re.ASCII)
_THOUGHTS = frozenset({"", "thought", "thoughts", "thinking", "think", "analysis", "reasoning"})
_ANSWERS = frozenset({"content", "final", "answer", "response", "output", "message", "commentary"})
_MAX_CHANNEL = 40

Route = Callable[[str, BodyContext], Body | BodyStatus]  # gets the words of a header


class _Grammar:
    """`[role] [to=recipient] [<|channel|>channel] [to=recipient] [<|constrain|>format] [<|message|>]`, in any order."""

    def __init__(self, encode: Callable[[str], str]):
        self.tags = tuple(map(encode, HEADER_TAGS))
        self.end_call = encode(_END_CALL)
        end, start, channel, constrain = map(re.escape, self.tags)
        follows = rf"(?=\s*(?:to=|{constrain}|{end}))"  # signs that an unknown word belongs to the header
        parts = (
            rf"{start}\s*(?:(?:{_ROLE}|{_WORD}{follows})(?:\s*{_CHANNEL_NAME})?)?",
            rf"{channel}(?:[\s{_DASHES}]*{_CHANNEL_NAME}|\s*{_WORD}(?:\s+{_WORD})?{follows})?",
            rf"{constrain}\s*(?:(?:json|code)(?![a-z])|[A-Za-z][A-Za-z0-9_./:+-]*+(?=\s*(?:{end}|{{)))?",
            rf"to=(?:[\w./:-]+(?=\s*(?:{channel}|{constrain}|{end}))|(?:user|self|assistant)(?![a-z0-9_./:-])|{_NAME})",
        )
        any_part = rf"(?:\s*(?:{'|'.join(parts)}))*+"
        format = rf"(?:\s*(?i:json|code)(?=\s*(?:\{{|{constrain}|{end})))?"
        self._header = re.compile(rf"(?:\s*{_ROLE}(?=\s*to=))?{any_part}{format}(?:\s*{end})?", re.ASCII)
        self.any_tag = re.compile("|".join(map(re.escape, self.tags)))

    def header(self, text: str) -> str:
        """Return the header that the text begins with, or "" if it contains no tag."""
        found = self._header.match(text)
        return found.group() if found is not None and self.any_tag.search(found.group()) else ""

    def may_continue(self, rest: str) -> bool:
        """Return whether `rest`, which follows a header, may be a part of it once more text is known."""
        unread = _UNREAD.match(rest)
        return unread is None or any(tag.startswith(rest[unread.end() :]) for tag in (*self.tags, self.end_call))

    def is_cut_part(self, header: str, rest: str) -> bool:
        """Return whether the reply was cut in `rest`, which is the beginning of a tag or a word behind the header."""
        words = _WORDS if header.endswith(self.tags) else _WORDS[-2:] if "to=" in header else ()
        return any(part.startswith(rest.strip(f" \n{_DASHES}")) for part in (*self.tags, "to=", *words))


_grammar = lru_cache(maxsize=256)(_Grammar)


def without_header(text: str, encode: Callable[[str], str]) -> str:
    return text[len(_grammar(encode).header(text[: 2 * _MAX_HEADER])) :]


class HeaderBody(Chooser):
    """Reads a header. `route` returns the next part: the body of a call, or another part of a reply.

    `marker`: the tag before the header. A header without `<|message|>` ends at the first other word, and a call without
    a message has no arguments.
    """

    ends_with_reply = True

    def __init__(self, context: BodyContext, route: Route, marker: str):
        super().__init__(context)
        self._route = route
        self._marker = context.encode(marker)

    def _choose(self, text: str, final: bool) -> int:
        grammar, text, is_limit = _grammar(self._context.encode), text[:_MAX_HEADER], len(text) >= _MAX_HEADER
        header = grammar.header(self._marker + text)
        end = max(0, len(header) - len(self._marker))
        is_ended = header.endswith(grammar.tags[0])
        if not (final or is_ended or is_limit) and grammar.may_continue(text[end:]):
            return 0
        words = grammar.any_tag.sub(" ", header).strip()
        is_cut = final and not is_ended and header != "" and grammar.is_cut_part(header, text[end:])
        if not (is_cut or is_ended):
            end = skip_white(text, end)
        target = self._route(words, self._context) if is_cut or words or is_ended else BodyStatus.STUCK
        if not isinstance(target, BodyStatus) and (is_ended or text.startswith(("{", grammar.end_call), end)):
            self.chosen = StepsBody(self._context, (Tag(HEADER_TAGS[:1], optional=True),), lambda *_: target)
        else:
            self.status = target if isinstance(target, BodyStatus) else BodyStatus.TEXT
        return 0 if self.status is BodyStatus.STUCK else len(text) if is_cut else end


def harmony_route(words: str, context: BodyContext) -> Body | BodyStatus:
    """Return the part of a message: a call if its recipient is a declared tool, or a name after `functions.`.

    Any other message is content in the channel `final`. Else it is reasoning in the channel `analysis` and if it has a
    recipient other than the user, such as the vendor's own tools. In another channel it is content, but if its
    recipient is another role, it is dropped where the reply has other content or a call.
    """
    recipients: list[str] = _RECIPIENT.findall(words)
    for recipient in recipients:
        name = context.tool_name(recipient)
        may_be_tool = not context.schemas and recipient.partition(".")[0] not in _NOT_TOOLS
        if context.may_call and (name in context.schemas or name != recipient or may_be_tool):
            return ObjectBody(context, name)
    channel = re.findall(_CHANNEL_NAME, _RECIPIENT.sub("", words))[-1:]
    others = [recipient for recipient in recipients if recipient not in ("user", "all")]
    if channel == ["final"] or not (others or channel == ["analysis"]):
        return BodyStatus.TEXT
    is_read = channel == ["analysis"] or not READERS.issuperset(others)
    return BodyStatus.REASONING if is_read else BodyStatus.NOTHING


def recipient_route(words: str, context: BodyContext) -> Body | BodyStatus:
    """Return the part of a message: reasoning with `to=self`, otherwise content."""
    return BodyStatus.REASONING if _RECIPIENT.findall(words)[-1:] == ["self"] else BodyStatus.TEXT


class SuffixBody(Body):
    """The word that a tag carries, and its end, as in `<think:word>`. `found`: the text after the tag."""

    def __init__(self, context: BodyContext, found: BodyStatus):
        super().__init__(context)
        self._found = found

    def _read(self, text: str, position: int, final: bool) -> int:
        word = _SUFFIX.match(text, position)
        assert word is not None
        end = word.end()
        if end > position and text.startswith(">", end):
            self.status = self._found
            return end + 1
        self.status = BodyStatus.WAITING if end == len(text) and not final else BodyStatus.STUCK
        return position


class ChannelBody(Body):
    """The name of a channel, alone on a line. `usual`: the name that text may follow on the same line.

    A channel is reasoning unless it is named like an answer. An unknown word is text, because the model may
    leave the name out.
    """

    ends_with_reply = True

    def __init__(self, context: BodyContext, usual: str):
        super().__init__(context)
        self._usual = usual

    def _read(self, text: str, position: int, final: bool) -> int:
        found = _CHANNEL.match(text, position, position + _MAX_CHANNEL + 1)
        assert found is not None
        end, name = found.end(), found.group().strip()
        if end == len(text) and not final:
            self.status = BodyStatus.WAITING
            return position
        self.status = BodyStatus.TEXT if name in _ANSWERS and text.startswith("\n", end) else BodyStatus.REASONING
        if (name in _THOUGHTS | _ANSWERS and text.startswith("\n", end)) or name == self._usual:
            return end
        return position + len(self._usual) if text.startswith(self._usual, position) else position


def header(route: Route, marker: str = "") -> NewBody:
    return partial(HeaderBody, route=route, marker=marker)


def suffix(found: BodyStatus) -> NewBody:
    return partial(SuffixBody, found=found)
