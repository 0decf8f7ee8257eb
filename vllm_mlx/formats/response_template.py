"""Reads the rules that a checkpoint carries for its replies, `response_template` in its tokenizer's configuration.

They name tags, and describe the text between them. Most match a family of the table, whose row then reads the replies;
rules with other tags become new formats. No pattern of a checkpoint is ever run on a reply.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .bodies import NewBody
from .bodies.compose import Name, Tag, after, choice
from .bodies.json_body import ARGUMENT_KEYS, NAME_KEYS
from .bodies.xml_tags import XmlTags
from .call_formats import keyed, named
from .families import FAMILIES
from .family import CallKind, Calls, JsonCall, NamedCall, Opening, ReasoningFormat, Spelling, ToolFormat, XmlCall
from .layouts import JSON_LIST, JSON_ROW, tags

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_MAX_PATTERN = 1000  # characters
_QUANTIFIER = r"(?:[*+?]|\{[\d,]*\})\??"
_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]")
_PIECE = re.compile(  # one piece of a pattern: the beginning of a group, a wildcard, or a character
    rf"(?P<other>\(\?(?!:|P<)|\\\Z)|(?P<group>\((?:\?P<(?P<name>\w+)>|\?:)?)"
    rf"|{_CLASS.pattern}|{_QUANTIFIER}|\\[^\W\d_]|[.^$|)]|\\?(?P<char>.)(?P<quantifier>{_QUANTIFIER})?",
    re.DOTALL,
)
_ALTERNATIVE = re.compile(r"(?:\\.|[^()\[\]\\|])+")
_ALTERNATIVES = re.compile(rf"\(\?:({_ALTERNATIVE.pattern}(?:\|{_ALTERNATIVE.pattern})+)\)(?![*+?{{])")
_NAMED = "\0"  # replaces a named group among the literal parts of a pattern


class UnreadableTemplate(ValueError):
    """The rules describe replies that no format of this server can read."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The formats that the rules describe, as far as they do."""

    reasoning: ReasoningFormat | None = None
    calls: Calls | None = None


def read_response_template(template: Any) -> Rules:
    """Raise UnreadableTemplate, which names the unreadable part."""
    fields = template.get("fields") if isinstance(template, Mapping) else None
    if not isinstance(fields, Mapping) or template.get("version", 1) != 1:
        raise UnreadableTemplate("it has no `fields`, or a version other than 1")
    reasoning = next((fields[name] for name in _REASONING_FIELDS if name in fields), None)
    calls = fields.get("tool_calls")
    return Rules(
        None if reasoning is None else _reasoning(_checked(reasoning, "the reasoning")),
        None if calls is None else _calls(_checked(calls, "tool_calls")),
    )


def _checked(field: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(field, Mapping):
        raise UnreadableTemplate(f"the field of {name} is not an object")
    return field


def _reasoning(field: Mapping[str, Any]) -> ReasoningFormat:
    opens, closes = _tags_of(field, "open"), _tags_of(field, "close")
    if not opens or not closes:
        raise UnreadableTemplate("the reasoning has no opening or no closing tag")
    for format in (row.reasoning for row in reversed(FAMILIES) if row.reasoning is not None):
        is_plain = not (format.is_implied or format.is_shown or format.fills_content or format.wrap)
        if is_plain and opens[-1] in format.bounds.starts and closes[0] in format.closes:
            return format
    return ReasoningFormat(opens, closes, sign=opens[0]) if len(opens) > 1 else tags(opens[0], *closes)


def _tags_of(field: Mapping[str, Any], key: str) -> tuple[str, ...]:
    return tuple(tag for runs in _anchors(field, key) if (tag := "".join(runs).strip()))


def _anchors(field: Mapping[str, Any], key: str) -> list[list[str]]:
    """Return the literal parts of each text that may begin or end a field."""
    given = field.get(key)
    if given is not None:
        texts = given if isinstance(given, list) else [given]
        if not all(isinstance(text, str) for text in texts):
            raise UnreadableTemplate(f"`{key}` is neither a text nor a list of texts")
        return [[text] for text in texts]
    pattern = field.get(f"{key}_pattern")
    return [] if pattern is None else [_literals(one) for one in _alternatives(pattern)]


def _alternatives(pattern: Any) -> list[Any]:
    """Return the pattern once for each alternative of its first group of alternatives."""
    is_read = isinstance(pattern, str) and len(pattern) <= _MAX_PATTERN
    found = _ALTERNATIVES.search(pattern) if is_read else None
    if found is None:
        return [pattern]
    return [pattern[: found.start()] + text + pattern[found.end() :] for text in _ALTERNATIVE.findall(found[1])]


def _literals(pattern: Any) -> list[str]:
    """Return the literal parts of a pattern, in order; `_NAMED` replaces a named group.

    Optional parts are left out. Raises UnreadableTemplate if the pattern looks ahead or back, or is invalid.
    """
    if not isinstance(pattern, str) or len(pattern) > _MAX_PATTERN:
        raise UnreadableTemplate(f"a pattern is not text, or is longer than {_MAX_PATTERN} characters")
    parts = [""]
    position = 0
    while found := _PIECE.match(pattern, position):
        position = found.end()
        if found["other"]:
            raise UnreadableTemplate(f"the pattern {pattern!r} is more than text and groups")
        if found["name"]:
            position = _end_of_group(pattern, position)
            parts += [_NAMED, ""]
        elif found["char"] and not found["quantifier"]:
            parts[-1] += found["char"]
        elif not found["group"]:
            parts.append("")
    return [part for part in parts if part]


def _end_of_group(pattern: str, position: int) -> int:
    depth = 1
    while position < len(pattern) and depth:
        found = _CLASS.match(pattern, position)
        depth += 0 if found else {"(": 1, ")": -1}.get(pattern[position], 0)
        position = found.end() if found else position + 1 + (pattern[position] == "\\")
    return position


# Calls


def _calls(field: Mapping[str, Any]) -> Calls:
    runs = next(filter(None, _anchors(field, "open")), [])
    if not runs or runs[0] == _NAMED or not runs[0].strip():
        raise UnreadableTemplate("tool_calls has no opening tag")
    closes = _tags_of(field, "close")
    arguments = field.get("content_args")
    pattern = arguments.get("tag_pattern") if isinstance(arguments, Mapping) else None
    inner = [] if pattern is None else _literals(pattern)
    known = _known_calls(runs, inner)
    if known is not None:
        return known
    match field.get("content", "text"):
        case "json" if _NAMED in runs:
            return _named_calls(runs, closes)
        case "json":
            return _json_calls(runs, closes, _keys_of(field))
        case "xml-inline":
            return _tagged_calls(runs, closes, inner)
        case other:
            raise UnreadableTemplate(f"tool_calls are written as {other!r}")


def _known_calls(runs: Sequence[str], inner: Sequence[str]) -> Calls | None:
    """Return the format of the table whose first tag begins the calls, and which has all tags that the rules name."""
    first = runs[0].strip()
    named = [part.strip() for part in (*runs, *inner) if part.strip()[:1] in ("<", "[") and len(part.strip()) > 1]
    for row in reversed(FAMILIES):
        openings = row.calls.reads.openings if row.calls is not None else ()
        if row.calls is None or not openings or row.calls.reads.is_fallback:
            continue
        markers = [opening.marker for opening in openings if len(opening.marker) > 1]
        is_first = bool(markers) and (first == markers[0] or first.startswith(markers[0]))
        texts = "\0".join(row.calls.reads.tags)
        if is_first and all(part in texts or part.startswith(markers[0]) for part in named):
            return row.calls
    return None


def _keys_of(field: Mapping[str, Any]) -> JsonCall:
    transform = field.get("transform")
    function = transform.get("function") if isinstance(transform, Mapping) else None
    if not isinstance(function, Mapping):
        return JsonCall()
    keys = {key: str(function.get(key, f"{{{key}}}")).strip("{}").rpartition(".")[2] for key in ("name", "arguments")}
    if keys["name"] not in NAME_KEYS or keys["arguments"] not in ARGUMENT_KEYS:
        raise UnreadableTemplate(f"tool_calls have the keys {', '.join(keys.values())}")
    return JsonCall(name=keys["name"], arguments=keys["arguments"])


def _json_calls(runs: Sequence[str], closes: tuple[str, ...], kind: JsonCall) -> Calls:
    body = choice({"{": JSON_ROW, "[": JSON_LIST})
    return _format("".join(runs).strip(), body, closes, kind, "", ())


def _named_calls(runs: Sequence[str], closes: tuple[str, ...]) -> Calls:
    """Make the format of calls that are a name, then the arguments as JSON."""
    open, before, behind = _around_name(runs)
    body = named(*_tag(before), Name(), *_tag(behind))
    return _format(open, body, closes, NamedCall(before, behind), "", (before, behind))


def _tagged_calls(runs: Sequence[str], closes: tuple[str, ...], inner: Sequence[str]) -> Calls:
    """Make the format of calls that are a name, then a key and a value for each argument."""
    open, before, behind = _around_name(runs)
    if [part == _NAMED for part in inner] != [False, True, False, True, False] or behind or not closes:
        raise UnreadableTemplate("the arguments of tool_calls have no tags around key and value, or the name has one")
    tags = XmlTags(inner[0], inner[4], head_end=inner[2])
    body = after(before, then=keyed(tags)) if before else keyed(tags)
    return _format(open, body, closes, XmlCall(tags), before, (before, *tags.texts))


def _around_name(runs: Sequence[str]) -> tuple[str, str, str]:
    """Return the tag that begins a call, the text between it and the name, and the text between name and arguments."""
    if runs.count(_NAMED) != 1:
        raise UnreadableTemplate("tool_calls have no name, or several")
    at = runs.index(_NAMED)
    return runs[0].strip(), "".join(runs[1:at]).strip(), "".join(runs[at + 1 :]).strip()


def _tag(text: str) -> tuple[Tag, ...]:
    return (Tag((text,)),) if text else ()


def _format(
    open: str, body: NewBody, closes: tuple[str, ...], kind: CallKind, before: str, inner: tuple[str, ...]
) -> Calls:
    reads = ToolFormat((Opening(open, body),), closes, inner_tags=tuple(tag for tag in inner if tag))
    return Calls(reads, (Spelling(kind, open + before, "".join(closes[:1])),))
