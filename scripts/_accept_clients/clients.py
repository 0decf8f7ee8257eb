"""The table of real clients: the package of each, and the command of a session without a terminal.

`vllm-mlx launch` points a client at a server: this module has no settings of its own.
"""

import json
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from vllm_mlx.cli.clients import CLIENTS as LAUNCHED
from vllm_mlx.cli.clients import NO_KEY, Target
from vllm_mlx.cli.clients import Client as Launched

SHELL_TOOL = "Bash"
_OPENCODE_PACKAGE = "@ai-sdk/openai-compatible"
_OPENCODE_PROJECT = {"autoupdate": False, "share": "disabled", "permission": {"bash": "allow"}}


@dataclass(frozen=True, slots=True)
class Place:
    """The surroundings of one session. `window`: the tokens of context in the client's settings."""

    home: Path
    work: Path
    url: str
    model: str
    window: int
    is_trimmed: bool  # fewest tools, for servers that read slowly
    small: str = ""  # the model for titles and summaries; empty: the same one
    small_window: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """`{prompt}` in the arguments stands for the prompt."""

    name: str
    launched: str  # its name in `vllm-mlx launch`
    package: str
    version: str
    arguments: tuple[str, ...]  # a session without a terminal, all of whose calls are allowed
    trimmed: tuple[str, ...] = ()  # further arguments that leave the shell alone
    manager: Literal["npm", "pip"] = "npm"
    program: str | None = None  # its path in the package, where npm gives it another name than `launch` expects
    provider: str | None = None  # opencode's package, which says which protocol it speaks
    environment: Mapping[str, str] = field(default_factory=dict)
    project: Mapping[str, object] = field(default_factory=dict)  # opencode.json of the folder in which it works
    calls: bool = True  # whether it has tools
    loses_output: bool = False  # at times, of a command that ends at once: its own fault, told but accepted

    @property
    def spec(self) -> str:
        return f"{self.package}{'@' if self.manager == 'npm' else '=='}{self.version}"

    @property
    def command(self) -> str:
        return LAUNCHED[self.launched].program

    def for_server(self, place: Place) -> Launched:
        """Return the client as `launch` sets it up, with the additions of this table."""
        target = Target(
            url=place.url,
            model=place.model,
            small=place.small,
            small_context=place.small_window,
            context=place.window,
            api_key=NO_KEY,
            folder=place.home / "launch",
        )
        client = LAUNCHED[self.launched].for_server(target)
        changed = {
            name: value.replace(_OPENCODE_PACKAGE, self.provider or _OPENCODE_PACKAGE)
            for name, value in client.environment.items()
        }
        return replace(client, environment={**changed, **self.environment})

    def runs(self, place: Place, prompt: str) -> list[list[str]]:
        """Return the arguments of each run: to sign in, if the client needs that, and the session."""
        if self.project:
            trimmed = {"tools": {"*": False, "bash": True}} if place.is_trimmed else {}
            (place.work / "opencode.json").write_text(json.dumps({**self.project, **trimmed}))
        arguments = (*self.arguments, *(self.trimmed if place.is_trimmed else ()))
        commands = self.for_server(place).runs([word.replace("{prompt}", prompt) for word in arguments])
        return [command[1:] for command in commands]


_OPENCODE_RUN = ("run", "--format", "json", "{prompt}")
_GOOSE_PLATFORM = (
    f"{'darwin' if sys.platform == 'darwin' else 'linux'}-"
    f"{'arm64' if platform.machine() in ('arm64', 'aarch64') else 'x64'}"
)
_CODEX_FLAGS = ("--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")

CLIENTS = (
    Client(
        name="Claude Code",
        launched="claude",
        package="@anthropic-ai/claude-code",
        version="2.1.329",
        arguments=("-p", "{prompt}", "--allowedTools", SHELL_TOOL, "--output-format", "json"),
        trimmed=("--tools", SHELL_TOOL),
    ),
    Client(
        name="Codex",
        launched="codex",
        package="@openai/codex",
        version="0.171.0",
        arguments=("exec", *_CODEX_FLAGS, "{prompt}"),  # nothing in the workplace needs the client's own sandbox
    ),
    *(
        Client(
            name=name,
            launched="opencode",
            package="opencode-ai",
            version="1.18.33",
            arguments=_OPENCODE_RUN,
            provider=provider,
            project=_OPENCODE_PROJECT,
        )
        for name, provider in (
            ("opencode", _OPENCODE_PACKAGE),
            ("opencode, Responses", "@ai-sdk/openai"),
            ("opencode, Messages", "@ai-sdk/anthropic"),
        )
    ),
    Client(
        name="Qwen Code",
        launched="qwen",
        package="@qwen-code/qwen-code",
        version="0.24.4",
        arguments=("--yolo", "-p", "{prompt}"),
        loses_output=True,  # it takes the result when the command exits, before it has read the output
    ),
    Client(name="Cline", launched="cline", package="cline", version="3.0.65", arguments=("{prompt}",)),
    Client(
        name="pi",
        launched="pi",
        package="@mariozechner/pi-coding-agent",
        version="0.73.1",
        arguments=("--print", "{prompt}"),
        trimmed=("--tools", "bash"),
    ),
    Client(
        name="Continue",
        launched="continue",
        package="@continuedev/cli",
        version="1.5.47",
        arguments=("--auto", "-p", "{prompt}"),
    ),
    Client(
        name="Kilo Code",
        launched="kilo",
        package="@kilocode/cli",
        version="7.7.7",
        arguments=("run", "--auto", "{prompt}"),
    ),
    Client(
        name="OpenClaw",
        launched="openclaw",
        package="openclaw",
        version="2026.9.6",
        arguments=("agent", "exec", "{prompt}"),
    ),
    Client(
        name="GitHub Copilot CLI",
        launched="copilot",
        package="@github/copilot",
        version="1.0.102",
        arguments=("--allow-all-tools", "-p", "{prompt}"),
    ),
    Client(
        name="Droid",
        launched="droid",
        package="droid",
        version="0.215.0",
        arguments=("exec", "--auto", "high", "{prompt}"),
    ),
    Client(
        name="goose",
        launched="goose",
        package=f"@aaif/goose-binary-{_GOOSE_PLATFORM}",
        version="1.52.0",
        program="bin/goose",
        arguments=("run", "-t", "{prompt}"),
    ),
    Client(
        name="Hermes",
        launched="hermes",
        package="hermes-agent",
        version="0.19.0",
        manager="pip",
        arguments=("chat", "--yolo", "-Q", "-q", "{prompt}"),
    ),
    Client(
        name="aider",
        launched="aider",
        package="aider-chat",
        version="0.86.2",
        manager="pip",
        arguments=(
            "--no-git",
            "--yes-always",
            "--no-show-model-warnings",
            "--no-check-update",
            "--message",
            "{prompt}",
        ),
        environment={"AIDER_ANALYTICS": "false"},
        calls=False,
    ),
)

# The other clients of the table, and why no session of them runs.
NOT_RUN: Mapping[str, str] = {
    "aichat": "no package on npm or PyPI: Homebrew and crates.io have it",
    "roo": "an extension of VS Code, from its marketplace",
    "vscode": "an application, which is on neither npm nor PyPI",
    "zed": "an application, which is on neither npm nor PyPI",
}
