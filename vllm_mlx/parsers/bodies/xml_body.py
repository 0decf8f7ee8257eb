"""`<function=name><parameter=key>value</parameter></function>`, values typed by the tool's schema."""

import re
from collections.abc import Iterable
from enum import Enum, auto

from .arguments import ArgumentsWriter
from .base import BodyStatus, Schemas

_FUNCTION, _END_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_PARAMETER = "<parameter=", "</parameter>"
_MAX_NAME = 256
_MAX_MARGIN = 64  # white space that may follow a closing tag before we believe it anyway
_NAME = re.compile(rf"[^<>\n]{{0,{_MAX_NAME}}}")
_WHITE = re.compile(r"\s*")


class _State(Enum):
    START = auto()
    NAME = auto()
    BETWEEN = auto()
    KEY = auto()
    VALUE = auto()


class XmlBody:
    """A tag inside a value ends it only where the format goes on behind it; otherwise it is part of the value.

    `enclosing` are the tags around the body that end it as text: behind a line break they end a value, too.
    """

    def __init__(self, schemas: Schemas, enclosing: Iterable[str] = ()):
        self.status = BodyStatus.OPEN
        self.name: str | None = None
        self._schemas = schemas
        self._enclosing = tuple(enclosing)
        self._state = _State.START
        self._writer = ArgumentsWriter(None)
        self._is_waiting = False  # for more text, to tell what the text in hand is
        self._is_fresh = False  # no character of the value was looked at
        self._is_empty = False  # no character of the value was kept
        self._final_break = ""  # the line break that ends a value, unless the reply was cut behind it

    def consume(self, text: str, *, final: bool = False) -> int:
        self.status = BodyStatus.OPEN
        self._is_waiting = False
        position = 0
        while position < len(text) and self.status is BodyStatus.OPEN and not self._is_waiting:
            match self._state:
                case _State.VALUE:
                    position = self._read_value(text, position, final)
                case _State.NAME | _State.KEY:
                    position = self._read_name(text, position, final)
                case _:
                    position = self._read_tag(text, _skip_white(text, position), final)
        return position

    def take_arguments(self) -> str:
        return self._writer.take()

    def close(self) -> bool:
        if self._state is _State.VALUE:
            self._end_value()
        if self._state is not _State.BETWEEN:
            return False
        self._writer.close()
        return True

    def cut(self, rest: str) -> None:
        if self._state is _State.VALUE:
            self.consume(rest, final=True)
        if self._state is _State.VALUE:
            self._writer.feed(self._final_break)
            self._writer.cut()

    def _read_tag(self, text: str, position: int, final: bool) -> int:
        tags = (_FUNCTION,) if self._state is _State.START else (_PARAMETER, _END_FUNCTION)
        for tag in tags:
            if text.startswith(tag, position):
                self._enter(tag)
                return position + len(tag)
        if not final and _may_become(text, position, tags):
            self._is_waiting = True
        else:
            self.status = BodyStatus.STUCK
        return position

    def _enter(self, tag: str) -> None:
        if tag == _END_FUNCTION:
            self._writer.close()
            self.status = BodyStatus.DONE
        else:
            self._state = _State.NAME if tag == _FUNCTION else _State.KEY

    def _read_name(self, text: str, position: int, final: bool) -> int:
        end, name = _name_at(text, position)
        if name is None:
            self._is_waiting = not final and end == len(text)
            if not self._is_waiting:
                self.status = BodyStatus.STUCK
            return position
        if self._state is _State.NAME:
            self.name = name
            self._writer = ArgumentsWriter(self._schemas.get(name))
            self._state = _State.BETWEEN
        else:
            self._writer.begin(name)
            self._state = _State.VALUE
            self._is_fresh = self._is_empty = True
        return end + 1

    def _read_value(self, text: str, position: int, final: bool) -> int:
        if self._is_fresh:
            self._is_fresh = False
            position += text[position] == "\n"
        less = text.find("<", position)
        while less >= 0:
            end = less - (less > position and text[less - 1] == "\n")
            starts_line = end < less or (less == position and self._is_empty)
            next_position = self._tag_at(text, less, starts_line, final)
            if self._is_waiting:
                self._keep(text[position:end])
                return end
            if next_position is not None:
                self._keep(text[position:end])
                self._end_value()
                return next_position
            less = text.find("<", less + 1)
        end = len(text) - (len(text) > position and text[-1] == "\n")
        self._keep(text[position:end])
        if final:
            self._final_break = text[end:]
            return len(text)
        self._is_waiting = end < len(text)
        return end

    def _keep(self, text: str) -> None:
        if text:
            self._is_empty = False
            self._writer.feed(text)

    def _end_value(self) -> None:
        self._writer.end()
        self._state = _State.BETWEEN

    def _tag_at(self, text: str, start: int, starts_line: bool, final: bool) -> int | None:
        """Where to read on if a tag at `start` ends the value. Sets `_is_waiting` where only more text can tell."""
        if text.startswith(_END_PARAMETER, start):
            end = start + len(_END_PARAMETER)
            followers = (_PARAMETER, _END_FUNCTION, *self._enclosing)
            return end if self._is_followed(text, end, followers, final) else None
        if text.startswith(_END_FUNCTION, start):
            followers = (_FUNCTION, *self._enclosing)
            return start if self._is_followed(text, start + len(_END_FUNCTION), followers, final) else None
        if text.startswith(_PARAMETER, start):
            return start if self._is_next_parameter(text, start + len(_PARAMETER), starts_line, final) else None
        enclosing = self._enclosing if starts_line else ()
        if any(text.startswith(tag, start) for tag in enclosing):
            return start
        tags = (_END_PARAMETER, _END_FUNCTION, _PARAMETER, *enclosing)
        self._is_waiting = not final and _may_become(text, start, tags)
        return None

    def _is_followed(self, text: str, position: int, followers: tuple[str, ...], final: bool) -> bool:
        following = _skip_white(text, position)
        if (final and following == len(text)) or following - position > _MAX_MARGIN:
            return True
        if any(text.startswith(tag, following) for tag in followers):
            return True
        self._is_waiting = not final and _may_become(text, following, followers)
        return False

    def _is_next_parameter(self, text: str, position: int, starts_line: bool, final: bool) -> bool:
        """Whether `<parameter=` inside a value begins the next one, the closing tag of this one being left out."""
        end, name = _name_at(text, position)
        if name is None:
            self._is_waiting = not final and end == len(text)
            return False
        is_expected = self._writer.expects(name)
        return starts_line if is_expected is None else is_expected


def _skip_white(text: str, position: int) -> int:
    white = _WHITE.match(text, position)
    return white.end() if white else position


def _may_become(text: str, start: int, tags: Iterable[str]) -> bool:
    rest = text[start : start + _MAX_NAME]
    return any(tag.startswith(rest) for tag in tags)


def _name_at(text: str, start: int) -> tuple[int, str | None]:
    """Return (end, name) of a name that `>` ends at `end`; without a name, `end` is where reading stopped."""
    match = _NAME.match(text, start)
    end = match.end() if match else start
    name = text[start:end].strip()
    return end, name if text.startswith(">", end) and name else None
