"""Tables that are computed, not measured, and need neither a model nor a Mac: `device` and `keep`."""

import argparse
from collections.abc import Callable, Iterable, Sequence
from functools import cache

from scripts import markdown
from tests.support.agent_sessions import agents
from tests.support.device_catalogue import CHIPS, SHAPES
from tests.support.device_model import Device
from tests.support.device_serving import Result, decode_rows, fits, serve_agents
from tests.support.keep_comparison import DEVICES, Comparisons, Tier
from tests.support.keep_simulation import Spent
from tests.support.recorded_sessions import requests_of

LENGTHS = (60_000, 20_000, 8_000, 2_000)
MODELS = ("Qwen3 0.6B", "Qwen3 8B", "Qwen3 32B", "Llama 3.3 70B", "Qwen3.8 27B", "Qwen3 30B-A3B", "gpt-oss 120B")
SHARES = (0.05, 0.1, 0.25, 0.5, 0.75, 1.0)
PEOPLE = (4, 8, 16)
_AGENT_CHIPS = ("M1 Max", "M2 Ultra", "M3 Max", "M3 Ultra", "M4 Pro", "M4 Max", "M5 Max")
_SHORT, _PROMPT = 2_000, 2_048
_FILE_WIDTH = 200
_COLUMNS = ("share", "ours", "least recently used", "clairvoyant", "÷ least recently used", "÷ clairvoyant")
Cell = Callable[[Device], str]


def device(arguments: Sequence[str]) -> None:
    """Print what the device model of the tests computes for Apple chips."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench device",
        description="Prints what the device model of the tests computes for Apple chips. Nothing is measured.",
    )
    parser.parse_args(arguments)
    _print_chips(f"one row of {_SHORT:,} tokens: decode / prefill of {_PROMPT:,}, tokens/s", CHIPS, _speeds, _SHORT)
    lengths = ", ".join(f"{length:,}" for length in LENGTHS)
    _print_chips(f"rows of {lengths} tokens: decode, tokens/s", CHIPS, _rows, sum(LENGTHS))
    kept = 2 * sum(max(turn.prompt + turn.reply for turn in agent) for agent in agents())  # as rows, and in the cache
    _print_chips("four agents at once: all tokens/s", _AGENT_CHIPS, _agent_speeds, kept)
    _print_chips("four agents at once: worst gap", _AGENT_CHIPS, _agent_gaps, kept)


def _print_chips(title: str, chips: Iterable[str], cell: Cell, num_tokens: int) -> None:
    rows = []
    for chip in chips:
        devices = [Device(CHIPS[chip], SHAPES[model]) for model in MODELS]
        rows.append((chip, *(cell(device) if fits(device, num_tokens) else "" for device in devices)))
    _print(title, ("chip", *MODELS), rows)


def _speeds(device: Device) -> str:
    return f"{1 / device.decode_s([[[_SHORT]]]):.0f} / {_PROMPT / device.chunk_s(_PROMPT):.0f}"


def _rows(device: Device) -> str:
    return f"{decode_rows(device, LENGTHS).tokens_per_s:.0f}"


def _agent_speeds(device: Device) -> str:
    return f"{_served(device).tokens_per_s:.1f}"


def _agent_gaps(device: Device) -> str:
    return f"{_served(device).worst_gap_s:.2f} s"


@cache
def _served(device: Device) -> Result:
    return serve_agents(device, agents())


def keep(arguments: Sequence[str]) -> None:
    """Print what eviction costs on recorded sessions: seconds of prefill, beside two other rules."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench keep",
        description="Runs the prefix planner on recorded sessions with little room to keep their state. Prints the "
        "seconds of computing or reading again what had been computed, and all seconds of prompts over those of the "
        "other rules. Devices are computed; nothing is measured.",
    )
    parser.add_argument(
        "--people", type=int, action="append", metavar="N", help="number of people who work (default: 4, 8 and 16)"
    )
    parser.add_argument("--kind", action="append", choices=DEVICES, help="a kind of model; may repeat (default: all)")
    given = parser.parse_args(arguments)
    for people in given.people or PEOPLE:
        requests = requests_of(people=people)
        for kind in given.kind or DEVICES:
            _print_kept(people, kind, Comparisons(DEVICES[kind], requests))


def _print_kept(people: int, kind: str, comparisons: Comparisons) -> None:
    device = DEVICES[kind]
    for tier in Tier:
        rows = []
        for share in SHARES:
            found = comparisons.at(share, tier)
            again = [f"{found.again_s(spent):.1f}" for spent in (found.ours, found.lru, found.clairvoyant)]
            over = [_over(found.ours, other) for other in (found.lru, found.clairvoyant)]
            rows.append((f"{share:.0%}", *again, *over))
        wanted = f"{comparisons.wanted_bytes / 1e9:.1f} GB wanted, at least {comparisons.least_s:.0f} s of prefill"
        _print(f"{people} people, {device.shape.name}, {device.chip.name}, {tier.value}: {wanted}", _COLUMNS, rows)


def _over(ours: Spent, other: Spent) -> str:
    return f"{ours.total_s / other.total_s:.3f}"


def _print(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    print(f"\n{title}\n", flush=True)
    markdown.output(_FILE_WIDTH).print(markdown.table(columns, rows, left=("chip",)))
