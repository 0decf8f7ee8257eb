"""The page about models names the formats that there are."""

import re
from pathlib import Path

import pytest

from vllm_mlx.formats.families import FAMILIES as ROWS
from vllm_mlx.formats.selection import CHECKPOINT_NAMES

from .support import REASONING_FORMATS, TOOL_FORMATS

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
FAMILIES = re.findall(r"^\| ([^|]+) \| (\S+) \| (\S+) \| .*\|$", PAGE, re.MULTILINE)[2:]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def listed(heading: str) -> list[list[str]]:
    section = PAGE.split(f"### {heading}\n")[1].split("\n#")[0]
    return [names(item.split("\n\n")[0]) for item in re.split(r"^- ", section, flags=re.MULTILINE)[1:]]


@pytest.mark.parametrize(("heading", "formats"), [("Reasoning", REASONING_FORMATS), ("Tools", TOOL_FORMATS)])
def test_every_name_is_listed_with_those_that_mean_the_same(heading: str, formats: dict[str, object]) -> None:
    lines = listed(heading)
    assert {name for line in lines for name in line} == set(formats)
    for line in lines:
        assert all(formats[name] is formats[line[0]] for name in line), line
    assert len(lines) == len({id(format) for format in formats.values()})


def test_families_name_known_formats() -> None:
    assert len(FAMILIES) > 40
    for family, reasoning, tools in FAMILIES:
        assert set(names(reasoning)) <= set(REASONING_FORMATS), family
        assert set(names(tools)) <= set(TOOL_FORMATS), family


def test_every_detected_format_belongs_to_a_family() -> None:
    reasoning = {id(REASONING_FORMATS[name]) for _, cell, _ in FAMILIES for name in names(cell)}
    tools = {id(TOOL_FORMATS[name]) for _, _, cell in FAMILIES for name in names(cell)}
    reads = [row.reasoning for row in ROWS if row.reasoning and (row.reasoning_signs or row.reasoning.sign)]
    calls = [row.calls.reads for row in ROWS if row.calls and (row.call_signs or row.calls.sign)]
    assert set(map(id, reads)) <= reasoning | {id(REASONING_FORMATS["hy_v4"])}
    assert set(map(id, calls)) <= tools


def test_names_that_mean_the_checkpoints_own_rules_are_said() -> None:
    assert all(f"`{name}`" in PAGE for name in CHECKPOINT_NAMES)
