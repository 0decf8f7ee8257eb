"""Writes grammars, in llguidance's Lark notation, of text that the parsers read. Knows no tokenizer."""

from .calls import CallsWriter
from .carried import CarriedNames
from .guide_grammar import guide_grammar
from .lark import LarkWriter
from .shapes import GuidedTool

__all__ = ["CallsWriter", "CarriedNames", "GuidedTool", "LarkWriter", "guide_grammar"]
