#!/usr/bin/env python3
"""Writes the tables of docs/configuration.md, api.md, cli.md and scaling.md from the code. It leaves prose alone.

docs/benchmarks.svg is made from the table of docs/benchmarks.md.

A table stands between `<!-- NAME -->` and `<!-- end -->`; everything else in those pages is written by hand.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Literal, get_args, get_origin

from pydantic.fields import FieldInfo

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the checkout's own package, whatever is installed

from scripts.several_macs import LINKS, rows  # noqa: E402
from vllm_mlx.api import wire  # noqa: E402
from vllm_mlx.api.anthropic.schema import CountTokensBody, MessagesBody  # noqa: E402
from vllm_mlx.api.openai.schema import (  # noqa: E402
    BODY_FIELDS,
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    ChatCompletionBody,
    CompletionBody,
    GenerationBody,
)
from vllm_mlx.api.responses.schema import ResponsesBody  # noqa: E402
from vllm_mlx.cli.models import fitting  # noqa: E402
from vllm_mlx.cli.options import default_text, field_kind, metavar  # noqa: E402
from vllm_mlx.cli.settings import PANELS, POSITIONAL, flag_name, help_text, settings_fields, takes_several  # noqa: E402
from vllm_mlx.runner.device import DeviceMemory  # noqa: E402

FIELDS = {
    "chat completions, completions": BODY_FIELDS,
    "chat completions": {name: rule for name, rule in CHAT_FIELDS.items() if name not in BODY_FIELDS},
    "completions": {name: rule for name, rule in COMPLETION_FIELDS.items() if name not in BODY_FIELDS},
    "messages, count_tokens": MessagesBody.extras or {},
    "responses": ResponsesBody.extras or {},
}
PAGES = ("configuration.md", "api.md", "cli.md", "scaling.md")
MAC_SIZES = (8, 16, 24, 32, 36, 48, 64, 96, 128, 192, 256, 512)  # GB of memory that Macs are sold with
SMALL_MAC = 32 << 30  # bytes: up to here Metal recommends two thirds of a Mac's memory, beyond it three quarters


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def value_text(name: str, field: FieldInfo) -> str:
    kind = field_kind(field)
    if kind is bool:
        return "true, false"
    if get_origin(kind) is Literal:
        return ", ".join(get_args(kind))
    return metavar(name, field).lower() + (", several" if takes_several(field) else "")


def settings_tables() -> str:
    parts = []
    for panel in PANELS:
        rows = []
        for name, field, own_panel in settings_fields():
            if own_panel != panel:
                continue
            flag = name.upper() if name in POSITIONAL else flag_name(name)
            default = "false" if field.default is False else default_text(field)
            rows.append([f"`{flag}`", value_text(name, field), f"`{default}`" if default else "", help_text(name)])
        parts.append(f"## {panel}\n\n" + table(["flag", "value", "default", "meaning"], rows))
    return "\n\n".join(parts)


def honoured(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def honoured_fields() -> str:
    """Make the table of honoured fields. A field that two endpoints of one protocol share is listed once."""
    shared = GenerationBody.model_fields
    counted = CountTokensBody.model_fields
    rows = {
        "chat completions and completions": shared,
        "chat completions": [name for name in ChatCompletionBody.model_fields if name not in shared],
        "completions": [name for name in CompletionBody.model_fields if name not in shared],
        "messages and count_tokens": counted,
        "messages": [name for name in MessagesBody.model_fields if name not in counted and name != "mcp_servers"],
        "responses": ResponsesBody.model_fields,
    }
    return table(["endpoint", "fields"], [[name, honoured(names)] for name, names in rows.items()])


def taken_fields() -> str:
    rows = []
    for where, rules in FIELDS.items():
        for name, rule in rules.items():
            if isinstance(rule, wire.Ignored):
                values = (
                    "any" if wire.ANY in rule.values else ", ".join(f"`{json.dumps(value)}`" for value in rule.values)
                )
                rows.append([where, f"`{name}`", values, rule.reason, rule.otherwise])
    return table(["endpoint", "field", "values taken", "why nothing is done", "other values are refused"], rows)


def refused_fields() -> str:
    rows = [
        [where, f"`{name}`", rule.advice]
        for where, rules in FIELDS.items()
        for name, rule in rules.items()
        if isinstance(rule, wire.Refused)
    ]
    return table(["endpoint", "field", "what to do instead"], rows)


def mac_budget(memory: int) -> int:
    """Return the default budget of a Mac with that many bytes of memory."""
    recommended = memory * 2 // 3 if memory <= SMALL_MAC else memory * 3 // 4
    return DeviceMemory(memory, recommended).default_budget_bytes


def fitting_checkpoints() -> str:
    rows = []
    for size in MAC_SIZES:
        budget = mac_budget(size << 30)
        names = ", ".join(f"`{one.name}`" for one in fitting(budget)) or "none"
        rows.append([f"{size} GB", f"{budget / 1e9:.1f} GB", names])
    return table(["memory", "budget", "the largest that fit"], rows)


def link_speeds() -> str:
    return table(["tokens a second of one reply", "one Mac", *(f"two, {link.name}" for link in LINKS)], rows())


TABLES: Mapping[str, Callable[[], str]] = {
    "settings": settings_tables,
    "honoured": honoured_fields,
    "taken": taken_fields,
    "refused": refused_fields,
    "fitting": fitting_checkpoints,
    "links": link_speeds,
}


def render(page: str) -> str:
    """Return the page with every table made again. Raise KeyError for a name that no table has."""
    block = re.compile(r"(<!-- (\w+) -->\n).*?(\n<!-- end -->)", re.DOTALL)
    return block.sub(lambda match: match[1] + TABLES[match[2]]() + match[3], page)


PLOT_STYLE = """text { font: 13px sans-serif; fill: #333 } .bar { fill: #3b6fd4 } .line { stroke: #888 }
@media (prefers-color-scheme: dark) { text { fill: #ddd } .bar { fill: #6f9bf0 } }"""


def plot(page: str) -> str:
    """Return an SVG with a bar for each row of the page's table, as long as the number in its last column."""
    left, unit, height, step = 420, 280, 40, 26  # pixels: of the labels, of a bar of 1, above the bars, of a bar
    rows = re.findall(r"^\| ([^|]+) \|.*\| ([\d.]+) \|$", page, re.MULTILINE)
    bars = []
    for name, value in rows:
        length = float(value) * unit
        bars += [
            f'<text x="{left - 8}" y="{height + 14}" text-anchor="end">{name}</text>',
            f'<rect class="bar" x="{left}" y="{height}" width="{length:.0f}" height="18"/>',
            f'<text x="{left + length + 6:.0f}" y="{height + 14}">{value}</text>',
        ]
        height += step
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="760" height="{height + 8}">',
            f"<style>{PLOT_STYLE}</style>",
            f'<text x="{left + unit}" y="24" text-anchor="middle">mlx-lm\'s server = 1</text>',
            f'<line class="line" x1="{left + unit}" y1="32" x2="{left + unit}" y2="{height}"/>',
            *bars,
            "</svg>\n",
        ]
    )


def main() -> None:
    docs = ROOT / "docs"
    (docs / "benchmarks.svg").write_text(plot((docs / "benchmarks.md").read_text(encoding="utf-8")), encoding="utf-8")
    for name in PAGES:
        path = ROOT / "docs" / name
        path.write_text(render(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
