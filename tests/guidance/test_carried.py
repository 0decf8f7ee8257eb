"""A format carries a name exactly if its parser reads it back from whatever its grammar lets a model write."""

from collections.abc import Sequence

import pytest

from tests.support.named_formats import required_calls
from vllm_mlx.core.errors import InvalidParameter, shown
from vllm_mlx.core.messages import ToolSpec
from vllm_mlx.formats.families import CALL_FORMATS, FAMILIES
from vllm_mlx.formats.family import NO_HEADER
from vllm_mlx.guidance.grammars import CarriedNames, GuidedTool

from .test_calls import NOTHING, sampler_of

ORDINARY = ("mcp__files-2", "server.tool", "Größe", "functions.exec")  # every format carries them
ODD = (
    "server:tool", "e\u0301", "a b", " a", "a\nb", "a>b", "f(x", 'a"b', "a&amp;b", "<|im_end|>", "</tool_call>",
    "a:1", "",
)  # fmt: skip
FORMATS = {id(family.calls): family.call_choices[0] for family in FAMILIES if family.calls is not None}


def is_read_back(name: str, tools: str, *, has_tokens: bool) -> bool:
    """Whether a forced call to a tool of this name is read as one."""
    one = sampler_of(tools, has_tokens=has_tokens)
    spec = ToolSpec(name, None, NOTHING)
    guided = [GuidedTool.of(spec, "tools", is_strict=True)]
    ids = one.draw_reply(required_calls(guided, tools, one.writer(), NO_HEADER, 1), most=900, is_tried=False)
    assert ids is not None
    read = one.read(ids, tools, [spec])
    return read.calls == [(name, {})] and read.num_open == 0 and not read.text.strip()


def carried(names: Sequence[str], tools: str, *, has_tokens: bool = True) -> CarriedNames:
    return CarriedNames(names, CALL_FORMATS[tools], sampler_of(tools, has_tokens=has_tokens).tokenizer.added)


@pytest.mark.parametrize(("number", "tools"), [pytest.param(*item, id=item[1]) for item in enumerate(FORMATS.values())])
def test_a_name_is_carried_if_it_is_read_back(number: int, tools: str) -> None:
    has_tokens = number % 2 == 0
    for name in (*ORDINARY, *ODD):
        is_carried = name in carried([name], tools, has_tokens=has_tokens)
        assert is_carried == is_read_back(name, tools, has_tokens=has_tokens), name
        assert is_carried or name not in ORDINARY


@pytest.mark.parametrize("tools", ["hermes", "qwen3_xml", "kimi_k2", "gpt_oss", "lfm2"])
def test_declared_names_that_begin_alike_are_all_carried(tools: str) -> None:
    names = ["exec", "exec_all", "exec.all", "e", "functions.read"]
    assert all(name in carried(names, tools) for name in names)


@pytest.mark.parametrize(("tools", "is_carried"), [("hermes", True), ("qwen3_xml", False), ("glm45", False)])
def test_a_long_name_is_carried_where_its_parser_reads_so_much(tools: str, is_carried: bool) -> None:
    name = "x" * 300
    assert (name in carried([name], tools)) == is_read_back(name, tools, has_tokens=True) == is_carried


ORDINARY_KEYS = ("a.b", "$filter", "x-y", "@type", "é", "e\u0301", "1")
ODD_KEYS = (
    "a>b",
    " a",
    "\n",
    'a"b',
    "a=b",
    "user:id",
    "a b",
    "</parameter>",
    "<|im_end|>",
    "a,b",
    "f[0]",
    "",
    "x" * 300,
)


USUAL = ("hermes", "qwen3_xml", "kimi_k2", "gpt_oss", "lfm2", "glm45")


@pytest.mark.parametrize(
    ("number", "tools"),
    [
        pytest.param(*item, id=item[1], marks=() if item[1] in USUAL else pytest.mark.full)
        for item in enumerate(FORMATS.values())
    ],
)
def test_arguments_have_the_declared_names_or_are_not_written(number: int, tools: str) -> None:
    """A required argument whose name the format cannot carry is refused, an optional one is left out."""
    one = sampler_of(tools, has_tokens=number % 2 == 0)

    def arguments(key: str, *required: str) -> object:
        schema = {**NOTHING, "properties": {key: {"const": 1}}, "required": list(required)}
        spec = ToolSpec("f", None, schema, param="tools[0].parameters")
        guided = [GuidedTool.of(spec, spec.param, is_strict=True)]
        ids = one.draw_reply(required_calls(guided, tools, one.writer(), NO_HEADER, 1), most=900, is_tried=False)
        assert ids is not None
        [(_, read)] = one.read(ids, tools, [spec]).calls
        return read

    for key in (*ORDINARY_KEYS, *ODD_KEYS):
        try:
            assert arguments(key, key) == {key: 1}
        except InvalidParameter as error:
            assert error.param == f"tools[0].parameters.properties.{shown(key)}" and key not in ORDINARY_KEYS
            assert arguments(key) == {}


def test_a_name_that_is_not_carried_is_refused_where_it_stands() -> None:
    specs = [ToolSpec(name, None, NOTHING, param=f"tools[{at}].input_schema") for at, name in enumerate(("ok", "a>b"))]
    names = carried([spec.name for spec in specs], "qwen3_xml")
    names.check(specs[:1])
    with pytest.raises(InvalidParameter, match="'a>b' can be forced") as caught:
        names.check(specs)
    assert caught.value.param == "tools[1].name"
