"""Writes grammars, in llguidance's Lark notation, of text that the parsers read. Knows no tokenizer."""

from .calls import calls, calls_in_text, required_calls
from .carried import CarriedNames
from .guide_grammar import guide_grammar
from .lark import AddedTokens, LarkWriter
from .names import CHOICES, Lead, NameWriter, further, name_grammar
from .shapes import GuidedTool

__all__ = [
    "CHOICES",
    "AddedTokens",
    "CarriedNames",
    "GuidedTool",
    "LarkWriter",
    "Lead",
    "NameWriter",
    "calls",
    "calls_in_text",
    "further",
    "guide_grammar",
    "name_grammar",
    "required_calls",
]
