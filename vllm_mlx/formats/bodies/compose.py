"""Bodies that choose a body: after some tags, by the first character, or for each call of a list."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from .body import Body, BodyContext, BodyStatus, Chooser, NewBody, skip_white

_NAME = re.compile(r"[^\s<>\[\](){}\"'`,;=\ud800-\udfff]{1,256}")


@dataclass(frozen=True, slots=True)
class Tag:
    """A step that reads one of the texts; an `optional` one may be missing."""

    texts: tuple[str, ...]
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Name:
    """A step that reads a name, which ends at a tag of the next step. With `after`, that text must precede it."""

    after: str | None = None


Step = Tag | Name
Finish = Callable[[BodyContext, list[str]], Body]  # gets the names that were read, in order


class StepsBody(Chooser):
    """Tags and names in a fixed order, white space between them allowed, then another body."""

    def __init__(self, context: BodyContext, steps: tuple[Step, ...], finish: Finish):
        super().__init__(context)
        self._steps = list(steps)
        self._finish = finish
        self._names: list[str] = []

    def _choose(self, text: str, final: bool) -> int:
        position = 0
        while self._steps and self.status is BodyStatus.OPEN:
            start = skip_white(text, position)
            end = self._read_step(self._steps[0], text, start, final)
            if end is None:
                return start
            step = self._steps.pop(0)
            if isinstance(step, Tag) and end > start:
                self._steps.insert(0, replace(step, optional=True))  # the model may write the tag twice
            position = end
        if not self._steps:
            self.chosen = self._finish(self._context, self._names)
        return position

    def _read_step(self, step: Step, text: str, start: int, final: bool) -> int | None:
        """Return the end of the step, or None if more text is needed or the status says that the step is wrong here."""
        tags = step.texts if isinstance(step, Tag) else (step.after,) if step.after else ()
        encoded = [self._context.encode(tag) for tag in tags]
        end = next((start + len(tag) for tag in encoded if text.startswith(tag, start)), None)
        if end is None and tags:
            if not final and any(tag.startswith(text[start:]) for tag in encoded):
                return None
            if isinstance(step, Name) or step.optional:
                return start
            self.status = BodyStatus.STUCK
            return None
        if isinstance(step, Tag):
            return end
        start = skip_white(text, start if end is None else end)
        name = _NAME.match(text, start)
        if name is not None and (final or name.end() < len(text)):
            self._names.append(self._before_next_tag(name.group()))
            return start + len(self._names[-1])
        if name is None and (final or start < len(text)):
            self.status = BodyStatus.STUCK
        return None

    def _before_next_tag(self, name: str) -> str:
        tags = (tag for step in self._steps[1:2] if isinstance(step, Tag) for tag in step.texts)
        ends = (name.find(self._context.encode(tag), 1) for tag in tags if not tag[:1].isalnum())
        return name[: min((end for end in ends if end > 0), default=None)]


class ChoiceBody(Chooser):
    """Chooses a body by the first visible character."""

    def __init__(self, context: BodyContext, bodies: Mapping[str, NewBody], default: NewBody | None = None):
        super().__init__(context)
        self._bodies = bodies
        self._default = default

    def _choose(self, text: str, final: bool) -> int:
        position = skip_white(text, 0)
        if position < len(text):
            # An added token arrives as one lone surrogate; one that begins a body is a tag.
            char = "<" if "\ud800" <= text[position] <= "\udfff" else text[position]
            body = self._bodies.get(char, self._default)
            if body is None:
                self.status = BodyStatus.STUCK
            else:
                self.chosen = body(self._context)
        return position


@dataclass(frozen=True, slots=True)
class Listing:
    """A sequence of calls: `opener` before the first (a model may omit it), `closer` after the last."""

    separators: str = ""
    opener: str = ""
    closer: str = ""
    needs_opener: bool = False


class ListBody(Chooser):
    """Reads one of several calls; `follow` returns the body of the next."""

    def __init__(self, context: BodyContext, inner: NewBody, listing: Listing, *, is_first: bool = True):
        super().__init__(context)
        self._new_inner = inner
        self._listing = listing
        self._is_first = is_first
        self._is_at_element = False
        self.follow = self._next

    def _choose(self, text: str, final: bool) -> int:
        position = skip_white(text, 0)
        if position < len(text) and not self._is_at_element:
            position = self._read_punctuation(text, position)
            if self.status is not BodyStatus.OPEN:
                return position
            self._is_at_element = True
            position = skip_white(text, position)
        if self._listing.closer and text[position : position + 1] == self._listing.closer:
            self.status = BodyStatus.ENDED  # the list is empty, or its last call has a comma behind it
            return position + 1
        if position < len(text):
            self.chosen = self._new_inner(self._context)
        return position

    def _read_punctuation(self, text: str, position: int) -> int:
        listing = self._listing
        char = text[position]
        if self._is_first:
            if listing.opener and char == listing.opener:
                return position + 1
            if listing.needs_opener:
                self.status = BodyStatus.STUCK
            elif listing.opener:
                self._listing = Listing(listing.separators)
        elif listing.closer and char == listing.closer:
            self.status = BodyStatus.ENDED
            return position + 1
        elif char in listing.separators:
            return position + 1
        elif listing.closer:
            self.status = BodyStatus.STUCK
        return position

    def _next(self) -> Body:
        return ListBody(self._context, self._new_inner, self._listing, is_first=False)


def after(text: str, then: NewBody) -> NewBody:
    """Read the text, then the body `then`."""
    return partial(StepsBody, steps=(Tag((text,)),), finish=lambda context, _: then(context))


def choice(bodies: Mapping[str, NewBody], default: NewBody | None = None) -> NewBody:
    return partial(ChoiceBody, bodies=bodies, default=default)


def several(inner: NewBody, listing: Listing) -> NewBody:
    return partial(ListBody, inner=inner, listing=listing)
