"""Bodies of tool calls: the text between the tags of a call."""

from .body import Body, BodyContext, BodyStatus, NewBody
from .tool_schema import Schemas

__all__ = ["Body", "BodyContext", "BodyStatus", "NewBody", "Schemas"]
