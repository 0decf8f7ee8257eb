"""Writes grammars, in llguidance's Lark notation, of text that the parsers read. Knows no tokenizer."""

from .calls import calls, calls_in_text, required_calls
from .carried import CarriedNames
from .guide_grammar import guide_grammar
from .lark import LarkWriter
from .shapes import GuidedTool

__all__ = [
    "CarriedNames",
    "GuidedTool",
    "LarkWriter",
    "calls",
    "calls_in_text",
    "guide_grammar",
    "required_calls",
]
