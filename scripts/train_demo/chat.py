"""A conversation as the generators make it, without tokens."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field

from .pictures import Picture


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: dict[str, object]


@dataclass(frozen=True, slots=True)
class System:
    text: str


@dataclass(frozen=True, slots=True)
class User:
    """`parts` holds text and pictures in the order they are sent."""

    parts: tuple[str | Picture, ...]


@dataclass(frozen=True, slots=True)
class ToolResult:
    text: str


@dataclass(frozen=True, slots=True)
class Assistant:
    """A reply. The turn is scored under `skill`."""

    text: str
    thought: str
    skill: str
    calls: tuple[Call, ...] = ()


Turn = System | User | ToolResult | Assistant


@dataclass(frozen=True, slots=True)
class Tool:
    """A declared function. `schema` maps each parameter to its JSON schema, `required` keeps their order."""

    name: str
    description: str
    schema: dict[str, dict]
    required: tuple[str, ...]

    def wire(self) -> dict:
        parameters = {"type": "object", "properties": self.schema, "required": list(self.required)}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Conversation:
    turns: tuple[Turn, ...]
    tools: tuple[Tool, ...] = field(default=())

    def replies(self) -> Iterator[tuple[int, Assistant]]:
        return ((i, t) for i, t in enumerate(self.turns) if isinstance(t, Assistant))


def ask(text: str) -> User:
    return User((text,))


def value_text(value: object) -> str:
    """Return how the wire format writes an argument: strings as they are, all else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def call_text(call: Call) -> str:
    arguments = "".join(f"<parameter={k}>\n{value_text(v)}\n</parameter>\n" for k, v in call.arguments.items())
    return f"<tool_call>\n<function={call.name}>\n{arguments}</function>\n</tool_call>"


def reply_text(turn: Assistant) -> str:
    """Everything after the reasoning."""
    calls = "\n".join(call_text(c) for c in turn.calls)
    return turn.text + ("\n\n" if turn.text and calls else "") + calls


def messages(turns: tuple[Turn, ...]) -> list[dict]:
    """Return the turns as OpenAI messages, the way a chat template wants them."""
    return [message(turn) for turn in turns]


def message(turn: Turn) -> dict:
    match turn:
        case System(text):
            return {"role": "system", "content": text}
        case User(parts):
            if len(parts) == 1 and isinstance(parts[0], str):
                return {"role": "user", "content": parts[0]}
            content = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image"} for p in parts]
            return {"role": "user", "content": content}
        case ToolResult(text):
            return {"role": "tool", "content": text}
        case Assistant(text, thought, _, calls):
            result = {"role": "assistant", "content": text, "reasoning_content": thought}
            if calls:
                result["tool_calls"] = [
                    {"type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in calls
                ]
            return result
