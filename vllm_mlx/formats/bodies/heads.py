"""What a body reads up to the end of a call's name. Knows no grammar notation, and no name."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class JsonHead:
    """`{"name": "f"`, other members before it perhaps. `keys` may hold the name; none: the name is the key itself."""

    keys: tuple[str, ...]
    prefix: str = ""  # may precede the name, and is no part of it


@dataclass(frozen=True, slots=True)
class NameHead:
    """The name alone. `ends`: the characters that no name contains, one of which follows it."""

    ends: str
    prefix: str = ""  # may precede the name, and is no part of it
    is_numbered: bool = False  # a colon and a number follow a name with its prefix


@dataclass(frozen=True, slots=True)
class TagHead:
    """A tag that holds the name: alone, or as one of its `attributes`."""

    function: str
    head_end: str
    attributes: tuple[str, ...] = ()
    is_escaped: bool = True  # the attribute is escaped as in HTML, and others may stand beside it


@dataclass(frozen=True, slots=True)
class RecipientHead:
    """The header of a message. If `marker` is in it, a name follows, and white space or a tag."""

    marker: str
    prefix: str  # may precede the name of a tool
    others: tuple[str, ...]  # recipients that are no tools


@dataclass(frozen=True, slots=True)
class BehindHead:
    """One of `texts`, then `then`."""

    texts: tuple[str, ...]
    then: "Head"
    is_optional: bool = False


@dataclass(frozen=True, slots=True)
class ChoiceHead:
    heads: tuple["Head", ...]


@dataclass(frozen=True, slots=True)
class ListHead:
    """A call, the first of several behind `opener`, or a further one behind one of the `separators`."""

    call: "Head"
    separators: str = ""
    opener: str = ""
    needs_opener: bool = False
    is_first: bool = True


Head = JsonHead | NameHead | TagHead | RecipientHead | BehindHead | ChoiceHead | ListHead
