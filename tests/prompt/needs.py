"""Small chat templates that each take less than the API allows, as some real templates do."""

_TOOLS = "{%- for tool in tools or [] -%}{{- '[' + tool.function.name + ']\n' -}}{%- endfor -%}"
_CALL = "{{- '<call>' + call.function | tojson + '</call>' -}}"
_CALLS = "{%- for call in m.tool_calls or [] -%}CALL{%- endfor -%}".replace("CALL", _CALL, 1)
_OPEN, _TEXT, _CLOSE = "{{- '<|im_start|>' + m.role + '\n' -}}", "{{- m.content or '' -}}", "{{- '<|im_end|>\n' -}}"
_TURN = f"{_OPEN}{_TEXT}CALLS{_CLOSE}"
_GO = "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"


def _template(before: str = "", *, turn: str = _TURN, calls: str = _CALLS, tools: str = _TOOLS) -> str:
    return f"{before}{tools}{{%- for m in messages -%}}{turn.replace('CALLS', calls)}{{%- endfor -%}}{_GO}"


def _refuses(condition: str) -> str:
    return "{%- for m in messages if " + condition + " -%}{{- raise_exception('refused') -}}{%- endfor -%}"


def _alternates(counted: str, user: str = "m.role == 'user'") -> str:
    return (
        "{%- set ns = namespace(n=0) -%}{%- for m in messages if " + counted + " -%}"
        "{%- if (" + user + ") != (ns.n % 2 == 0) -%}{{- raise_exception('turns must alternate') -}}{%- endif -%}"
        "{%- set ns.n = ns.n + 1 -%}{%- endfor -%}"
    )


_TEXTS = _alternates("m.role == 'user' or m.role == 'assistant' and not m.tool_calls")
_TEXT_OR_CALLS = f"{_OPEN}{{%- if m.tool_calls -%}}CALLS{{%- else -%}}{_TEXT}{{%- endif -%}}{_CLOSE}"
_FIRST_CALL = (
    "{%- if m.tool_calls -%}{%- set call = m.tool_calls[0] -%}{%- set ns.name = call.function.name -%}"
    + _CALL
    + "{%- endif -%}"
)
_LAST_NAME = _TURN.replace("m.role", "(ns.name if m.role == 'tool' else m.role)")
_ID_TURN = _TURN.replace("m.content", "(m.tool_call_id or '') + (m.content or '')")
_ID_CALLS = _CALLS.replace("call.function |", "call.id + call.function.arguments |")
_KNOWN_IDS = "{%- set seen = namespace(ids=[]) -%}"  # a result is skipped if its id was there before
_SKIPS = (
    "{%- if m.tool_call_id not in seen.ids or m.role != 'tool' -%}"
    + _TURN
    + "{%- endif -%}{%- if m.role == 'tool' -%}{%- set seen.ids = seen.ids + [m.tool_call_id] -%}{%- endif -%}"
)
_FIELDS = (
    "{%- for tool in tools or [] -%}{{- '[' + tool.function.name + tool.function.description + ']' -}}"
    "{%- for name, value in tool.function.parameters.properties.items() -%}"
    "{{- name + value.description -}}{%- endfor -%}{%- endfor -%}"
)
_SCANS = (
    "{%- if m.role != 'tool' -%}" + _TURN + "{%- endif -%}",
    "{%- set at = loop.index0 -%}" + _CALLS + "{%- set ns = namespace(on=m.tool_calls) -%}"
    "{%- for r in messages[at + 1:] -%}{%- if r.role != 'tool' -%}{%- set ns.on = false -%}"
    "{%- elif ns.on -%}{{- '<result>' + r.content + '</result>' -}}{%- endif -%}{%- endfor -%}",
)
_SYSTEM_LAST = (
    "{%- if m.role != 'system' -%}"
    + _OPEN
    + "{%- if loop.last and m.role == 'user' and messages[0].role == 'system' -%}"
    "{{- messages[0].content + '\n' -}}{%- endif -%}" + _TEXT + "CALLS" + _CLOSE + "{%- endif -%}"
)
_ASKS_USER = (
    "{%- if not (messages | selectattr('role', 'equalto', 'user') | list) -%}"
    "{{- raise_exception('no user') -}}{%- endif -%}"
)

NEEDS = {
    "takes all": _template(),
    "alternation": _template(_TEXTS),
    "alternation, text or calls": _template(_TEXTS, turn=_TEXT_OR_CALLS),
    "alternation of all": _template(_alternates("true")),
    "results are users": _template(_alternates("true", "m.role in ['user', 'tool']")),
    "one call": _template(_refuses("m.tool_calls and m.tool_calls | length > 1")),
    "first call only": _template("{%- set ns = namespace(name='none') -%}", turn=_LAST_NAME, calls=_FIRST_CALL),
    "no calls": _template(calls=""),
    "no calls, no results": _template(_refuses("m.role == 'tool'"), calls=""),
    "text or calls": _template(turn=_TEXT_OR_CALLS),
    "calls before text": _template(turn=f"{_OPEN}CALLS{_TEXT}{_CLOSE}"),
    "ids": _template(turn=_ID_TURN, calls=_ID_CALLS),
    "ids once": _template(_KNOWN_IDS, turn=_SKIPS),
    "fields of tools": _template(tools=_FIELDS),
    "a user": _template(_ASKS_USER),
    "results behind calls": _template(turn=_SCANS[0], calls=_SCANS[1]),
    "no empty messages": _template(_refuses("not m.content and not m.tool_calls")),
    "system last": _template(turn=_SYSTEM_LAST),
    "tools demanded": _template(tools=_TOOLS.replace(" or []", "")),
}
