"""Tools as coding agents declare them: the three that an errand needs, and the crowd around them."""

import random
from dataclasses import dataclass

from . import words
from .chat import Tool

READ, RUN, WRITE = "read", "run", "write"

# Per action: (tool name, required parameters). Write lists (path, content) by name, in either order.
DIALECTS: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = {
    READ: (
        ("Read", ("file_path",)), ("read", ("filePath",)), ("read_file", ("path",)), ("Read", ("path",)),
        ("read", ("path",)), ("read_file", ("file_path",)), ("ReadFile", ("filename",)), ("view", ("path",)),
        ("open_file", ("path",)), ("cat_file", ("file",)),
    ),
    RUN: (
        ("Bash", ("command",)), ("bash", ("command",)), ("run_command", ("command",)), ("shell", ("command",)),
        ("Bash", ("cmd",)), ("execute", ("command",)), ("exec_command", ("cmd",)), ("run_shell_command", ("command",)),
        ("terminal", ("command",)),
    ),
    WRITE: (
        ("Write", ("file_path", "content")), ("write", ("content", "filePath")), ("write_file", ("path", "content")),
        ("Write", ("path", "content")), ("write", ("filePath", "content")), ("create_file", ("path", "text")),
        ("write_file", ("file_path", "content")), ("save_file", ("filename", "content")),
    ),
}  # fmt: skip
CONTENT_NAMES = ("content", "text")
CLAUDE = {READ: DIALECTS[READ][0], RUN: DIALECTS[RUN][0], WRITE: DIALECTS[WRITE][0]}
OPENCODE = {READ: DIALECTS[READ][1], RUN: DIALECTS[RUN][1], WRITE: DIALECTS[WRITE][1]}
ABOUT = {
    READ: (
        "Read a file",
        "Reads a file from disk.",
        "Read the contents of a file",
        "Reads a file from the filesystem.",
    ),
    RUN: ("Run a shell command", "Executes a bash command and returns its output.", "Execute a command in the shell"),
    WRITE: ("Write a file", "Writes a file to disk.", "Write text to a file", "Create or overwrite a file"),
}
OPTIONAL = {
    READ: ("offset", "limit", "pages", "encoding", "allow_large"),
    RUN: ("timeout", "description", "workdir", "run_in_background", "env"),
    WRITE: ("mode", "encoding", "append", "create"),
}
CROWD: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("edit", ("filePath", "oldString", "newString")), ("Edit", ("file_path", "old_string", "new_string")),
    ("glob", ("pattern",)), ("Glob", ("pattern",)), ("grep", ("pattern",)), ("Grep", ("pattern",)),
    ("skill", ("name",)), ("Skill", ("skill",)), ("task", ("description", "prompt")),
    ("Agent", ("description", "prompt")),
    ("todowrite", ("todos",)), ("TodoWrite", ("todos",)), ("webfetch", ("url",)), ("WebFetch", ("url", "prompt")),
    ("websearch", ("query",)), ("list_directory", ("path",)), ("ToolSearch", ("query", "max_results")),
    ("ListAgents", ()), ("ask_user", ("question",)), ("apply_patch", ("patch",)), ("search_files", ("pattern", "path")),
    ("move_file", ("source", "target")), ("delete_file", ("path",)), ("NotebookEdit", ("path", "cell")),
)  # fmt: skip
TYPES = ("string", "string", "string", "integer", "number", "boolean")


@dataclass(frozen=True, slots=True)
class Kit:
    """The declared tools of one agent, and which of them serves which action. Some agents have no tool to write."""

    tools: tuple[Tool, ...]
    by_action: dict[str, Tool]


def description(rng: random.Random, about: str, size: int) -> str:
    """`about`, and with a size about so many characters of usage notes."""
    return about if size <= 0 else f"{about}\n\n{words.blocks(rng, size)}"


def parameter(rng: random.Random, kind: str, verbose: bool) -> dict:
    schema: dict = {"type": kind}
    if verbose:
        schema["description"] = f"The {words.prose(rng, 6)}"
    return schema


def declare(
    rng: random.Random, name: str, required: tuple[str, ...], about: str, extra: tuple[str, ...], size: int
) -> Tool:
    """Return a tool with its optional parameters anywhere among the required ones."""
    verbose = rng.random() < (0.4 if size else 0.1)
    names = [*required, *extra]
    if rng.random() < 0.2:
        rng.shuffle(names)
    kinds = {n: "string" if n in required else rng.choice(TYPES) for n in names}
    schema = {n: parameter(rng, kinds[n], verbose) for n in names}
    return Tool(name, description(rng, about, size), schema, required)


def action_tool(rng: random.Random, action: str, dialect: tuple[str, tuple[str, ...]], size: int) -> Tool:
    name, required = dialect
    if len(required) == 2 and rng.random() < 0.15:
        required = required[::-1]
    extra = tuple(rng.sample(OPTIONAL[action], rng.choice((0, 0, 0, 1, 2))))
    return declare(rng, name, required, rng.choice(ABOUT[action]), extra, size)


def bystander(rng: random.Random, size: int) -> Tool:
    """Return a tool that is never called."""
    if rng.random() < 0.8:
        name, required = rng.choice(CROWD)
    else:
        name, required = f"{words.word(rng)}_{words.word(rng)}", (words.word(rng),)
    drawn = dict.fromkeys(words.word(rng) for _ in range(rng.choice((0, 0, 0, 1, 2))))
    extra = tuple(label for label in drawn if label not in required)
    return declare(rng, name, required, rule_or_verb(rng), extra, size)


def rule_or_verb(rng: random.Random) -> str:
    return words.rule(rng) if rng.random() < 0.5 else f"{words.word(rng).capitalize()} the {words.word(rng)}."


WITHOUT_WRITE = 0.2
EDITORS = CROWD[:2]


def draw_kit(rng: random.Random, *, crowd: int, size: int, without_write: float = WITHOUT_WRITE) -> Kit:
    """Read, run and write tools plus `crowd` others, with descriptions of up to about `size` characters.

    A share of `without_write` has an editor in place of the tool to write.
    """
    style = rng.random()
    by_action = {}
    for action, dialects in DIALECTS.items():
        dialect = CLAUDE[action] if style < 0.3 else OPENCODE[action] if style < 0.55 else rng.choice(dialects)
        by_action[action] = action_tool(rng, action, dialect, rng.randint(0, size) if size else 0)
    others = []
    if rng.random() < without_write:
        del by_action[WRITE]
        others.append(declare(rng, *rng.choice(EDITORS), "Edits a file.", (), 0))
    taken = {tool.name.lower() for tool in (*by_action.values(), *others)}
    for _ in range(crowd):
        tool = bystander(rng, rng.randint(0, size) if size else 0)
        if tool.name.lower() not in taken:
            taken.add(tool.name.lower())
            others.append(tool)
    tools = [*by_action.values(), *others]
    if rng.random() < 0.5:
        tools.sort(key=lambda t: t.name)
    else:
        rng.shuffle(tools)
    return Kit(tuple(tools), by_action)


Declared = tuple[str, int, dict[str, tuple[str, int]], tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Shape:
    """`tools`: name, characters of description, parameters (type, characters of description), required parameters."""

    system: int  # characters
    tools: tuple[Declared, ...]
    actions: dict[str, str]


BARE_SHAPE = Shape(
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
OPENCODE_SHAPE = Shape(
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
SUBJECTS = {name: ABOUT[action][0] for shape in (BARE_SHAPE, OPENCODE_SHAPE) for action, name in shape.actions.items()}


def words_of(rng: random.Random, size: int) -> str:
    """About `size` characters."""
    return words.blocks(rng, size) if size >= 120 else f"The {words.prose(rng, max(2, size // 6))}"


def declared(rng: random.Random, tool: Declared, scale: float) -> Tool:
    name, size, parameters, required = tool
    schema = {
        label: {"type": kind, "description": words_of(rng, round(scale * length))}
        for label, (kind, length) in parameters.items()
    }
    about = SUBJECTS.get(name) or words.rule(rng)
    return Tool(name, f"{about}\n\n{words_of(rng, round(scale * size))}", schema, required)


def shaped(rng: random.Random, shape: Shape, scale: float = 1.0) -> tuple[str, Kit]:
    """Return a system prompt and tools of `scale` times the lengths that the agent has."""
    tools = tuple(declared(rng, tool, scale) for tool in shape.tools)
    by_name = {tool.name: tool for tool in tools}
    kit = Kit(tools, {action: by_name[name] for action, name in shape.actions.items()})
    return words.system_prompt(rng, round(scale * shape.system)), kit
