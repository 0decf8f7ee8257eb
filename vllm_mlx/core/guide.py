"""The form that a client demands of a reply, in any protocol. It knows no grammar library and no tokenizer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import InvalidParameter, shown

MAX_GUIDE_CHARS = 256 * 1024
MAX_CHOICES = 4096
MAX_STRUCTURES = 1024  # structures, and triggers, of a structural tag: each pair is compared


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """One JSON text that is valid under the schema."""

    schema: Mapping[str, Any] | bool


@dataclass(frozen=True, slots=True)
class Regex:
    """A text that the pattern matches from its first to its last character."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Choice:
    """One of these texts."""

    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Grammar:
    """A text that the grammar derives; `text` is the grammar in Lark's notation or in GBNF."""

    text: str


@dataclass(frozen=True, slots=True)
class TagStructure:
    """The text `begin`, content that is valid under the schema, and the text `end`."""

    begin: str
    schema: Mapping[str, Any] | bool
    end: str


@dataclass(frozen=True, slots=True)
class StructuralTag:
    """Free text in which a trigger always begins one of the structures."""

    structures: tuple[TagStructure, ...]
    triggers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StructuralFormat:
    """The newer form of a structural tag: a tree of `{"type": …}` that describes the complete reply."""

    format: Mapping[str, Any]


GuideForm = JsonSchema | Regex | Choice | Grammar | StructuralTag | StructuralFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Guide:
    """A demanded form and its request field, `param`. Raises InvalidParameter, which names that field."""

    form: GuideForm
    param: str = "structured_outputs"
    in_reasoning: bool = False  # True: it also binds the reasoning before the answer

    def __post_init__(self) -> None:
        match self.form:
            case Choice(options):
                self._check(bool(options), "needs at least one option")
                self._check(len(options) <= MAX_CHOICES, f"takes at most {MAX_CHOICES} options")
                self._check(all(options), "takes no empty option")
                self._check_size(sum(map(len, options)))
            case Regex(text) | Grammar(text):
                self._check(bool(text), "must not be empty")
                self._check_size(len(text))
            case StructuralTag(structures, triggers):
                self._check(bool(structures), "needs at least one structure")
                self._check(bool(triggers) and all(triggers), "needs at least one trigger, none of them empty")
                self._check(len(structures) <= MAX_STRUCTURES, f"takes at most {MAX_STRUCTURES} structures")
                self._check(len(triggers) <= MAX_STRUCTURES, f"takes at most {MAX_STRUCTURES} triggers")
                for structure in structures:
                    is_triggered = structure.begin.startswith(triggers)
                    self._check(is_triggered, f"has no trigger that begins the structure '{shown(structure.begin)}'")

    def _check_size(self, num_chars: int) -> None:
        self._check(num_chars <= MAX_GUIDE_CHARS, f"takes at most {MAX_GUIDE_CHARS} characters")

    def _check(self, holds: bool, rule: str) -> None:
        if not holds:
            raise InvalidParameter(f"`{self.param}` {rule}.", param=self.param)
