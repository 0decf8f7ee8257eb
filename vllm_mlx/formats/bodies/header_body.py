"""The header of a message: it says whether the text that follows is reasoning, content or a call."""

import re
from collections.abc import Callable
from functools import partial

from .body import Body, BodyContext, BodyStatus, NewBody, Wrapper
from .object_body import ObjectBody

_MAX_HEADER = 512
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")

Route = Callable[[str, BodyContext], Body | BodyStatus]  # gets a header without its last tag


class HeaderBody(Wrapper):
    """`route` says what follows: the body of a call, or a status for reasoning, content or an unknown header."""

    def __init__(self, context: BodyContext, end: str, route: Route):
        super().__init__()
        self._context = context
        self._end = context.encode(end)
        self._route = route
        self._num_searched = 0

    def _choose(self, text: str, final: bool) -> int:
        end = text.find(self._end, max(0, self._num_searched - len(self._end)))
        self._num_searched = len(text)
        if end < 0 or end > _MAX_HEADER:
            if final or len(text) > _MAX_HEADER:
                self._status = BodyStatus.STUCK
            return 0
        target = self._route(text[:end], self._context)
        if isinstance(target, BodyStatus):
            self._status = target
            return 0 if target is BodyStatus.STUCK else end + len(self._end)
        self._inner = target
        return end + len(self._end)


def harmony_route(header: str, context: BodyContext) -> Body | BodyStatus:
    """`[role] [to=recipient] [<|channel|>]channel [to=recipient] [<|constrain|>format]`."""
    channel_tag, constrain_tag = context.encode("<|channel|>"), context.encode("<|constrain|>")
    header = header.replace(constrain_tag, " ")
    recipient = _RECIPIENT.search(header.replace(channel_tag, " "))
    if recipient is not None and recipient.group(1).startswith("functions.") and context.may_call:
        return ObjectBody(context, recipient.group(1).removeprefix("functions."))
    words = header.rpartition(channel_tag)[2].split()
    match words[:1]:
        case ["analysis"]:
            return BodyStatus.REASONING
        case ["final"]:
            return BodyStatus.TEXT
        case ["commentary"] if recipient is None:
            return BodyStatus.TEXT
    return BodyStatus.STUCK


def recipient_route(header: str, context: BodyContext) -> Body | BodyStatus:
    """`[role] to=self` heads reasoning, any other recipient content."""
    recipient = _RECIPIENT.search(header)
    if recipient is None:
        return BodyStatus.TEXT if header.strip() in ("", "assistant") else BodyStatus.STUCK
    return BodyStatus.REASONING if recipient.group(1) == "self" else BodyStatus.TEXT


def suffix_route(status: BodyStatus) -> Route:
    """Accept a tag that carries a word, as `<think:word>`."""

    def route(header: str, context: BodyContext) -> BodyStatus:
        return status if re.fullmatch(r"[\w-]{1,64}", header) else BodyStatus.STUCK

    return route


def header(end: str, route: Route) -> NewBody:
    return partial(HeaderBody, end=end, route=route)
