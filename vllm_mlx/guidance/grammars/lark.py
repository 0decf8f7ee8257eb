"""Writes a grammar in Lark notation. A tag that is a token of the tokenizer is written as that token."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from ...formats.bodies.tool_schema import SchemaBudget
from ...formats.tokenizer import AddedTokens
from .json_schema import with_options

TEXT = r"/(?s:.+)/"
_CHARS_PER_VISIT = 64  # characters of grammar text
_SLASH_OR_DIGIT = re.compile(r"\\d|\\.|/|\n", re.DOTALL)
_REGEX_SPECIALS = re.compile(r"([.^$*+?()\[\]{}|\\/~&#\-])")


class LarkWriter:
    """Collects the rules of one grammar and names them.

    Written text is paid for from `budget`. `param` is the request field that errors name.
    """

    def __init__(self, tokens: AddedTokens, budget: SchemaBudget | None = None, param: str = "tools"):
        self.budget = SchemaBudget() if budget is None else budget
        self.tokens = tokens
        self._param = param
        self._lines: dict[str, str] = {}  # definition -> name
        self._options: list[str] = []

    def spend(self, text: str) -> None:
        """Pay for grammar text. Raises InvalidParameter when the budget is spent."""
        self.budget.spend(self._param, 1 + len(text) // _CHARS_PER_VISIT)

    def parts(self, text: str) -> list[str]:
        """Split `text` into tokens and the plain text between them."""
        self.spend(text)
        return self.tokens.parts(text)

    def is_token(self, part: str) -> bool:
        return part in self.tokens.ids

    def text(self, text: str) -> str:
        """Return an expression for exactly this text."""
        return " ".join(self._part(part) for part in self.parts(text))

    def json(self, schema: Any, **options: Any) -> str:
        """Return an expression for JSON that follows the schema. `options` are llguidance's."""
        if schema is False:
            schema = {"not": {}}
        return self.rule(f"%json {json.dumps(with_options(schema, **options), ensure_ascii=False)}")

    def rule(self, definition: str, options: str = "") -> str:
        return self._name("r", definition, options)

    def terminal(self, definition: str) -> str:
        return self._name("T", definition, "")

    def value(self, text: str, end: str, *, without: Iterable[str] = ()) -> str:
        """Return an expression for text that matches the terminal `text` and contains none of `without`, then `end`."""
        head, tail = self.split_tokens(end)
        bounded = self.bounded(text, without)
        closed = f"({bounded}) {literal(head)}" if head else bounded
        return f"{self.terminal(closed)} {self.text(tail)}".strip()

    def bounded(self, text: str, without: Iterable[str]) -> str:
        """Return a terminal's expression. Only tags without a token need excluding: text never contains a token."""
        tags = [tag for tag in dict.fromkeys(without) if tag and not any(map(self.is_token, self.parts(tag)))]
        return f"({text}) & ~/(?s:.*)({'|'.join(map(quoted_regex, tags))})(?s:.*)/" if tags else text

    def plain(self, text: str) -> str:
        """Return an expression for these characters, even if they spell a token."""
        self.spend(text)
        return literal(text)

    def split_tokens(self, text: str) -> tuple[str, str]:
        """Return the plain text before the first token, and the rest."""
        parts = self.parts(text)
        num_plain = next((number for number, part in enumerate(parts) if self.is_token(part)), len(parts))
        return "".join(parts[:num_plain]), "".join(parts[num_plain:])

    def mark(self) -> tuple[int, int]:
        """Return a mark of the rules and the budget so far."""
        return len(self._lines), self.budget.num_visits

    def go_back(self, mark: tuple[int, int]) -> None:
        """Undo all writing and paying since the mark."""
        num_lines, self.budget.num_visits = mark
        self._lines = dict(list(self._lines.items())[:num_lines])

    def build(self, start: str) -> str:
        lines = [f"{name}: {definition}" for definition, name in self._lines.items()]
        return "\n".join([f"start: {start}", *lines])

    def _part(self, part: str) -> str:
        return f"<[{self.tokens.ids[part]}]>" if self.is_token(part) else literal(part)

    def _name(self, prefix: str, definition: str, options: str) -> str:
        self.spend(definition)
        if definition not in self._lines:
            self._lines[definition] = f"{prefix}{len(self._lines)}{options}"
        return self._lines[definition].removesuffix(options)


def literal(text: str) -> str:
    """Return an expression for exactly this text. llguidance reads every character but DEL as it is."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


def quoted_regex(text: str) -> str:
    """Quote `text` for a pattern between slashes."""
    return _REGEX_SPECIALS.sub(r"\\\1", text).replace("\n", r"\n").replace("\t", r"\t").replace("\r", r"\r")


def in_slashes(pattern: str) -> str:
    """Quote a client's pattern for use between slashes; `\\d` means the ASCII digits."""

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
    """Return an expression for free text with triggers. `rests`: each trigger, and the expression after it.

    The text contains none of `without`. `most`: how many triggers it may contain, as a repetition operator.
    """
    text = writer.terminal(writer.bounded(TEXT, without))
    pieces = []
    for trigger, rest in rests.items():
        head, tail = writer.split_tokens(trigger)
        before = f"({text})?"
        if head and tail:  # text may contain the head alone
            before = writer.terminal(writer.bounded(f"/(?s:.*){quoted_regex(head)}/", without))
        elif head:
            before = writer.rule(f"/(?s:.*)/ {literal(head)}", "[lazy]")
        pieces.append(f"{before} {writer.text(tail)} {rest}")
    return f"{either(pieces)}{most} ({text})?"
