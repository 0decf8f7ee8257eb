"""Base of the wire types of requests: strict values, bounded lists, judged extra fields. Knows no protocol."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self, TypeVar, cast

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema, PydanticKnownError
from pydantic_core.core_schema import ListSchema, no_info_before_validator_function

from ..core.errors import Unsupported, shown

T = TypeVar("T")
ANY = object()  # every value is harmless


@dataclass(frozen=True, slots=True)
class Ignored:
    """Values that change nothing in a correct reply, and the reason."""

    reason: str
    values: tuple[Any, ...] = (ANY,)
    otherwise: str = ""  # advice about any other value


@dataclass(frozen=True, slots=True)
class Refused:
    advice: str


ExtraFields = Mapping[str, Ignored | Refused]


class Wire(BaseModel):
    """Base of the wire types. Strict: a float is no integer, a bool is no number.

    `extras` is the rule for each known field that the type does not declare; a field without a rule is refused as
    unknown. None: extra fields are not looked at.
    """

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())
    extras: ClassVar[ExtraFields | None] = None


class Body(Wire):
    """Base of request bodies. Validation raises Unsupported for an extra field that cannot be ignored."""

    @model_validator(mode="after")
    def _judge_extras(self) -> Self:
        _judge(self, "")
        return self


def _judge(wire: Wire, path: str) -> None:
    """Judges the extra fields of `wire`, then those of every wire type inside it. `path` names where it is."""
    if wire.extras is not None and wire.model_extra:
        for name, value in wire.model_extra.items():
            if value is not None:  # null means that the field was left out
                _judge_field(wire.extras.get(name), value, path + shown(name))
    for name, value in wire.__dict__.items():
        if isinstance(value, Wire):
            _judge(value, f"{path}{name}.")
        elif isinstance(value, list) and value and isinstance(value[0], Wire):
            for number, item in enumerate(value):
                _judge(item, f"{path}{name}[{number}].")


def _judge_field(rule: Ignored | Refused | None, value: Any, path: str) -> None:
    match rule:
        case Ignored(values=values) if ANY in values or any(_same(value, harmless) for harmless in values):
            return
        case Ignored(otherwise=advice) | Refused(advice=advice):
            raise Unsupported(f"`{path}` is not supported with this value. {advice}", param=path)
        case None:
            raise Unsupported(f"Unknown parameter: `{path}`. Leave it out.", param=path, code="unknown_parameter")


def _same(left: Any, right: Any) -> bool:
    """Equality that distinguishes booleans from numbers."""
    return left == right and isinstance(left, bool) == isinstance(right, bool)


@dataclass(frozen=True)
class _InTurn:
    """Validates a list item by item: the first wrong item ends it, and other threads run between two items."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = cast(ListSchema, handler(source))
        assert schema["type"] == "list", "it marks lists"
        # Only a list that is not strict accepts a generator of items. No other JSON value passes because of that.
        in_turn: ListSchema = {**schema, "fail_fast": True, "strict": False}
        return no_info_before_validator_function(_in_turn, in_turn)


def _in_turn(value: Any) -> Any:
    """pydantic holds the interpreter's lock except while it calls Python: here, once for each item."""
    return (item for item in value) if isinstance(value, list) else value


Items = Annotated[list[T], _InTurn()]


@dataclass(frozen=True)
class AtMost:
    """Bounds the number of fields of an object; they are counted before any of them is validated."""

    max_fields: int

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_before_validator_function(self._counted, handler(source))

    def _counted(self, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > self.max_fields:
            counts = {"field_type": "Dictionary", "max_length": self.max_fields, "actual_length": len(value)}
            raise PydanticKnownError("too_long", counts)
        return value
