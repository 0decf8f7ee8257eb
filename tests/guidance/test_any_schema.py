"""Any JSON value at any keyword of a schema: a request is prepared or refused, within the bound of visits."""

from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.drawing import examples
from vllm_mlx.core.config import EngineConfig
from vllm_mlx.core.errors import RequestError
from vllm_mlx.core.messages import Message, TextPart, ToolChoice, ToolSpec
from vllm_mlx.core.request import Guide, JsonSchema, Request, SamplingParams
from vllm_mlx.core.sequence import PromptInputs
from vllm_mlx.formats import SchemaBudget
from vllm_mlx.formats.families import CALL_FORMATS
from vllm_mlx.formats.pipeline import declared_schemas
from vllm_mlx.guidance.constraint_builder import ConstraintBuilder

from .random_sampler import sampler

FORMATS = ("hermes", "qwen3_xml", "gemma4", "minimax_m3", "lfm2", "deepseek_v32")
MAX_VISITS = 20_000
NAMES = ("a", "b", "items", "properties")
KEYWORDS = (
    "type", "properties", "required", "additionalProperties", "items", "prefixItems", "anyOf", "oneOf", "allOf", "$ref",
    "$defs", "definitions", "enum", "const", "format", "pattern", "minLength", "maxLength", "minItems", "maxItems",
    "minimum", "maximum", "exclusiveMinimum", "multipleOf", "nullable", "patternProperties", "minProperties",
    "maxProperties", "not", "if", "then", "title", "default", "x-guidance",
)  # fmt: skip
TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
REFERENCES = ("#", "#/$defs/a", "#/$defs/b", "#/properties/a", "#/definitions/a", "#/$defs/a/anyOf", "x", "#/", "")

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 5)
    | st.sampled_from([10**400, -(10**20), 2**31, 0.5, 3.0, float("nan"), float("inf"), "", "a", "\ud83d", "date", "("])
    | st.text(max_size=4)
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3)
)
leaves = st.builds(lambda kind: {"type": kind}, st.sampled_from(TYPES)) | st.builds(
    lambda reference: {"$ref": reference}, st.sampled_from(REFERENCES)
)


def _schema(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several, named = st.lists(inner, max_size=4), st.dictionaries(st.sampled_from(NAMES), inner, max_size=3)
    meant: dict[str, st.SearchStrategy[Any]] = {
        "type": st.sampled_from(TYPES) | st.lists(st.sampled_from(TYPES), max_size=3),
        "$ref": st.sampled_from(REFERENCES),
        "enum": st.lists(values, max_size=3) | st.integers(50, 3000).map(lambda num: [f"e{n}" for n in range(num)]),
        "required": st.lists(st.sampled_from(NAMES), max_size=3),
        "pattern": st.sampled_from(["^a", "(", "a{9}", "[", "(?=a)", "a|b$"]),
        **dict.fromkeys(("properties", "patternProperties", "$defs", "definitions"), named),
        **dict.fromkeys(("anyOf", "oneOf", "allOf", "prefixItems"), several),
        **dict.fromkeys(("items", "additionalProperties", "not"), inner),
    }
    pairs = st.sampled_from(KEYWORDS).flatmap(
        lambda key: st.tuples(st.just(key), meant.get(key, values) if key in meant else values | inner)
    )
    odd = st.tuples(st.sampled_from(KEYWORDS), values | inner)
    return st.lists(pairs | pairs | pairs | odd, max_size=6).map(dict)


schemas = st.recursive(leaves | values, _schema, max_leaves=12)
deep = st.builds(
    lambda keyword, depth, leaf: _nested(keyword, depth, leaf),
    st.sampled_from(["items", "not", "additionalProperties", "anyOf", "properties", "enum"]),
    st.sampled_from([10, 63, 70, 400]),
    leaves,
)
wide = st.builds(
    lambda keyword, num, leaf: {keyword: [leaf] * num, "anyOf": [leaf] * num, "$defs": {"a": leaf, "b": leaf}},
    st.sampled_from(["oneOf", "allOf", "enum", "required", "prefixItems"]),
    st.sampled_from([2, 9, 300]),
    schemas,
)


def _nested(keyword: str, depth: int, leaf: Any) -> Any:
    for _ in range(depth):
        leaf = {keyword: [leaf] if keyword in ("anyOf", "enum") else {"a": leaf} if keyword == "properties" else leaf}
    return leaf


@cache
def guidance(name: str) -> ConstraintBuilder:
    tokenizer = sampler().tokenizer
    return ConstraintBuilder(
        tokenizer, EngineConfig(model="m"), vocab_size=tokenizer.vocab_size, tools=CALL_FORMATS[name]
    )


def prepared(request: Request, name: str) -> None:
    """What a request's schemas go through before it runs."""
    budget = SchemaBudget(MAX_VISITS)
    try:
        declared_schemas(request, budget)
        guidance(name).constraint(request, PromptInputs(token_ids=(1,)), budget)
    except RequestError as error:
        assert error.message
    assert budget.num_visits < 2 * MAX_VISITS


def asked(**fields: Any) -> Request:
    return Request(request_id="r", messages=(Message("user", (TextPart("hi"),)),), **fields)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=examples(15), deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=schemas | deep | wide | schemas.map(lambda each: {"properties": {"a": each}, "required": ["a"]}))
def test_tools_with_any_schema_are_prepared_or_refused(name: str, schema: Any) -> None:
    tool = ToolSpec("f", None, schema, strict=True, param="tools[0].function.parameters")
    for choice in (ToolChoice("required"), ToolChoice("auto"), ToolChoice("none")):
        prepared(asked(tools=(tool,), tool_choice=choice), name)


@settings(max_examples=examples(25), deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=schemas | deep | wide)
def test_replies_of_any_schema_are_prepared_or_refused(schema: Any) -> None:
    prepared(asked(sampling=SamplingParams(guide=Guide(form=JsonSchema(schema)))), "hermes")
