"""How each family writes calls, for the tests: an independent spelling of what the parsers read."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

Arguments = dict[str, Any]
DSML = "｜DSML｜"
NS = "]<]minimax[>["


@dataclass(frozen=True)
class Family:
    """`tokens` are the tags that its tokenizers have as added tokens; `call` writes the n-th call."""

    name: str
    call: Callable[[str, Arguments, int], str]
    open: str = ""
    close: str = ""
    between: str = ""
    tokens: tuple[str, ...] = ()
    inside: str = "a <think> </tool_call> [b] {c} <d>"  # a string that holds what looks like tags
    garbage: str | None = ""  # behind `open`, what is no call
    is_found_alone: bool = True  # a call counts without `open` and `close`
    reasons_first: bool = True  # a call inside reasoning counts

    def calls(self, *calls: tuple[str, Arguments]) -> str:
        written = (self.call(name, arguments, index) for index, (name, arguments) in enumerate(calls))
        return self.open + self.between.join(written) + self.close


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def text_of(value: Any) -> str:
    return value if isinstance(value, str) else dumps(value)


def as_json(before: str = "", after: str = "", name: str = "name", arguments: str = "arguments"):
    return lambda tool, values, _: before + dumps({name: tool, arguments: values}) + after


def as_xml(
    function: str,
    end_function: str,
    parameter: str,
    end_parameter: str,
    *,
    before: str = "",
    after: str = "",
    kind: Callable[[Any], str] = lambda value: "",
):
    def call(tool: str, values: Arguments, _: int) -> str:
        written = "".join(
            parameter.replace("@", key).replace("#", kind(value)) + text_of(value) + end_parameter
            for key, value in values.items()
        )
        return before + function.replace("@", tool) + written + end_function + after

    return call


def as_invoke(prefix: str, *, string: bool = False, before: str = "", after: str = ""):
    kind = ' string="#"' if string else ""
    return as_xml(
        f'<{prefix}invoke name="@">\n',
        f"</{prefix}invoke>\n",
        f'<{prefix}parameter name="@"{kind}>',
        f"</{prefix}parameter>\n",
        before=before,
        after=after,
        kind=lambda value: "true" if isinstance(value, str) else "false",
    )


def as_python(tool: str, values: Arguments, _: int) -> str:
    return f"{tool}({', '.join(f'{key}={value!r}' for key, value in values.items())})"


def as_braces(quote: str):
    def write(value: Any) -> str:
        match value:
            case str():
                return quote + value + quote
            case dict():
                return "{" + ",".join(f"{key}:{write(item)}" for key, item in value.items()) + "}"
            case list():
                return "[" + ",".join(map(write, value)) + "]"
        return dumps(value)

    return lambda tool, values, _: f"call:{tool}{write(values)}"


def as_elements(tool: str, values: Arguments, _: int) -> str:
    def element(key: str, value: Any) -> str:
        match value:
            case dict():
                inner = "".join(element(name, item) for name, item in value.items())
            case list():
                inner = "".join(element("item", item) for item in value)
            case _:
                inner = text_of(value)
        return f"{NS}<{key}>{inner}{NS}</{key}>"

    inner = "".join(element(key, value) for key, value in values.items())
    return f'{NS}<invoke name="{tool}">{inner}{NS}</invoke>\n'


def as_named(before: str, between: str, after: str):
    return lambda tool, values, index: (
        before.replace("#", str(index)) + tool + between.replace("#", str(index)) + (dumps(values) + after)
    )


_FUNCTION = as_xml("<function=@>\n", "</function>\n", "<parameter=@>\n", "\n</parameter>\n")
_ARG_KEY = as_xml("<tool_call>@\n", "</tool_call>", "<arg_key>@</arg_key>\n<arg_value>", "</arg_value>\n")
_TOOL_CALL = ("<tool_call>", "</tool_call>")
_SEED = ("<seed:tool_call>", "</seed:tool_call>")
_ARG_TOKENS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<tool_call>", "</tool_call>")
_DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)
_KIMI = (
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>",
    "<|tool_call_argument_begin|>",
)  # fmt: skip
_HARMONY = ("<|channel|>", "<|start|>", "<|message|>", "<|call|>", "<|end|>", "<|constrain|>")
_STEP = (
    "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>", "<｜tool_call_begin｜>", "<｜tool_call_end｜>", "<｜tool_sep｜>",
)  # fmt: skip
_IFM = tuple(
    f"<{end}ifm|{tag}>" for tag in ("tool_calls", "tool_call", "arg_key", "arg_type", "arg_value") for end in ("", "/")
)
_PLAMO = ("<|plamo:begin_", "<|plamo:end_", ":plamo|>", "<|plamo:constrain|>", "<|plamo:msg|>")


def _plamo(tool: str, values: Arguments, _: int) -> str:
    def wrap(part: str, inner: str) -> str:
        return f"<|plamo:begin_tool_{part}:plamo|>{inner}<|plamo:end_tool_{part}:plamo|>"

    message = "<|plamo:constrain|>json<|plamo:msg|>" + dumps(values)
    return wrap("request", wrap("name", tool) + wrap("arguments", message))


def _frame(tool: str, values: Arguments, index: int) -> str:
    kinds = {str: "string", int: "number", list: "array", dict: "object"}
    arguments = "".join(
        f'<|open|>argument key="{key}" type="{kinds[type(value)]}"<|sep|>{text_of(value)}<|close|>argument<|sep|>'
        for key, value in values.items()
    )
    return f'<|open|>call tool="{tool}" index="{index + 1}"<|sep|>{arguments}<|close|>call<|sep|>'


def tagged(name: str, open: str, close: str, **options: Any) -> Family:
    """JSON calls, each in tags of its own."""
    return Family(
        name, as_json(open, close), between="\n", tokens=tuple(tag.strip() for tag in (open, close) if tag), **options
    )


def braced(name: str, quote: str, open: str, close: str) -> Family:
    call = as_braces(quote)
    return Family(name, lambda *values: open + call(*values) + close, tokens=(open, close, quote))


def listed(name: str, open: str, close: str, *, call: Any = None, tokens: Iterable[str] = (), **options: Any) -> Family:
    """A JSON list of calls."""
    return Family(name, call or as_json(), f"{open}[", f"]{close}", ", ", tuple(tokens), **options)


def hunyuan(suffix: str) -> Family:
    def tag(name: str) -> str:
        return f"<{name}{suffix}>"

    names = ("tool_calls", "tool_call", "arg_key", "arg_value")
    argument = f"{tag('arg_key')}@{tag('/arg_key')}\n{tag('arg_value')}"
    head, end = f"{tag('tool_call')}@{tag('tool_sep')}\n", f"{tag('/tool_call')}\n"
    call = as_xml(head, end, argument, f"{tag('/arg_value')}\n")
    tokens = (tag("tool_sep"), *map(tag, names), *(tag(f"/{name}") for name in names))
    return Family("hy_v3", call, f"{tag('tool_calls')}\n", tag("/tool_calls"), tokens=tokens)


FAMILIES = [
    tagged("hermes", "<tool_call>\n", "\n</tool_call>"),
    Family(
        "qwen3_xml",
        lambda *call: f"<tool_call>\n{_FUNCTION(*call)}</tool_call>",
        tokens=_TOOL_CALL,
    ),
    Family("qwen3_coder", _FUNCTION, "<tool_call>\n", "</tool_call>", tokens=_TOOL_CALL),
    Family(
        "mimo",
        as_xml("<tool_call>\n<function=@>\n", "</function>\n</tool_call>", "<parameter=@>", "</parameter>\n"),
        tokens=_TOOL_CALL,
    ),
    Family(
        "seed_oss",
        _FUNCTION,
        "<seed:tool_call>\n",
        "</seed:tool_call>",
        tokens=_SEED,
    ),
    Family("glm45", _ARG_KEY, between="\n", tokens=_ARG_TOKENS),
    Family(
        "glm47",
        as_xml("<tool_call>@", "</tool_call>", "<arg_key>@</arg_key><arg_value>", "</arg_value>"),
        tokens=_ARG_TOKENS,
    ),
    hunyuan(""),
    hunyuan(":opensource"),
    Family(
        "deepseek_v3",
        as_named("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>"),
        _DEEPSEEK[0],
        _DEEPSEEK[1],
        "\n",
        _DEEPSEEK,
    ),
    Family(
        "deepseek_v31",
        as_named("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        _DEEPSEEK[0],
        _DEEPSEEK[1],
        tokens=_DEEPSEEK,
    ),
    Family(
        "deepseek_v32",
        as_invoke(DSML, string=True),
        f"<{DSML}function_calls>\n",
        f"</{DSML}function_calls>",
        tokens=(DSML,),
    ),
    Family(
        "deepseek_v4", as_invoke(DSML, string=True), f"<{DSML}tool_calls>\n", f"</{DSML}tool_calls>", tokens=(DSML,)
    ),
    Family("deepseek_v41", as_invoke(DSML + " ", string=True), f"<{DSML} calls>\n", f"</{DSML} calls>", tokens=(DSML,)),
    Family(
        "minimax_m2",
        as_invoke(""),
        "<minimax:tool_call>\n",
        "</minimax:tool_call>",
        tokens=("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    Family("minimax_m3", as_elements, f"{NS}<tool_call>\n", f"{NS}</tool_call>", tokens=(NS,)),
    Family(
        "kimi_k2",
        as_named("<|tool_call_begin|>functions.", ":# <|tool_call_argument_begin|>", "<|tool_call_end|>"),
        _KIMI[0],
        _KIMI[1],
        tokens=_KIMI,
    ),
    Family(
        "openai",
        as_named("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "<|call|>"),
        between="<|start|>assistant",
        tokens=_HARMONY,
        garbage=None,
    ),
    Family(
        "openai",
        as_named("<|start|>assistant to=functions.", "<|channel|>commentary json<|message|>", "<|call|>"),
        tokens=_HARMONY,
        garbage=None,
    ),
    listed("mistral", "[TOOL_CALLS] ", "", tokens=("[TOOL_CALLS]",)),
    Family("mistral", as_named("[TOOL_CALLS]", "[ARGS]", ""), tokens=("[TOOL_CALLS]", "[ARGS]"), garbage=None),
    Family("llama3_json", as_json(arguments="parameters"), between="; ", garbage=None),
    Family("llama4_json", as_json(arguments="parameters"), "<|python_tag|>", between=";", tokens=("<|python_tag|>",)),
    Family("pythonic", as_python, "[", "]", ", ", garbage=None, is_found_alone=False),
    Family(
        "llama4_pythonic",
        as_python,
        "<|python_start|>[",
        "]<|python_end|>",
        ", ",
        ("<|python_start|>", "<|python_end|>"),
        is_found_alone=False,
    ),
    Family(
        "lfm2",
        as_python,
        "<|tool_call_start|>[",
        "]<|tool_call_end|>",
        ", ",
        ("<|tool_call_start|>", "<|tool_call_end|>"),
        is_found_alone=False,
    ),
    Family(
        "olmo3",
        as_python,
        "<function_calls>",
        "</function_calls>",
        "\n",
        ("<function_calls>", "</function_calls>"),
        is_found_alone=False,
    ),
    braced("gemma4", '<|"|>', "<|tool_call>", "<tool_call|>"),
    braced("functiongemma", "<escape>", "<start_function_call>", "<end_function_call>"),
    listed("granite", "<|tool_call|> ", "", tokens=("<|tool_call|>",)),
    tagged("granite-20b-fc", "<function_call>", ""),
    listed("hunyuan_a13b", "<tool_calls>", "</tool_calls>", tokens=("<tool_calls>", "</tool_calls>")),
    listed("jamba", "<tool_calls>", "</tool_calls>"),
    Family(
        "step3",
        as_invoke("steptml:", before="<｜tool_call_begin｜>function<｜tool_sep｜>", after="<｜tool_call_end｜>"),
        _STEP[0],
        _STEP[1],
        tokens=_STEP,
    ),
    Family(
        "internlm",
        as_json("<|action_start|><|plugin|>\n", "<|action_end|>", arguments="parameters"),
        tokens=("<|action_start|>", "<|plugin|>", "<|action_end|>"),
    ),
    listed("phi4_mini_json", "functools", ""),
    tagged("longcat", "<longcat_tool_call>", "</longcat_tool_call>"),
    Family(
        "longcat",
        as_xml(
            "<longcat_tool_call>@\n",
            "</longcat_tool_call>",
            "<longcat_arg_key>@</longcat_arg_key>\n<longcat_arg_value>",
            "</longcat_arg_value>\n",
        ),
        between="\n",
    ),
    listed("nemotron_nano_v2", "<TOOLCALL>", "</TOOLCALL>"),
    listed(
        "apertus",
        "<|tools_prefix|>",
        "<|tools_suffix|>",
        call=lambda tool, values, _: dumps({tool: values}),
        tokens=("<|tools_prefix|>", "<|tools_suffix|>"),
        is_found_alone=False,
    ),
    listed("xlam", "", "", garbage=None),
    listed("xlam", "```json\n", "\n```"),
    replace(
        tagged("gigachat3", "<|message_sep|>\n\nfunction call<|role_sep|>\n", ""),
        tokens=("<|message_sep|>", "<|role_sep|>"),
    ),
    tagged("gigachat3", "<|function_call|>", ""),
    Family("minicpm5", as_xml('<function name="@">', "</function>", '<param name="@">', "</param>"), garbage=None),
    Family(
        "minicpm5",
        as_xml('<function name="@">', "</function>", '<param name="@"><![CDATA[', "]]></param>"),
        inside="a </param> </function> ]] ]>",
        garbage=None,
    ),
    Family("dots", as_invoke(""), "<dots_function_call>", "</dots_function_call>"),
    Family(
        "k2_horizon",
        as_json("<ifm|tool_call>", "</ifm|tool_call>"),
        "<ifm|tool_calls>",
        "</ifm|tool_calls>",
        tokens=_IFM,
    ),
    Family(
        "k2_horizon",
        as_xml(
            "<ifm|tool_call>@\n",
            "</ifm|tool_call>",
            "<ifm|arg_key>@</ifm|arg_key>\n<ifm|arg_type>#</ifm|arg_type>\n<ifm|arg_value>",
            "</ifm|arg_value>\n",
            kind=lambda value: "string" if isinstance(value, str) else "object",
        ),
        "<ifm|tool_calls>",
        "</ifm|tool_calls>",
        tokens=_IFM,
    ),
    Family(
        "kimi_k3",
        _frame,
        "<|open|>tools<|sep|>",
        "<|close|>tools<|sep|>",
        tokens=("<|open|>", "<|sep|>", "<|close|>"),
    ),
    Family(
        "inkling",
        as_json("<|content_invoke_tool_json|>", "<|end_message|>", arguments="args"),
        tokens=("<|content_invoke_tool_json|>", "<|end_message|>"),
    ),
    Family("plamo3", _plamo, "<|plamo:begin_tool_requests:plamo|>", "<|plamo:end_tool_requests:plamo|>", tokens=_PLAMO),
    Family("muse", as_invoke("atem:"), "<atem:function_calls>\n", "</atem:function_calls>"),
    listed(
        "cohere_command3",
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        call=lambda tool, values, index: dumps({"tool_call_id": str(index), "tool_name": tool, "parameters": values}),
        tokens=("<|START_ACTION|>", "<|END_ACTION|>"),
    ),
]
