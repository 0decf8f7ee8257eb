"""A server for real clients, without a model: `python -m tests.server.scripted PORT COMMAND...`.

Each conversation has its agent run one COMMAND after the other with the shell tool it has, reads each result, and says
so. Requests are written to standard output, one JSON object a line.
"""

import json
import secrets
import sys
import threading
from dataclasses import replace

from tests.support.running import named
from vllm_mlx.core.events import (
    FinishReason,
    ReasoningDelta,
    Started,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from vllm_mlx.core.messages import ToolResultPart, ToolSpec
from vllm_mlx.core.request import Request
from vllm_mlx.server.app import create_app
from vllm_mlx.server.config import ServerConfig
from vllm_mlx.server.run import listen, run

from .fakes import FakeEngine, Script, finished, says

SHELLS = {
    "Bash": "command",
    "bash": "command",
    "exec_command": "cmd",
    "shell": "command",
    "run_shell_command": "command",
    "run_commands": "commands",
    "Execute": "command",
    "exec": "command",
    "terminal": "command",
}


class ScriptedAgent:
    """Thinks, talks and calls as a model would, in pieces."""

    def __init__(self, *commands: str) -> None:
        self._commands = commands
        self._lock = threading.Lock()

    def play(self, request: Request, index: int) -> Script:
        results = [
            part for message in request.messages or () for part in message.parts if isinstance(part, ToolResultPart)
        ]
        shell = next((tool for tool in request.tools if tool.name in SHELLS), None)
        self._tell(request, results)
        if shell is None:
            return says('{"title": ', '"Scripted"}')
        if len(results) >= len(self._commands):
            return says("The commands ", "have run.")
        return self._call(shell, self._commands[len(results)])

    def _call(self, tool: ToolSpec, command: str) -> Script:
        shell = tool.name
        name = SHELLS[shell]
        asked = [command] if name == "commands" else command
        arguments = json.dumps({**_required(tool), name: asked, "description": "Scripted"})
        half = len(arguments) // 2
        return (
            Started(7, 2),
            ReasoningDelta("I should "),
            ReasoningDelta("run it.\n"),
            TextDelta("\nRunning it. "),
            ToolCallStart(0, f"call_{secrets.token_hex(12)}", shell),
            ToolCallDelta(0, arguments[:half]),
            ToolCallDelta(0, arguments[half:]),
            ToolCallEnd(0),
            finished(FinishReason.TOOL_CALLS),
        )

    def _tell(self, request: Request, results: list[ToolResultPart]) -> None:
        roles = [message.role for message in request.messages or ()]
        texts = [part.text for result in results for part in result.content if hasattr(part, "text")]
        replies = [repr(message.parts) for message in request.messages or () if message.role == "assistant"]
        told = {"roles": roles, "tools": [tool.name for tool in request.tools], "replies": replies, "results": texts}
        with self._lock:
            print(json.dumps(told), flush=True)


def _required(tool: ToolSpec) -> dict[str, str]:
    """A value for each argument that is a text and has to be there."""
    schema = tool.parameters or {}
    fields = schema.get("properties", {})
    return {name: fields.get(name, {}).get("enum", ["Scripted"])[0] for name in schema.get("required", ())}


def main() -> None:
    port, *commands = sys.argv[1:]
    info = replace(FakeEngine().info, max_model_len=131_072, takes_images=True)
    has = ["images", "tools", "reasoning"]
    engine = FakeEngine(play=ScriptedAgent(*commands).play, info=info, capabilities=has)
    config = ServerConfig(models=named("scripted"))
    run(create_app(engine, config), engine, listen("127.0.0.1", int(port)), drain_s=0)


if __name__ == "__main__":
    main()
