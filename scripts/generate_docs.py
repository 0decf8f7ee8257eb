#!/usr/bin/env python3
"""Writes the tables of docs/configuration.md and docs/api.md from the settings and the wire types. Knows no prose.

A table stands between `<!-- NAME -->` and `<!-- end -->`; everything else in those pages is written by hand.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the checkout's own package, whatever is installed

from vllm_mlx.api import extras  # noqa: E402
from vllm_mlx.api.openai import fields  # noqa: E402
from vllm_mlx.api.openai.schema import ChatCompletionBody, CompletionBody, GenerationBody  # noqa: E402
from vllm_mlx.cli.options import default_text, field_kind, metavar, takes_several  # noqa: E402
from vllm_mlx.cli.settings import POSITIONAL, Panel, flag_name, settings_fields  # noqa: E402

PAGES = ("configuration.md", "api.md")


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def value_text(field: FieldInfo) -> str:
    kind = field_kind(field)
    if kind is bool:
        return "true, false"
    if get_origin(kind) is Literal:
        return ", ".join(get_args(kind))
    return metavar(kind).lower() + (", several" if takes_several(field) else "")


def settings_tables() -> str:
    parts = []
    for panel in Panel:
        rows = []
        for name, field, own_panel in settings_fields():
            if own_panel is not panel:
                continue
            flag = name.upper() if name in POSITIONAL else flag_name(name)
            default = "false" if field.default is False else default_text(field)
            rows.append([f"`{flag}`", value_text(field), f"`{default}`" if default else "", field.description or ""])
        parts.append(f"## {panel}\n\n" + table(["flag", "value", "default", "meaning"], rows))
    return "\n\n".join(parts)


def honoured(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def honoured_fields() -> str:
    shared = GenerationBody.model_fields
    own: dict[str, type[Any]] = {"chat completions": ChatCompletionBody, "completions": CompletionBody}
    rows = [["both", honoured(shared)]]
    rows += [[name, honoured(key for key in body.model_fields if key not in shared)] for name, body in own.items()]
    return table(["endpoint", "fields"], rows)


def taken_fields() -> str:
    rows = []
    for name, rule in fields.BODY_FIELDS.items():
        if isinstance(rule, extras.Ignored):
            values = (
                "any" if extras.ANY in rule.values else ", ".join(f"`{json.dumps(value)}`" for value in rule.values)
            )
            rows.append([f"`{name}`", values, rule.reason, rule.otherwise])
    return table(["field", "values taken", "why nothing is done", "other values are refused"], rows)


def refused_fields() -> str:
    refused = {name: rule for name, rule in fields.BODY_FIELDS.items() if isinstance(rule, extras.Refused)}
    return table(["field", "what to do instead"], [[f"`{name}`", rule.advice] for name, rule in refused.items()])


TABLES: Mapping[str, Callable[[], str]] = {
    "settings": settings_tables,
    "honoured": honoured_fields,
    "taken": taken_fields,
    "refused": refused_fields,
}


def render(page: str) -> str:
    """The page with every table in it made anew. A name that no table has is a KeyError."""
    block = re.compile(r"(<!-- (\w+) -->\n).*?(\n<!-- end -->)", re.DOTALL)
    return block.sub(lambda match: match[1] + TABLES[match[2]]() + match[3], page)


def main() -> None:
    for name in PAGES:
        path = ROOT / "docs" / name
        path.write_text(render(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
