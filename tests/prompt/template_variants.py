"""Small chat templates that each do one thing as some real templates do it."""

from tests.support.tokenizers import TEMPLATES

_TOOLS = "{%- for tool in tools or [] -%}{{- tool | tojson + '\n' -}}{%- endfor -%}"

_CALLS = """{%- for call in message.tool_calls or [] -%}
{{- '\n<tool_call>\n' + call.function | tojson + '\n</tool_call>' -}}
{%- endfor -%}"""

_SUFFIX = "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"

_MESSAGES = """{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\n' -}}
{%- if message.reasoning_content and KEEPS -%}
{{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' -}}
{%- endif -%}
BEFORE{{- message.content TRIM -}}CALLS{{- '<|im_end|>\n' -}}
{%- endfor -%}""".replace("CALLS", _CALLS)

_MERGING = """{%- set ns = namespace(system='') -%}
{%- for message in messages if message.role == 'system' -%}
{%- set ns.system = ns.system + message.content + '\n' -%}
{%- endfor -%}
{{- '<|im_start|>system\n' + ns.system -}}TOOLS{{- '<|im_end|>\n' -}}
{%- for message in messages if message.role != 'system' -%}
{{- '<|im_start|>' + message.role + '\n' + message.content -}}CALLS{{- '<|im_end|>\n' -}}
{%- endfor -%}""".replace("CALLS", _CALLS).replace("TOOLS", _TOOLS)

_PLAIN = """{%- for message in messages -%}
{{- message.role + ': ' + message.content | trim + '\n' -}}
{%- for call in message.tool_calls or [] -%}{{- call.function | tojson + '\n' -}}{%- endfor -%}
{%- endfor -%}{%- if add_generation_prompt -%}assistant:{%- endif -%}"""

_STRICT = """{%- for message in messages -%}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
{{- raise_exception('roles must alternate') -}}
{%- endif -%}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' -}}
{%- endfor -%}"""


def _messages(*, keeps: str = "true", trim: str = "", before: str = "") -> str:
    return _MESSAGES.replace("KEEPS", keeps).replace("TRIM", trim).replace("BEFORE", before) + _SUFFIX


TEMPLATE_VARIANTS = {
    "after the last question": (TEMPLATES / "qwen3.jinja").read_text(),  # keeps the reasoning of these turns
    "opens the thought": (TEMPLATES / "qwen3_5.jinja").read_text(),
    "gemma": _TOOLS + (TEMPLATES / "gemma.jinja").read_text(),  # no system turn, no calls, no reasoning
    "keeps reasoning": _TOOLS + _messages(),
    "strips reasoning": _TOOLS + _messages(keeps="false"),
    "trims": _TOOLS + _messages(trim="| trim"),
    "tools last": _messages(before="{%- if loop.last -%}" + _TOOLS + "{%- endif -%}"),
    "merges system": _MERGING + _SUFFIX,
    "no special tokens": _TOOLS + _PLAIN,
    "strict roles": _TOOLS + _STRICT + _SUFFIX,
}
