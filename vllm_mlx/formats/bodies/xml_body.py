"""Calls with a tag for each argument: `<function=name><parameter=key>value</parameter></function>`."""

import re
from collections.abc import Iterable
from dataclasses import replace
from enum import Enum, auto

from .arguments import ArgumentsWriter
from .body import Body, BodyContext, BodyStatus, begins_object, skip_white
from .xml_tags import MAX_HEAD, Head, XmlTags

_MAX_MARGIN = 64  # characters of white space; a closing tag before more of it always counts
_OBJECT = "arguments"  # the name of one object of all arguments
_CDATA, _END_CDATA = "<![CDATA[", "]]>"


class _State(Enum):
    START = auto()
    NAME = auto()
    BETWEEN = auto()
    KEY = auto()
    TYPE = auto()  # between the name of an argument and its value
    VALUE = auto()
    CDATA = auto()
    AFTER_CDATA = auto()
    OBJECT = auto()  # the one object of all arguments


class XmlBody(Body):
    """A tag inside a value ends the value only if the format continues after the tag; otherwise it is text.

    A tag around the body also ends a value if it begins a line. `name`: the call's name, if it was read before.
    """

    def __init__(self, context: BodyContext, tags: XmlTags, name: str | None = None):
        super().__init__(context)
        self._enclosing = context.enclosing
        self._tags = tags = tags.encoded(context.encode)
        ends = (tags.end_parameter, tags.end_function, tags.parameter, *self._enclosing)
        self._first_chars = re.compile("[" + re.escape("".join({tag[0] for tag in ends if tag})) + "]")
        self._state = _State.START
        self._writer = ArgumentsWriter(None)
        self.has_begun = False
        self._doubles: tuple[str, ...] = ()  # the texts just read, which the model may write twice
        self._head = Head("")  # the head of the argument that is being read
        self._is_fresh = False  # no character of the value was read
        self._is_empty = False  # no character of the value was emitted
        self._ends_line = False  # the value so far ends with a line break
        self._final_break = ""  # the last line break of a value, which is layout unless the reply was cut after it
        if name is not None:
            self._set_name(name)

    def _read(self, text: str, position: int, final: bool) -> int:
        match self._state:
            case _State.VALUE if self._is_fresh:
                return self._begin_value(text, position, final)
            case _State.VALUE:
                return self._read_value(text, position, final)
            case _State.CDATA:
                return self._read_cdata(text, position, final)
            case _State.OBJECT:
                return self._read_object(text, position)
            case _State.NAME | _State.KEY:
                return self._read_head(text, position, final)
        return self._read_tag(text, skip_white(text, position), final)

    @property
    def reads_tags(self) -> bool:
        return self._state is _State.START

    def take_arguments(self) -> str:
        return self._writer.take()

    def close(self) -> bool:
        if self._state in (_State.VALUE, _State.AFTER_CDATA):
            self._end_value()
        if self._state is not _State.BETWEEN:
            return False
        self._writer.close()
        self.has_begun = True
        return True

    def cut(self, rest: str) -> None:
        if self._state in (_State.VALUE, _State.CDATA):
            self.consume(self._without_partial_tag(rest), final=True)
        if self._state in (_State.VALUE, _State.CDATA):
            self._writer.feed(self._final_break)
        self._writer.cut()

    def end(self) -> bool:
        is_whole = self._state is _State.BETWEEN
        if self._state in (_State.VALUE, _State.CDATA, _State.AFTER_CDATA):
            self._end_value()
        self._writer.close()
        return is_whole

    def _set_name(self, name: str) -> None:
        self.name = name
        self._writer = ArgumentsWriter(self._context.schemas.get(name))
        self._state = _State.BETWEEN

    # Tags between values

    def _read_tag(self, text: str, position: int, final: bool) -> int:
        if self._state is _State.BETWEEN and text[position : position + 1] in ("{", "}"):
            return self._read_brace(text, position, final)
        tags = tuple(tag for tag in self._next_tags() if tag)
        for tag in (*tags, *self._doubles):
            if text.startswith(tag, position):
                return self._enter(tag, text, position, final) if tag in tags else position + len(tag)
        self._stop(may_grow=not final and _may_become(text, position, (*tags, *self._doubles)))
        return position

    def _read_brace(self, text: str, position: int, final: bool) -> int:
        """Begin one object of all arguments, which replaces the tags, or read a brace too many after it."""
        if text[position] == "}" and self._writer.object.done:
            return position + 1
        is_object = False if self.has_begun else begins_object(text, position)
        if not is_object:
            self._stop(may_grow=is_object is None and not final)
        else:
            self.has_begun = True
            self._is_fresh = False
            self._state = _State.OBJECT
        return position

    def _next_tags(self) -> tuple[str, ...]:
        tags = self._tags
        match self._state:
            case _State.START:
                return (tags.function,)
            case _State.TYPE:
                return (tags.value, tags.type)
            case _State.AFTER_CDATA:
                return (tags.end_parameter, _CDATA)
        return (tags.parameter, tags.end_function, tags.object, tags.end_object)

    def _enter(self, tag: str, text: str, position: int, final: bool) -> int:
        tags = self._tags
        end = position + len(tag)
        match self._state:
            case _State.START:
                self._state = _State.NAME
            case _State.TYPE if tag == tags.value:
                self._open_value()
            case _State.TYPE:
                return self._read_type(text, position, final)
            case _State.AFTER_CDATA if tag == _CDATA:
                self._state = _State.CDATA
            case _State.AFTER_CDATA:
                self._end_value()
            case _ if tag == tags.end_function:
                self.close()
                self.status = BodyStatus.DONE
            case _ if tag != tags.end_object:
                self.has_begun = True
                if tag == tags.object:
                    self._tags = replace(tags, parameter=tags.object, end_parameter=tags.end_object)
                self._state = _State.KEY
        return end

    def _read_head(self, text: str, position: int, final: bool) -> int:
        head_end = self._tags.head_end
        own = self._tags.function if self._state is _State.NAME else self._tags.parameter
        if text.startswith(own, start := skip_white(text, position)):
            return start + len(own)
        end, head = self._tags.head_at(text, position, head_end)
        if head is None and self._is_object and text.startswith(head_end, end):
            head = Head(_OBJECT)
        if head is None:
            is_double = len(text) - position < MAX_HEAD and own.startswith(text[position:].lstrip())
            self._stop(may_grow=not final and (is_double or head_end.startswith(text[end:])))
            return position
        self._doubles = () if head_end == ">" else (head_end,)
        if self._state is _State.NAME:
            self._set_name(head.name)
            self._doubles += (own + text[position:end] + head_end,)
        else:
            self._head = head
            self._state = _State.TYPE
            if self._is_object and self._writer.is_empty:
                self._state = _State.OBJECT
                self._is_fresh = True
            elif not self._tags.value:
                self._open_value()
        return end + len(head_end)

    def _read_type(self, text: str, position: int, final: bool) -> int:
        tags = self._tags
        start = position + len(tags.type)
        places = [(text.find(tag, start, start + MAX_HEAD), tag) for tag in (tags.end_type, tags.value)]
        end, tag = min((place for place in places if place[0] >= 0), default=(-1, ""))
        if end >= 0:
            self._head = Head(self._head.name, text[start:end].strip() == "string")
            return end + (len(tag) if tag == tags.end_type else 0)
        self._stop(may_grow=not final and len(text) - start < MAX_HEAD)
        return position

    @property
    def _is_object(self) -> bool:
        """Return whether the value being read is one object of all arguments."""
        return self._state is not _State.NAME and self._tags.parameter == self._tags.object

    def _stop(self, *, may_grow: bool) -> None:
        self.status = BodyStatus.WAITING if may_grow else BodyStatus.STUCK

    def _wait_if(self, may_grow: bool) -> None:
        self.status = BodyStatus.WAITING if may_grow else self.status

    def _read_object(self, text: str, position: int) -> int:
        if self._is_fresh:
            position = skip_white(text, position)
            if position == len(text):
                return position
            self._is_fresh = False
            if text[position] != "{":
                self._open_value()
                return position
        position = self._writer.read_object(text, position)
        if self._writer.object.failed:
            self.status = BodyStatus.FAILED
        elif self._writer.object.done:
            self._state = _State.BETWEEN
        return position

    # Values

    def _open_value(self) -> None:
        self._writer.begin(self._head.name, is_string=self._head.is_string)
        self._state = _State.VALUE
        self._is_fresh = self._is_empty = True
        self._ends_line = False
        self._final_break = ""

    def _begin_value(self, text: str, position: int, final: bool) -> int:
        if self._tags.has_cdata:
            start = skip_white(text, position)
            if text.startswith(_CDATA, start):
                self._is_fresh = False
                self._state = _State.CDATA
                return start + len(_CDATA)
            if not final and len(text) - position <= MAX_HEAD and _may_become(text, start, (_CDATA,)):
                self.status = BodyStatus.WAITING
                return position
        self._is_fresh = False
        return position + (self._tags.trims_breaks and text[position] == "\n")

    def _read_cdata(self, text: str, position: int, final: bool) -> int:
        end = text.find(_END_CDATA, position)
        if end >= 0:
            self._keep(text[position:end])
            self._state = _State.AFTER_CDATA
            return end + len(_END_CDATA)
        end = len(text)
        while not final and end > position and len(text) - end < len(_END_CDATA) - 1 and text[end - 1] == "]":
            end -= 1
        self._keep(text[position:end])
        self._wait_if(end < len(text))
        return end

    def _read_value(self, text: str, position: int, final: bool) -> int:
        hit = self._first_chars.search(text, position)
        while hit is not None:
            less = hit.start()
            follows_break = text[less - 1] == "\n" if less > position else self._ends_line
            end = less - (less > position and follows_break and self._tags.trims_breaks)
            starts_line = follows_break or (less == position and self._is_empty)
            next_position = self._tag_at(text, less, starts_line, final)
            if self.status is BodyStatus.WAITING:
                self._keep(text[position:end])
                return end
            if next_position is not None:
                self._keep(text[position:end])
                self._end_value()
                return next_position
            hit = self._first_chars.search(text, less + 1)
        end = len(text) - (self._tags.trims_breaks and len(text) > position and text[-1] == "\n")
        self._keep(text[position:end])
        if final:
            self._final_break = text[end:]
            return len(text)
        self._wait_if(end < len(text))
        return end

    def _keep(self, text: str) -> None:
        if text:
            self._is_empty = False
            self._ends_line = text[-1] == "\n"
            self._writer.feed(text)

    def _end_value(self) -> None:
        self._writer.end()
        self._state = _State.BETWEEN

    def _tag_at(self, text: str, start: int, starts_line: bool, final: bool) -> int | None:
        """Return the place after a tag at `start` that ends the value. Waits if more text is needed."""
        tags = self._tags
        if text.startswith(tags.end_parameter, start):
            end = start + len(tags.end_parameter)
            followers = tuple(tag for tag in (tags.parameter, tags.end_function, *self._enclosing) if tag)
            return end if self._is_followed(text, end, followers, final) else None
        if tags.end_function and text.startswith(tags.end_function, start):
            followers = tuple(tag for tag in (tags.function, *self._enclosing) if tag)
            return start if self._is_followed(text, start + len(tags.end_function), followers, final) else None
        if text.startswith(tags.parameter, start):
            return start if self._is_next_parameter(text, start + len(tags.parameter), starts_line, final) else None
        enclosing = self._enclosing if starts_line else ()
        if any(text.startswith(tag, start) for tag in enclosing):
            return start
        candidates = (tags.end_parameter, tags.end_function, tags.parameter, *enclosing)
        self._wait_if(not final and _may_become(text, start, candidates))
        return None

    def _without_partial_tag(self, text: str) -> str:
        """Return the text without the start of a tag at its end, where the reply was cut."""
        tags = self._tags
        ends = tuple(tag for tag in (tags.end_parameter, tags.end_function, tags.parameter, *self._enclosing) if tag)
        starts = (found.start() for found in self._first_chars.finditer(text[:-1]))
        return text[: next((start for start in starts if _may_become(text, start, ends)), None)]

    def _is_followed(self, text: str, position: int, followers: tuple[str, ...], final: bool) -> bool:
        following = skip_white(text, position)
        is_last = (final and following == len(text)) or following - position > _MAX_MARGIN
        if is_last or any(text.startswith(tag, following) for tag in followers):
            return True
        may_follow = _may_become(text, following, followers)
        self._wait_if(not final and may_follow)
        return final and may_follow

    def _is_next_parameter(self, text: str, position: int, starts_line: bool, final: bool) -> bool:
        """Return whether an argument's tag inside a value begins the next one: the model omitted the closing tag."""
        end, head = self._tags.head_at(text, position, self._tags.head_end)
        if head is None:
            self._wait_if(not final and self._tags.head_end.startswith(text[end:]))
            return False
        is_expected = self._writer.expects(head.name)
        return starts_line if is_expected is None else is_expected


def _may_become(text: str, start: int, tags: Iterable[str]) -> bool:
    return any(tag.startswith(text[start : start + MAX_HEAD]) for tag in tags)
