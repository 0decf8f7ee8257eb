"""Base of the wire types of requests: strict values, bounded lists, judged extra fields. Knows no protocol."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar, cast

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticKnownError
from pydantic_core.core_schema import ListSchema, no_info_before_validator_function

from ..core.errors import Unsupported, shown_field

T = TypeVar("T")
ANY = object()  # every value is harmless
MAX_UNKNOWN = 16  # unknown fields that are reported for one body
_ITEM = re.compile(r"\[\d+\]")


@dataclass(frozen=True, slots=True)
class Ignored:
    """Values that change nothing in a correct reply, and the reason."""

    reason: str
    values: tuple[Any, ...] = (ANY,)
    otherwise: str = ""  # advice about any other value


@dataclass(frozen=True, slots=True)
class Refused:
    """Every value is refused. `beside`: the field with which this one is unsupported; None if it is never supported."""

    advice: str
    code: str | None = None  # a stable word for programs; None: the code of all unsupported fields
    beside: str | None = None


ExtraFields = Mapping[str, Ignored | Refused]


class UnknownFields:
    """Collects the unknown fields of one body that are not refused. It is the context of a validation.

    If `drops` is true, each unknown field is left out of the body. Otherwise it is refused, except in a type that
    tolerates it.
    """

    def __init__(self, *, drops: bool = False) -> None:
        self.drops = drops
        self._patterns: dict[str, None] = {}

    @property
    def patterns(self) -> tuple[str, ...]:
        """Paths without the numbers of list items, each once; `...` replaces those after `MAX_UNKNOWN`."""
        return tuple(self._patterns)

    def note(self, path: str) -> None:
        pattern = _ITEM.sub("[]", path)
        if pattern not in self._patterns and len(self._patterns) <= MAX_UNKNOWN:
            self._patterns[pattern if len(self._patterns) < MAX_UNKNOWN else "..."] = None


class Wire(BaseModel):
    """Base of the wire types. It rejects floats as integers and booleans as numbers.

    `extras` is the rule for each known field that the type does not declare; a field without a rule is unknown. If it
    is None, extra fields are not judged. `tolerates_unknown`: an unknown field of the type, or of a type inside it, is
    reported and has no effect; others are refused, unless the server drops them.
    """

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())
    extras: ClassVar[ExtraFields | None] = None
    tolerates_unknown: ClassVar[bool] = False

    def extra_rules(self) -> ExtraFields | None:
        return self.extras


class LeftOut(Wire):
    """A part of a type that has no place in a prompt. It is reported as an unknown field is."""

    type: str


class Body(Wire):
    """Base of request bodies. Validation raises Unsupported for an extra field that cannot be ignored."""

    def model_post_init(self, context: Any) -> None:
        """Judge the extra fields once. FastAPI validates the finished instance again, on the event loop."""
        _judge(self, "", context if isinstance(context, UnknownFields) else UnknownFields())


def _judge(wire: Wire, path: str, unknown: UnknownFields, *, is_tolerated: bool = False) -> None:
    """Judges the extra fields of `wire`, then those of every wire type inside it. `path` names where it is."""
    extra, rules = wire.model_extra, wire.extra_rules()
    is_tolerated = is_tolerated or wire.tolerates_unknown
    if isinstance(wire, LeftOut):
        unknown.note(path + shown_field(wire.type))
    if extra and rules is not None:
        for name in [name for name, value in extra.items() if value is not None]:  # a null field counts as absent
            where, rule = path + shown_field(name), rules.get(name)
            if rule is not None:
                _judge_field(rule, extra[name], where)
            elif unknown.drops or is_tolerated:
                unknown.note(where)
                del extra[name]
            else:
                raise Unsupported(f"Unknown parameter: `{where}`. Leave it out.", param=where, code="unknown_parameter")
    for name, value in wire.__dict__.items():
        if isinstance(value, Wire):
            _judge(value, f"{path}{name}.", unknown, is_tolerated=is_tolerated)
        elif isinstance(value, list):
            for number, item in enumerate(value):
                if isinstance(item, Wire):
                    _judge(item, f"{path}{name}[{number}].", unknown, is_tolerated=is_tolerated)


def _judge_field(rule: Ignored | Refused, value: Any, path: str) -> None:
    match rule:
        case Ignored(values=values) if ANY in values or any(_same(value, harmless) for harmless in values):
            return
        case Ignored(otherwise=advice):
            raise Unsupported(f"`{path}` is not supported with this value. {advice}", param=path)
        case Refused(advice=advice, code=code, beside=other):
            where = "" if other is None else f" together with `{other}`"
            raise Unsupported(f"`{path}` is not supported{where}. {advice}", param=path, code=code)


def _same(left: Any, right: Any) -> bool:
    """Compare two values, and distinguish booleans from numbers."""
    return left == right and isinstance(left, bool) == isinstance(right, bool)


def field_of(value: Any, name: str) -> Any:
    """Return a field of a JSON object or of a wire type, or None: a discriminator may get either."""
    return value.get(name) if isinstance(value, dict) else getattr(value, name, None)


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
