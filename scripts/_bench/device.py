"""Tables of the device model: computed, not measured. It needs neither a model nor a Mac."""

import argparse
from collections.abc import Callable, Iterable, Sequence
from functools import cache

from rich import box
from rich.console import Console
from rich.table import Table

from tests.support.agent_sessions import agents
from tests.support.device_catalogue import CHIPS, SHAPES
from tests.support.device_model import Device
from tests.support.device_runner import Manner
from tests.support.device_serving import Result, decode_rows, fits, serve_agents

LENGTHS = (60_000, 20_000, 8_000, 2_000)
MODELS = ("Qwen3 0.6B", "Qwen3 8B", "Qwen3 32B", "Llama 3.3 70B", "Qwen3.8 27B", "Qwen3 30B-A3B", "gpt-oss 120B")
_AGENT_CHIPS = ("M1 Max", "M2 Ultra", "M3 Max", "M3 Ultra", "M4 Pro", "M4 Max", "M5 Max")
_SHORT, _PROMPT = 2_000, 2_048
_FILE_WIDTH = 200
Cell = Callable[[Device], str]


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="scripts/bench device",
        description="Prints what the device model of the tests computes for Apple chips. Nothing is measured.",
    )
    parser.parse_args(arguments)
    console = Console()
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    _print(console, f"one row of {_SHORT:,} tokens: decode / prefill of {_PROMPT:,}, tokens/s", CHIPS, _speeds, _SHORT)
    lengths = ", ".join(f"{length:,}" for length in LENGTHS)
    _print(console, f"rows of {lengths} tokens: decode, tokens/s, before → after", CHIPS, _rows, sum(LENGTHS))
    kept = 2 * sum(max(turn.prompt + turn.reply for turn in agent) for agent in agents())  # as rows, and in the cache
    _print(console, "four agents at once: all tokens/s, before → after", _AGENT_CHIPS, _agent_speeds, kept)
    _print(console, "four agents at once: worst gap, before → after", _AGENT_CHIPS, _agent_gaps, kept)


def _print(console: Console, title: str, chips: Iterable[str], cell: Cell, num_tokens: int) -> None:
    table = Table("chip", box=box.MARKDOWN)
    for model in MODELS:
        table.add_column(model, justify="right", no_wrap=True)
    for chip in chips:
        devices = [Device(CHIPS[chip], SHAPES[model]) for model in MODELS]
        table.add_row(chip, *(cell(device) if fits(device, num_tokens) else "" for device in devices))
    console.print(f"\n{title}\n", highlight=False)
    console.print(table)


def _speeds(device: Device) -> str:
    return f"{1 / device.decode_s([[[_SHORT]]]):.0f} / {_PROMPT / device.chunk_s(_PROMPT):.0f}"


def _rows(device: Device) -> str:
    before, after = (decode_rows(device, manner, LENGTHS).tokens_per_s for manner in Manner)
    return f"{before:.0f} → {after:.0f} ({after / before:.2f} ×)"


def _agent_speeds(device: Device) -> str:
    before, after = (_served(device, manner).tokens_per_s for manner in Manner)
    return f"{before:.1f} → {after:.1f} ({after / before:.2f} ×)"


def _agent_gaps(device: Device) -> str:
    before, after = (_served(device, manner).worst_gap_s for manner in Manner)
    return f"{before:.2f} → {after:.2f} s"


@cache
def _served(device: Device, manner: Manner) -> Result:
    return serve_agents(device, manner, agents())
