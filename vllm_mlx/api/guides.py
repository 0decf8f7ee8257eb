"""Request fields that constrain the form of a reply → core guides. Knows no protocol's envelope."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NoReturn

from pydantic import BeforeValidator, Field

from ..core.errors import InvalidParameter, Unsupported, shown
from ..core.request import (
    Choice,
    Grammar,
    Guide,
    GuideForm,
    JsonSchema,
    Regex,
    StructuralFormat,
    StructuralTag,
    TagStructure,
)
from .text import json_in
from .wire import ExtraFields, Ignored, Items, Wire

FormatFields = Mapping[str, tuple[str, ...]]  # by the type of a format: the fields that belong to it
ANY_OBJECT = JsonSchema({"type": "object"})
_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class SchemaFields(Wire):
    extras: ClassVar[ExtraFields | None] = {
        **dict.fromkeys(("name", "description"), Ignored("the model sees neither the schema nor words about it")),
        "strict": Ignored("a schema is always enforced"),
    }
    schema_: Any = Field(default=None, alias="schema")


class SchemaFormat(SchemaFields):
    """A format of Responses (`text.format`) or Messages (`output_config.format`)."""

    type: Any = None
    by_type: ClassVar[FormatFields] = {"text": (), "json_object": (), "json_schema": ("schema",)}


class Structure(Wire):
    extras: ClassVar[ExtraFields | None] = {}
    begin: str
    schema_: Any = Field(default_factory=dict, alias="schema")
    end: str


class TagFields(Wire):
    """A structural tag: in its newer form, with `format`, or in its older one, with `structures`."""

    extras: ClassVar[ExtraFields | None] = {}
    type: Literal["structural_tag"] | None = None
    format: dict[str, Any] | None = None
    structures: Items[Structure] | None = None
    triggers: Items[str] | None = None


class ChatFormat(TagFields):
    """A `response_format` of chat completions."""

    type: Any = None
    json_schema: SchemaFields | None = None
    by_type: ClassVar[FormatFields] = {
        "text": (),
        "json_object": (),
        "json_schema": ("json_schema",),
        "structural_tag": ("format", "structures", "triggers"),
    }


def _parsed_if_object(value: Any) -> Any:
    """Return the object that a text holds as JSON, or the value itself, which is refused where it is decoded."""
    try:
        parsed = json_in(value) if isinstance(value, str) else None
    except ValueError:
        parsed = None
    return parsed if isinstance(parsed, dict) else value


TagField = Annotated[TagFields | str, BeforeValidator(_parsed_if_object)]


def decode_format(format_: ChatFormat | SchemaFormat | None, param: str) -> Guide | None:
    """Decode a format. Raises InvalidParameter, also for a field that belongs to a format of another type."""
    if format_ is None:
        return None
    _check_fields(format_, param)
    match format_:
        case ChatFormat(type="text") | SchemaFormat(type="text"):
            return None
        case ChatFormat(type="json_object") | SchemaFormat(type="json_object"):
            return Guide(form=ANY_OBJECT, param=param)
        case ChatFormat(type="json_schema", json_schema=None):
            raise _missing(f"{param}.json_schema")
        case SchemaFormat(schema_=schema) | ChatFormat(type="json_schema", json_schema=SchemaFields(schema_=schema)):
            path = f"{param}.schema" if isinstance(format_, SchemaFormat) else f"{param}.json_schema.schema"
            if schema is None:
                raise _missing(path)
            return decode_guide("json", schema, path)
        case _:
            return Guide(form=_structural_tag(format_, param), param=param)


def _check_fields(format_: ChatFormat | SchemaFormat, param: str) -> None:
    kind = format_.type
    if not isinstance(kind, str) or kind not in format_.by_type:
        raise Unsupported(
            f"`{param}.type` {shown(repr(kind))} is not supported. Use 'text', 'json_object' or 'json_schema'.",
            param=f"{param}.type",
        )
    for attribute, field in type(format_).model_fields.items():
        name = field.alias or attribute
        if name not in ("type", *format_.by_type[kind]) and getattr(format_, attribute) is not None:
            path = f"{param}.{name}"
            raise Unsupported(f"`{path}` does not belong to a format of type '{kind}'. Leave it out.", param=path)


def decode_structured_outputs(fields: Mapping[str, Any] | None) -> Guide | None:
    """Decode vLLM's `structured_outputs`, which holds one kind of guide; other fields are None."""
    if fields is None:
        return None
    param, given = "structured_outputs", {name: value for name, value in fields.items() if value is not None}
    kinds = [name for name in _KINDS if name in given and given[name] is not False]
    if len(kinds) != 1:
        raise InvalidParameter(f"`{param}` takes exactly one of {', '.join(_KINDS)}.", param=param)
    in_reasoning = given.get("enable_in_reasoning", False)
    if not isinstance(in_reasoning, bool):
        _fail(f"{param}.enable_in_reasoning", "true or false")
    return decode_guide(kinds[0], given[kinds[0]], f"{param}.{kinds[0]}", in_reasoning=in_reasoning)


def decode_guide(kind: str, value: Any, param: str, *, in_reasoning: bool = False) -> Guide:
    """Decode one guide. `kind` is json, regex, choice, grammar, json_object or structural_tag."""
    return Guide(form=_form(kind, value, param), param=param, in_reasoning=in_reasoning)


def one_guide(*guides: Guide | None) -> Guide | None:
    """Return the guide that is given, if any. Raises InvalidParameter if two fields give one."""
    given = [guide for guide in guides if guide is not None]
    if len(given) > 1:
        raise InvalidParameter(f"Set either `{given[0].param}` or `{given[1].param}`, not both.", param=given[1].param)
    return given[0] if given else None


def _form(kind: str, value: Any, path: str) -> GuideForm:
    match kind:
        case "json":
            return _json(value, path)
        case "json_object":
            return ANY_OBJECT
        case "regex":
            return Regex(_text(value, path))
        case "grammar":
            return Grammar(_text(value, path))
        case "choice":
            if not isinstance(value, list):
                _fail(path, "a list of strings")
            return Choice(tuple(_text(option, path) for option in value))
        case _:
            return _structural_tag(value, path)


def _json(value: Any, path: str) -> JsonSchema:
    schema = _parsed(value, path)
    if not isinstance(schema, Mapping | bool):
        _fail(path, "a JSON schema: an object, true or false")
    return JsonSchema(schema)


def _structural_tag(tag: TagFields | str, path: str) -> StructuralTag | StructuralFormat:
    match tag:
        case TagFields(format=dict(tree), structures=None, triggers=None):
            return StructuralFormat(tree)
        case TagFields(format=None, structures=list(structures), triggers=list(triggers)):
            pieces = (_structure(piece, f"{path}.structures[{number}]") for number, piece in enumerate(structures))
            return StructuralTag(tuple(pieces), tuple(triggers))
        case str():
            _parsed(tag, path)
    raise InvalidParameter(
        f"`{path}` must hold either a `format`, or `triggers` and `structures` with `begin`, `schema` and `end`.",
        param=path,
    )


def _structure(structure: Structure, path: str) -> TagStructure:
    return TagStructure(structure.begin, _json(structure.schema_, f"{path}.schema").schema, structure.end)


def _parsed(value: Any, path: str) -> Any:
    """Return the value itself, or the JSON value in a string."""
    if not isinstance(value, str):
        return value
    try:
        return json_in(value)
    except ValueError as error:
        raise InvalidParameter(f"`{path}` is not valid JSON: {error}", param=path) from error


def _text(value: Any, path: str) -> str:
    if not isinstance(value, str):
        _fail(path, "a string")
    return value


def _missing(path: str) -> InvalidParameter:
    return InvalidParameter(f"`{path}` is required.", param=path, code="missing_required_parameter")


def _fail(path: str, wanted: str) -> NoReturn:
    raise InvalidParameter(f"`{path}` must be {wanted}.", param=path)
