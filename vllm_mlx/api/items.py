"""Lists and objects of wire types, whose validation stays short however much a client sends. Knows no protocol."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, cast

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticKnownError
from pydantic_core.core_schema import ListSchema, no_info_before_validator_function

T = TypeVar("T")


@dataclass(frozen=True)
class _InTurn:
    """The first item that is wrong ends the validation of a list, and other threads run between two items."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = cast(ListSchema, handler(source))
        assert schema["type"] == "list", "it marks lists"
        # Only a list that is not strict takes its items from a generator. No other JSON becomes one by that.
        in_turn: ListSchema = {**schema, "fail_fast": True, "strict": False}
        return no_info_before_validator_function(_in_turn, in_turn)


def _in_turn(value: Any) -> Any:
    """pydantic keeps the interpreter's lock but for what it calls in Python: here, for each item."""
    return _each(value) if isinstance(value, list) else value


def _each(items: list[Any]) -> Iterator[Any]:
    yield from items


Items = Annotated[list[T], _InTurn()]


@dataclass(frozen=True)
class AtMost:
    """Fields of an object, counted before any is looked at."""

    max_fields: int

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_before_validator_function(self._counted, handler(source))

    def _counted(self, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > self.max_fields:
            counts = {"field_type": "Dictionary", "max_length": self.max_fields, "actual_length": len(value)}
            raise PydanticKnownError("too_long", counts)
        return value
