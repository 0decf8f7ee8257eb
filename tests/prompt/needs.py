"""Small chat templates that each take less than the API allows, as some real templates do."""

_TOOLS = "{%- for tool in tools or [] -%}{{- '[' + tool.function.name + ']\n' -}}{%- endfor -%}"
_CALLS = """{%- for call in m.tool_calls or [] -%}
{{- '<call>' + call.function | tojson + '</call>' -}}
{%- endfor -%}"""
_TURN = "{{- '<|im_start|>' + ROLE + '\n' + (m.content or '') -}}CALLS{{- '<|im_end|>\n' -}}"
_GO = "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"


def _template(before: str = "", *, turn: str = _TURN, calls: str = _CALLS, tools: str = _TOOLS) -> str:
    turns = "{%- for m in messages -%}" + turn.replace("CALLS", calls) + "{%- endfor -%}"
    return (before + tools + turns + _GO).replace("ROLE", "m.role")


def _checked(condition: str) -> str:
    return "{%- for m in messages if " + condition + " -%}{{- raise_exception('refused') -}}{%- endfor -%}"


_COUNTED = "m.role == 'user' or m.role == 'assistant' and not m.tool_calls"
_ALTERNATION = (
    "{%- set ns = namespace(n=0) -%}{%- for m in messages if COUNTED -%}{%- if (m.role == 'user') != (ns.n % 2 == 0) -%}"
    "{{- raise_exception('turns must alternate') -}}{%- endif -%}{%- set ns.n = ns.n + 1 -%}{%- endfor -%}"
)
_ONE_CALL = _checked("m.tool_calls and m.tool_calls | length > 1")
_OWN_CALL_ONLY = """{%- if m.tool_calls -%}{%- set ns.name = m.tool_calls[0].function.name -%}
{{- '<call>' + m.tool_calls[0].function | tojson + '</call>' -}}{%- endif -%}"""
_NAMED_RESULT = "{{- '<|im_start|>' + (ns.name if m.role == 'tool' else m.role) + '\n' + (m.content or '') -}}CALLS" \
    "{{- '<|im_end|>\n' -}}"  # fmt: skip
_TEXT_OR_CALLS = """{{- '<|im_start|>' + ROLE + '\n' -}}{%- if m.tool_calls -%}CALLS{%- else -%}{{- m.content -}}{%- endif -%}
{{- '<|im_end|>\n' -}}"""
_ID_CALL = """{%- for call in m.tool_calls or [] -%}
{{- '<call>' + call.id + call.function.arguments | tojson + '</call>' -}}
{%- endfor -%}"""
_FIELDS = "{%- for tool in tools or [] -%}{{- '[' + tool.function.name + tool.function.description + ']' -}}" \
    "{%- for name, value in tool.function.parameters.properties.items() -%}{{- name -}}{%- endfor -%}{%- endfor -%}"  # fmt: skip
_SCANNED = """{%- set at = loop.index0 -%}{%- for call in m.tool_calls or [] -%}
{{- '<call>' + call.function | tojson + '</call>' -}}{%- endfor -%}{%- set ns = namespace(on=m.tool_calls) -%}
{%- for r in messages[at + 1:] -%}{%- if r.role != 'tool' -%}{%- set ns.on = false -%}
{%- elif ns.on -%}{{- '<result>' + r.content + '</result>' -}}{%- endif -%}{%- endfor -%}"""

NEEDS = {
    "takes all": _template(),
    "alternation": _template(_ALTERNATION.replace("COUNTED", _COUNTED)),
    "alternation, text or calls": _template(_ALTERNATION.replace("COUNTED", _COUNTED), turn=_TEXT_OR_CALLS),
    "alternation of all": _template(_ALTERNATION.replace("COUNTED", "true")),
    "results are users": _template(
        _ALTERNATION.replace("COUNTED", "true").replace("(m.role == 'user')", "(m.role in ['user', 'tool'])")
    ),
    "one call": _template(_ONE_CALL),
    "first call only": _template("{%- set ns = namespace(name='none') -%}", turn=_NAMED_RESULT, calls=_OWN_CALL_ONLY),
    "no calls": _template(calls=""),
    "no calls, no results": _template(_checked("m.role == 'tool'"), calls=""),
    "text or calls": _template(turn=_TEXT_OR_CALLS),
    "calls before text": _template(turn=_TURN.replace("CALLS", "").replace("{{- '<|im_start|>' + ROLE + '\n' +",
        "{{- '<|im_start|>' + ROLE + '\n' -}}CALLS{{-")),
    "ids": _template(turn=_TURN.replace("(m.content or '')", "(m.tool_call_id or '') + (m.content or '')"), calls=_ID_CALL),
    "fields of tools": _template(tools=_FIELDS),
    "a user": _template("{%- if not (messages | selectattr('role', 'equalto', 'user') | list) -%}"
        "{{- raise_exception('No user query found') -}}{%- endif -%}"),
    "results behind calls": _template(turn="{%- if m.role != 'tool' -%}" + _TURN + "{%- endif -%}", calls=_SCANNED),
    "no empty messages": _template(_checked("not m.content and not m.tool_calls")),
    "system last": _template(
        "{%- set messages = messages if messages[0].role != 'system' else messages -%}",
        turn="{%- if m.role != 'system' -%}{{- '<|im_start|>' + ROLE + '\n' -}}"
        "{%- if loop.last and m.role == 'user' and messages[0].role == 'system' -%}{{- messages[0].content + '\n' -}}"
        "{%- endif -%}{{- m.content or '' -}}CALLS{{- '<|im_end|>\n' -}}{%- endif -%}",
    ),
    "tools demanded": "{%- for tool in tools -%}{{- '[' + tool.function.name + ']\n' -}}{%- endfor -%}" + _template(tools=""),
}  # fmt: skip
