"""Writes a grammar in Lark notation. A tag that the tokenizer has as a token is that token, never its characters."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from ...formats.schema_budget import SchemaBudget
from .json_schema import with_options
from .schema_costs import pay_for_alternatives

TEXT = r"/(?s:.+)/"
_CHARS_PER_VISIT = 64  # of text that is written
_SLASH_OR_DIGIT = re.compile(r"\\d|\\.|/|\n", re.DOTALL)
_REGEX_SPECIALS = re.compile(r"([.^$*+?()\[\]{}|\\/~&#\-])")


class LarkWriter:
    """`tokens`: the tokenizer's added tokens, text to id. Rules are named as they are made.

    What is written is paid for by `budget`; `param`, in errors, is the field that asks for the grammar.
    """

    def __init__(self, tokens: Mapping[str, int], budget: SchemaBudget | None = None, param: str = "tools"):
        self.budget = SchemaBudget() if budget is None else budget
        self._tokens = tokens
        self._param = param
        longest_first = sorted(tokens, key=len, reverse=True)
        self._pattern = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None
        self._lines: dict[str, str] = {}  # definition -> name
        self._options: list[str] = []

    @property
    def token_texts(self) -> frozenset[str]:
        return frozenset(self._tokens)

    def spend(self, text: str) -> None:
        """Pay for text of a grammar. Raises InvalidParameter when the budget is spent."""
        self.budget.spend(self._param, 1 + len(text) // _CHARS_PER_VISIT)

    def parts(self, text: str) -> list[str]:
        """`text` cut into tokens and what stands between them."""
        self.spend(text)
        return [part for part in self._pattern.split(text) if part] if self._pattern else [text] if text else []

    def is_token(self, part: str) -> bool:
        return part in self._tokens

    def text(self, text: str) -> str:
        """An expression for exactly this text."""
        return " ".join(self._part(part) for part in self.parts(text))

    def json(self, schema: Any, **options: Any) -> str:
        """One JSON text. `options` are llguidance's, which joins alternatives: they are paid for here."""
        pay_for_alternatives(schema, self._param, self.budget)
        if schema is False:
            schema = {"not": {}}
        return self.rule(f"%json {json.dumps(with_options(schema, **options), ensure_ascii=False)}")

    def rule(self, definition: str, options: str = "") -> str:
        return self._name("r", definition, options)

    def terminal(self, definition: str) -> str:
        return self._name("T", definition, "")

    def value(self, text: str, end: str, *, without: Iterable[str] = ()) -> str:
        """Text that matches the terminal expression `text` and holds none of `without`, then `end`."""
        head, tail = self.split_tokens(end)
        bounded = self.bounded(text, without)
        closed = f"({bounded}) {literal(head)}" if head else bounded
        return f"{self.terminal(closed)} {self.text(tail)}".strip()

    def bounded(self, text: str, without: Iterable[str]) -> str:
        """A terminal's expression. Tags that hold a token need no care: text never holds one."""
        tags = [tag for tag in dict.fromkeys(without) if tag and not any(map(self.is_token, self.parts(tag)))]
        return f"({text}) & ~/(?s:.*)({'|'.join(map(quoted_regex, tags))})(?s:.*)/" if tags else text

    def plain(self, text: str) -> str:
        """The characters of this text, whatever tokens it looks like."""
        self.spend(text)
        return literal(text)

    def split_tokens(self, text: str) -> tuple[str, str]:
        """The plain text before the first token, and the rest."""
        parts = self.parts(text)
        num_plain = next((number for number, part in enumerate(parts) if self.is_token(part)), len(parts))
        return "".join(parts[:num_plain]), "".join(parts[num_plain:])

    def build(self, start: str) -> str:
        lines = [f"{name}: {definition}" for definition, name in self._lines.items()]
        return "\n".join([f"start: {start}", *lines])

    def _part(self, part: str) -> str:
        return f"<[{self._tokens[part]}]>" if part in self._tokens else literal(part)

    def _name(self, prefix: str, definition: str, options: str) -> str:
        self.spend(definition)
        if definition not in self._lines:
            self._lines[definition] = f"{prefix}{len(self._lines)}{options}"
        return self._lines[definition].removesuffix(options)


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def quoted_regex(text: str) -> str:
    """`text` inside of a pattern between slashes."""
    return _REGEX_SPECIALS.sub(r"\\\1", text).replace("\n", r"\n").replace("\t", r"\t").replace("\r", r"\r")


def in_slashes(pattern: str) -> str:
    """A client's pattern as it stands between slashes; its digits are those of ASCII."""

    def written(match: re.Match[str]) -> str:
        return {"/": r"\/", "\n": r"\n", r"\d": "[0-9]"}.get(match.group(), match.group())

    return _SLASH_OR_DIGIT.sub(written, pattern)


def optional(expression: str) -> str:
    return f"({expression})?" if expression else ""


def either(expressions: Iterable[str]) -> str:
    return "(" + " | ".join(dict.fromkeys(expressions)) + ")"


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
