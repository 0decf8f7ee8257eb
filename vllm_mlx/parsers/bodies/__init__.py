"""Bodies of tool calls. Tags around them are not theirs."""

from .base import BodyStatus, Schemas, ToolBody
from .json_body import JsonBody
from .json_or_xml import JsonOrXmlBody
from .xml_body import XmlBody

__all__ = ["BodyStatus", "JsonBody", "JsonOrXmlBody", "Schemas", "ToolBody", "XmlBody"]
