"""Compares our wire types of requests with those of the installed packages `openai` and `anthropic`.

It prints each field of theirs that is new, gone, or answered in another way than `tests/api/drift.json` says. A field
is honoured, ignored for a reason, refused with an advice, or left out and reported.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import anthropic
import openai
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_create_params as beta_message_create_params
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from typing_extensions import is_typeddict

from vllm_mlx.api.anthropic.schema import RUN_BY_ANTHROPIC, CountTokensBody, MessagesBody, MessagesTool, OtherBlock
from vllm_mlx.api.encoders.schema import EmbeddingBody
from vllm_mlx.api.openai.schema import ChatCompletionBody, CompletionBody
from vllm_mlx.api.responses.schema import (
    SKIPPED_ITEMS,
    BuiltInTool,
    OtherItem,
    ResponsesBody,
    ResponsesToolChoice,
    WebSearchTool,
)
from vllm_mlx.api.wire import ANY, Ignored, Refused, Wire

KEPT = Path(__file__).resolve().parents[2] / "tests" / "api" / "drift.json"
PROTOCOLS: Mapping[str, tuple[Any, type[Wire]]] = {
    "chat completions": (chat_create_params.CompletionCreateParamsNonStreaming, ChatCompletionBody),
    "completions": (completion_create_params.CompletionCreateParamsNonStreaming, CompletionBody),
    "embeddings": (embedding_create_params.EmbeddingCreateParams, EmbeddingBody),
    "responses": (response_create_params.ResponseCreateParamsNonStreaming, ResponsesBody),
    "messages": (message_create_params.MessageCreateParamsNonStreaming, MessagesBody),
    "messages, beta": (beta_message_create_params.MessageCreateParamsNonStreaming, MessagesBody),
    "count_tokens": (message_count_tokens_params.MessageCountTokensParams, CountTokensBody),
}
HONOURED, FREE = "honoured", "honoured: free in its form"
SEARCHED = "left out, but honoured with --web-search"
# Types that decoding refuses whole, whatever their fields hold.
REFUSED_WHOLE = frozenset({
    "FileDocumentSourceParam", "BetaFileDocumentSourceParam", "FileImageSourceParam", "BetaFileImageSourceParam",
    "BetaRequestMCPServerURLDefinitionParam",
    "BrowserToolset20260801Param", "BetaBrowserToolset20260801Param", "ComputerToolset20260801Param",
    "BetaComputerToolset20260801Param",
})  # fmt: skip
_TAGS = ("type", "role")

Answers = dict[str, dict[str, str]]  # by protocol, then by their type and field


def answers() -> Answers:
    return {protocol: _Comparison(wire).of(params) for protocol, (params, wire) in PROTOCOLS.items()}


class _Comparison:
    """Walks through one request of theirs and the wire type that reads it, side by side."""

    def __init__(self, wire: type[Wire]) -> None:
        self._wire = wire
        self._found: dict[str, set[str]] = {}
        self._seen: set[tuple[Any, type[Wire]]] = set()

    def of(self, params: Any) -> dict[str, str]:
        """Return the answers by `Type.field`, or by `Type` where a type is answered as a whole."""
        self._visit(params, self._wire, is_tolerated=False)
        read = {theirs.__name__ for theirs, _ in self._seen}
        for name in read & self._found.keys():  # a union in another place has no such member
            self._found[name] = {text if text == SEARCHED else f"{text} in some places" for text in self._found[name]}
        return {key: "; ".join(sorted(texts)) for key, texts in sorted(self._found.items())}

    def _say(self, key: str, answer: str) -> None:
        self._found.setdefault(key, set()).add(answer)

    def _visit(self, theirs: Any, ours: type[Wire], *, is_tolerated: bool) -> None:
        """`is_tolerated`: whether a type around `ours` tolerates unknown fields."""
        if (theirs, ours) in self._seen:
            return
        self._seen.add((theirs, ours))
        is_tolerated = is_tolerated or ours.tolerates_unknown
        declared = {field.alias or name: field.annotation for name, field in ours.model_fields.items()}
        for name, hint in get_type_hints(theirs).items():
            key = f"{theirs.__name__}.{name}"
            if name not in declared:
                self._say(key, _extra_answer(ours, name, is_tolerated))
                continue
            wires = list(_inside(declared[name], _is_wire))
            self._say(key, HONOURED if wires or not _is_free(declared[name]) else FREE)
            for typed in _inside(hint, is_typeddict):
                self._meet(typed, wires, _is_free(declared[name]), is_tolerated)

    def _meet(self, theirs: Any, wires: list[type[Wire]], is_free: bool, is_tolerated: bool) -> None:
        """Find the wire type that reads values of `theirs`, and compare the two."""
        tags = _tags(theirs)
        ours = _partner(tags, wires)
        if theirs.__name__ in REFUSED_WHOLE or (ours is not None and _is_refused(ours, tags)):
            self._say(theirs.__name__, "refused")
        elif ours is None:
            self._say(theirs.__name__, FREE if is_free else "refused")
        elif _is_left_out(ours, tags) and not _is_search_tool(ours, tags):
            self._say(theirs.__name__, "left out")
        else:
            if _is_search_tool(ours, tags):
                self._say(theirs.__name__, SEARCHED)
            self._visit(theirs, ours, is_tolerated=is_tolerated)


def _extra_answer(ours: type[Wire], name: str, is_tolerated: bool) -> str:
    match (ours.extras or {}).get(name):
        case Ignored(reason=reason, values=values) if ANY in values:
            return f"ignored: {reason}"
        case Ignored(reason=reason, values=values):
            return f"ignored if {', '.join(json.dumps(value) for value in values)}: {reason}"
        case Refused(advice=advice):
            return f"refused: {advice}"
        case _ if is_tolerated:
            return "unknown: left out and reported"
    return "unknown: refused"


def _is_refused(ours: type[Wire], tags: Mapping[str, frozenset[str]]) -> bool:
    """Return whether decoding refuses values of this kind, although the wire type takes them."""
    if ours is ResponsesToolChoice:
        return not tags.get("type", frozenset()) & {"function", "custom"}
    return ours is OtherItem and not _is_left_out(ours, tags)


def _is_left_out(ours: type[Wire], tags: Mapping[str, frozenset[str]]) -> bool:
    """Return whether values of this kind are taken, and not shown to the model."""
    kinds = tags.get("type", frozenset())
    if ours in (BuiltInTool, OtherBlock):
        return True
    if ours is MessagesTool:
        return bool(kinds) and all(kind.startswith(RUN_BY_ANTHROPIC) for kind in kinds)
    return ours is OtherItem and kinds <= SKIPPED_ITEMS


def _is_search_tool(ours: type[Wire], tags: Mapping[str, frozenset[str]]) -> bool:
    return ours in (WebSearchTool, MessagesTool) and any(
        kind.startswith("web_search") for kind in tags.get("type", frozenset())
    )


def _partner(tags: Mapping[str, frozenset[str]], wires: list[type[Wire]]) -> type[Wire] | None:
    """Prefer a type with the same tags to one that takes any tag."""
    exact: list[type[Wire]] = []
    open_: list[type[Wire]] = []
    for wire in wires:
        own = {name: _literals(field.annotation) for name, field in wire.model_fields.items() if name in _TAGS}
        shared = [name for name in own if name in tags]
        if any(own[name] and not own[name] & tags[name] for name in shared):
            continue
        if wire is WebSearchTool and not _is_search_tool(wire, tags):
            continue
        (exact if any(own[name] for name in shared) else open_).append(wire)
    return next(iter([*exact, *open_]), None)


def _tags(theirs: Any) -> dict[str, frozenset[str]]:
    hints = get_type_hints(theirs)
    return {name: tags for name in _TAGS if name in hints and (tags := _literals(hints[name]))}


def _literals(hint: Any) -> frozenset[str]:
    if get_origin(hint) is Literal:
        return frozenset(value for value in get_args(hint) if isinstance(value, str))
    return frozenset().union(*(_literals(inner) for inner in get_args(hint)))


def _is_wire(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Wire)


def _is_free(hint: Any) -> bool:
    """Return whether the field takes any JSON object."""
    return hint is Any or get_origin(hint) is dict or any(_is_free(inner) for inner in get_args(hint))


def _inside(hint: Any, is_wanted: Any) -> Iterator[Any]:
    """Yield the wanted types that a hint names, each once."""
    seen: dict[Any, None] = {}

    def walk(inner: Any) -> None:
        if is_wanted(inner):
            seen[inner] = None
        elif get_origin(inner) is not Literal:
            for part in get_args(inner):
                walk(part)

    walk(hint)
    return iter(seen)


def versions() -> dict[str, str]:
    return {"openai": openai.__version__, "anthropic": anthropic.__version__}


def differences(kept: Answers, found: Answers) -> list[str]:
    lines = []
    for protocol in PROTOCOLS:
        old, new = kept.get(protocol, {}), found[protocol]
        lines += [f"new      {protocol}: {key}: {new[key]}" for key in new.keys() - old.keys()]
        lines += [f"gone     {protocol}: {key}" for key in old.keys() - new.keys()]
        lines += [
            f"changed  {protocol}: {key}: {old[key]} -> {new[key]}"
            for key in old.keys() & new.keys()
            if old[key] != new[key]
        ]
    return sorted(lines)


def load() -> tuple[dict[str, str], Answers]:
    """Return the versions of the packages whose fields were kept, and the answers."""
    kept = json.loads(KEPT.read_text(encoding="utf-8"))
    return kept["versions"], kept["answers"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/check-drift", description=__doc__)
    parser.add_argument("--write", action="store_true", help="keep today's answers; look at the difference first")
    arguments = parser.parse_args()
    found = answers()
    lines = differences(load()[1] if KEPT.exists() else {}, found)
    print("\n".join(lines) or "Nothing differs.")
    if arguments.write:
        kept = {"versions": versions(), "answers": found}
        KEPT.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    elif lines:
        sys.exit(1)


if __name__ == "__main__":
    main()
