#!/usr/bin/env python3
"""Writes the tables of docs/configuration.md, api.md, cli.md and scaling.md from the code. It leaves prose alone.

docs/benchmarks.svg is made from the table of docs/benchmarks.md.

A table stands between `<!-- NAME -->` and `<!-- end -->`; everything else in those pages is written by hand.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args, get_origin

from pydantic.fields import FieldInfo

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the checkout's own package, whatever is installed

from vllm_mlx.api import wire  # noqa: E402
from vllm_mlx.api.anthropic.schema import CountTokensBody, MessagesBody  # noqa: E402
from vllm_mlx.api.encoders.schema import EMBEDDING_FIELDS, RERANK_FIELDS, EmbeddingBody, RerankBody  # noqa: E402
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
    "embeddings": EMBEDDING_FIELDS,
    "rerank": RERANK_FIELDS,
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
        "embeddings": EmbeddingBody.model_fields,
        "rerank": RerankBody.model_fields,
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


# The table of docs/scaling.md: how fast several Macs run one model, beside one Mac. A token of one reply takes
# `1 / rate` on one Mac. On N Macs, `FIXED` of that time stays, the rest is divided by N, and the token waits for two
# sums over all Macs in each layer. `FIXED` was fitted to three published measurements over RDMA with fast
# synchronisation.
FIXED = 0.3  # share of a token's time that more Macs do not shorten
HAND_OVER_MS = 0.175  # between GPU and CPU, there and back: 0.15 to 0.2 ms on an M3 Max
FAST_HAND_OVER_MS = 0.0175  # with MLX_METAL_FAST_SYNCH=1: 0.015 to 0.02 ms
SOCKETS_MS = 0.2  # of a sum over TCP without any network: 0.17 to 0.27 ms were measured on loopback
BYTES = 2  # of a number in a hidden state
BANDWIDTH = 819e9  # bytes a second that an M3 Ultra reads from its memory
LAYER_MS = 0.24  # of a layer beside that reading: what both published rates of one Mac have left


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    num_layers: int
    width: int
    rate: float  # tokens a second on one Mac
    is_published: bool = False  # or computed from the bytes that a token reads

    @property
    def token_ms(self) -> float:
        return 1000 / self.rate


@dataclass(frozen=True, slots=True)
class Link:
    name: str
    fixed_ms: float  # of a sum, whatever its size
    hop_ms: float  # from one Mac to the next
    bytes_per_ms: float

    def sum_ms(self, width: int, num_macs: int) -> float:
        """Compute the time of a sum: a ring sends `2 (N - 1)` times a part of the hidden state."""
        hops = 2 * (num_macs - 1)
        return self.fixed_ms + hops * (self.hop_ms + width * BYTES / num_macs / self.bytes_per_ms)


def computed(name: str, num_layers: int, width: int, read_bytes: float) -> Model:
    """Make a model without a published rate: `read_bytes` are the weights that a token reads."""
    return Model(name, num_layers, width, 1000 / (read_bytes / BANDWIDTH * 1000 + LAYER_MS * num_layers))


MODELS = (
    computed("Qwen3 8B, 4 bits", 36, 4096, 4.6e9),
    Model("gpt-oss 120B", 36, 2880, 80.0, is_published=True),
    computed("Qwen3 32B, 8 bits", 64, 5120, 34.8e9),
    computed("Llama 3.3 70B, 8 bits", 80, 8192, 75e9),
    computed("DeepSeek V3, 4 bits", 61, 7168, 20.8e9),
    Model("Qwen3 235B-A22B", 94, 4096, 19.5, is_published=True),
)
LINKS = (
    Link("RDMA, fast synchronisation", FAST_HAND_OVER_MS, 0.005, 5e6),
    Link("RDMA", HAND_OVER_MS, 0.005, 5e6),
    Link("10 GbE", HAND_OVER_MS + SOCKETS_MS, 0.05, 1.25e6),
    Link("1 GbE", HAND_OVER_MS + SOCKETS_MS, 0.15, 0.125e6),
)


def rate(model: Model, link: Link, num_macs: int) -> float:
    """Return tokens a second of one reply."""
    shared_ms = model.token_ms * (FIXED + (1 - FIXED) / num_macs)
    return 1000 / (shared_ms + 2 * model.num_layers * link.sum_ms(model.width, num_macs))


def link_speeds() -> str:
    """Make a row for each model: its speed on one Mac, and of two over each link; bold where two Macs are faster."""
    rows = []
    for model in MODELS:
        rates = [rate(model, link, 2) for link in LINKS]
        own = f"{model.rate:.1f}" + (" (published)" if model.is_published else "")
        rows.append([model.name, own, *(f"**{one:.1f}**" if one > model.rate else f"{one:.1f}" for one in rates)])
    return table(["tokens a second of one reply", "one Mac", *(f"two, {link.name}" for link in LINKS)], rows)


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
