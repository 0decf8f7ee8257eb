"""Request fields that constrain the form of a reply → core guides. Knows no protocol's envelope."""

from collections.abc import Mapping
from typing import Any, NoReturn

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

ANY_OBJECT = JsonSchema({"type": "object"})
_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


def decode_format(format_: Mapping[str, Any] | None, param: str, *, nested: bool = True) -> Guide | None:
    """Decode a `response_format`; or a `text.format`, whose schema is not `nested` under `json_schema`."""
    if format_ is None:
        return None
    match format_.get("type"):
        case "text":
            return None
        case "json_object":
            return Guide(form=ANY_OBJECT, param=param)
        case "json_schema":
            holder, path = (format_.get("json_schema"), f"{param}.json_schema") if nested else (format_, param)
            if not isinstance(holder, Mapping):
                raise _missing(path)
            path = f"{path}.schema"
            if holder.get("schema") is None:
                raise _missing(path)
            return decode_guide("json", holder["schema"], path)
        case "structural_tag" if nested:
            return Guide(form=_structural_tag(format_, param), param=param)
        case other:
            raise Unsupported(
                f"`{param}.type` {shown(repr(other))} is not supported. Use 'text', 'json_object' or 'json_schema'.",
                param=f"{param}.type",
            )


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
    """`kind` is json, regex, choice, grammar, json_object or structural_tag."""
    return Guide(form=_form(kind, value, param), param=param, in_reasoning=in_reasoning)


def one_guide(*guides: Guide | None) -> Guide | None:
    """The one guide that is given, or None. Raises InvalidParameter if two fields give one."""
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
            return _structural_tag(_parsed(value, path), path)


def _json(value: Any, path: str) -> JsonSchema:
    schema = _parsed(value, path)
    if not isinstance(schema, Mapping | bool):
        _fail(path, "a JSON schema: an object, true or false")
    return JsonSchema(schema)


def _structural_tag(value: Any, path: str) -> StructuralTag | StructuralFormat:
    """A structural tag in its newer form, with `format`, or in its older one, with `structures`."""
    if isinstance(value, Mapping) and isinstance(value.get("format"), Mapping):
        return StructuralFormat(value["format"])
    if not isinstance(value, Mapping) or not isinstance(value.get("structures"), list):
        raise InvalidParameter(
            f"`{path}` must hold either a `format`, or `triggers` and `structures` with `begin`, `schema` and `end`.",
            param=path,
        )
    triggers = value.get("triggers")
    if not isinstance(triggers, list):
        _fail(f"{path}.triggers", "a list of strings")
    structures = tuple(
        _structure(structure, f"{path}.structures[{number}]") for number, structure in enumerate(value["structures"])
    )
    return StructuralTag(structures, tuple(_text(trigger, f"{path}.triggers") for trigger in triggers))


def _structure(value: Any, path: str) -> TagStructure:
    if not isinstance(value, Mapping):
        _fail(path, "an object")
    schema = _json(value.get("schema", {}), f"{path}.schema").schema
    return TagStructure(_text(value.get("begin"), f"{path}.begin"), schema, _text(value.get("end"), f"{path}.end"))


def _parsed(value: Any, path: str) -> Any:
    """The value itself, or the JSON value that it holds as a string."""
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
