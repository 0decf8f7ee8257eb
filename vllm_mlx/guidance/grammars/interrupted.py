"""Free text, in which what begins with a trigger is bound."""

from collections.abc import Iterable, Mapping

from .lark import TEXT, LarkWriter, either, literal


def interrupted_text(
    rests: Mapping[str, str], writer: LarkWriter, *, without: Iterable[str] = (), most: str = "*"
) -> str:
    """Free text, holding none of `without`, in which each trigger is followed by its expression; `most`: how often."""
    text = writer.terminal(writer.bounded(TEXT, without))
    pieces = []
    for trigger, rest in rests.items():
        head, tail = writer.split_tokens(trigger)
        if head:
            lazy = writer.rule(f"/(?s:.*)/ {literal(head)}", "[lazy]")
            pieces.append(f"{lazy} {writer.text(tail)} {rest}")
        else:
            pieces.append(f"({text})? {writer.text(tail)} {rest}")
    return f"{either(pieces)}{most} ({text})?"
