"""Bodies of tool calls. Tags around them are not theirs."""

from .body import Body, BodyContext, BodyStatus, NewBody
from .tool_schema import Schemas

__all__ = ["Body", "BodyContext", "BodyStatus", "NewBody", "Schemas"]
