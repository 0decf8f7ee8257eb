"""Heads: the beginnings of calls as bodies read them, up to the end of the name. Knows no grammar notation, no name."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class JsonHead:
    """`{"name": "f"`, with or without other members before it. One of `keys` has the name; none: it is a key itself."""

    keys: tuple[str, ...]
    prefix: str = ""  # may precede the name, and is no part of it


@dataclass(frozen=True, slots=True)
class NameHead:
    """The name alone. `ends`: the characters that no name contains; one of them follows the name."""

    ends: str
    prefix: str = ""  # may precede the name, and is no part of it
    is_numbered: bool = False  # a colon and a number follow a name with its prefix


@dataclass(frozen=True, slots=True)
class TagHead:
    """A tag that holds the name: alone, or as one of its `attributes`."""

    function: str
    head_end: str
    attributes: tuple[str, ...] = ()
    is_escaped: bool = True  # the attribute is escaped as in HTML, and the tag may have others


@dataclass(frozen=True, slots=True)
class RecipientHead:
    """The header of a message. If it contains `marker`, the name follows, and then white space or a tag."""

    marker: str
    prefix: str  # may precede the name of a tool
    others: tuple[str, ...]  # recipients that are no tools


@dataclass(frozen=True, slots=True)
class BehindHead:
    """One of `texts`, then the head `then`. If `is_optional`, the text may be missing."""

    texts: tuple[str, ...]
    then: "Head"
    is_optional: bool = False


@dataclass(frozen=True, slots=True)
class ChoiceHead:
    heads: tuple["Head", ...]


@dataclass(frozen=True, slots=True)
class ListHead:
    """A call of a list: the first one, after `opener`, or a further one, after one of the `separators`."""

    call: "Head"
    separators: str = ""
    opener: str = ""
    needs_opener: bool = False
    is_first: bool = True


Head = JsonHead | NameHead | TagHead | RecipientHead | BehindHead | ChoiceHead | ListHead
