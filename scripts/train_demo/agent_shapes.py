"""The tools of two coding agents as they declare them: names, parameters and lengths are theirs, the words are ours."""

import random
from dataclasses import dataclass

from . import filler
from .agent_tools import ABOUT, READ, RUN, WRITE, Kit
from .chat import Tool

Declared = tuple[str, int, dict[str, tuple[str, int]], tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Shape:
    """`tools`: name, characters of description, parameters (type, characters of description), required parameters."""

    system: int  # characters
    tools: tuple[Declared, ...]
    actions: dict[str, str]


BARE = Shape(
    system=200,
    tools=(
        ("Bash", 900, {"command": ("string", 22), "timeout": ("number", 70), "description": ("string", 400),
                       "run_in_background": ("boolean", 180)}, ("command",)),
        ("Edit", 360, {"file_path": ("string", 39), "old_string": ("string", 19), "new_string": ("string", 63),
                       "replace_all": ("boolean", 53)}, ("file_path", "old_string", "new_string")),
        ("Read", 500, {"file_path": ("string", 37), "offset": ("integer", 92), "limit": ("integer", 83),
                       "pages": ("string", 113)}, ("file_path",)),
    ),
    actions={READ: "Read", RUN: "Bash"},
)  # fmt: skip
OPENCODE = Shape(
    system=9_600,
    tools=(
        ("bash", 4_628, {"command": ("string", 22), "timeout": ("integer", 32), "workdir": ("string", 114)},
         ("command",)),
        ("edit", 1_369, {"filePath": ("string", 39), "oldString": ("string", 19), "newString": ("string", 62),
                         "replaceAll": ("boolean", 52)}, ("filePath", "oldString", "newString")),
        ("glob", 517, {"pattern": ("string", 39), "path": ("string", 268)}, ("pattern",)),
        ("grep", 657, {"pattern": ("string", 48), "path": ("string", 70), "include": ("string", 65)}, ("pattern",)),
        ("read", 1_158, {"filePath": ("string", 50), "offset": ("integer", 49), "limit": ("integer", 54)},
         ("filePath",)),
        ("skill", 399, {"name": ("string", 43)}, ("name",)),
        ("task", 3_019, {"description": ("string", 43), "prompt": ("string", 33), "subagent_type": ("string", 50),
                         "task_id": ("string", 187), "command": ("string", 36)},
         ("description", "prompt", "subagent_type")),
        ("todowrite", 2_012, {"todos": ("array", 21)}, ("todos",)),
        ("webfetch", 750, {"url": ("string", 29), "format": ("string", 84), "timeout": ("number", 37)}, ("url",)),
        ("write", 623, {"content": ("string", 32), "filePath": ("string", 71)}, ("content", "filePath")),
    ),
    actions={READ: "read", RUN: "bash", WRITE: "write"},
)  # fmt: skip
SUBJECTS = {name: ABOUT[action][0] for shape in (BARE, OPENCODE) for action, name in shape.actions.items()}


def text(rng: random.Random, size: int) -> str:
    """About `size` characters."""
    return filler.blocks(rng, size) if size >= 120 else f"The {filler.prose(rng, max(2, size // 6))}"


def declared(rng: random.Random, tool: Declared, scale: float) -> Tool:
    name, size, parameters, required = tool
    schema = {
        label: {"type": kind, "description": text(rng, round(scale * length))}
        for label, (kind, length) in parameters.items()
    }
    about = SUBJECTS.get(name) or filler.rule(rng)
    return Tool(name, f"{about}\n\n{text(rng, round(scale * size))}", schema, required)


def shaped(rng: random.Random, shape: Shape, scale: float = 1.0) -> tuple[str, Kit]:
    """Return a system prompt and tools of `scale` times the lengths that the agent has."""
    tools = tuple(declared(rng, tool, scale) for tool in shape.tools)
    by_name = {tool.name: tool for tool in tools}
    kit = Kit(tools, {action: by_name[name] for action, name in shape.actions.items()})
    return filler.system_prompt(rng, round(scale * shape.system)), kit
