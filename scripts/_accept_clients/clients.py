"""The table of real clients: the package of each, and the command of a session without a terminal.

`vllm-mlx launch` points a client at a server: this module has no settings of its own.
"""

import json
import platform
import sys
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Literal

from vllm_mlx.cli.clients import CLIENTS as LAUNCHED
from vllm_mlx.cli.clients import NO_KEY, Target
from vllm_mlx.cli.clients import Client as Launched
from vllm_mlx.cli.remote import Model

from .ending import End

SHELL_TOOL = "Bash"
IMAGE = "shown.png"
_MENTIONED = ("{prompt} @{image}",)
_OPENCODE_PACKAGE = "@ai-sdk/openai-compatible"
_OPENCODE_PROJECT = {"autoupdate": False, "share": "disabled", "permission": {"bash": "allow"}}


@dataclass(frozen=True, slots=True)
class Place:
    """The folders of one session, the address of its server, and the settings of all sessions."""

    home: Path
    work: Path
    url: str
    setting: "Setting"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The settings of all sessions. `is_scripted`: the server asks for a fixed list of calls instead of a model."""

    folder: Path  # of the installed clients
    url: str
    model: Model
    small: Model | None  # for titles and summaries; None: the same model
    is_trimmed: bool  # fewest tools, for servers that read slowly
    limit_s: float
    is_scripted: bool
    end: End | None
    sends_image: bool


@dataclass(frozen=True, slots=True)
class Client:
    """`{prompt}` in the arguments stands for the prompt."""

    name: str
    launched: str  # its name in `vllm-mlx launch`
    package: str
    version: str
    arguments: tuple[str, ...]  # a session without a terminal, all of whose calls are allowed
    _: KW_ONLY
    trimmed: tuple[str, ...] = ()  # further arguments that leave the shell alone
    manager: Literal["npm", "pip"] = "npm"
    program: str | None = None  # its path in the package, where npm gives it another name than `launch` expects
    provider: str | None = None  # opencode's package, which says which protocol it speaks
    environment: Mapping[str, str] = field(default_factory=dict)
    project: Mapping[str, object] = field(default_factory=dict)  # opencode.json of the folder in which it works
    calls: bool = True  # whether it has tools
    image: tuple[str, ...] = ()  # arguments that show it an image, `{image}`; empty: without a terminal it takes none
    loses_output: bool = False  # at times, of a command that ends at once: its own fault, told but accepted

    @property
    def spec(self) -> str:
        return f"{self.package}{'@' if self.manager == 'npm' else '=='}{self.version}"

    @property
    def command(self) -> str:
        return LAUNCHED[self.launched].program

    def for_server(self, place: Place) -> Launched:
        """Return the client as `launch` sets it up, with the additions of this table."""
        setting = place.setting
        target = Target(
            url=place.url,
            model=setting.model,
            context=setting.model.max_model_len or 0,
            small=setting.small,
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
            trimmed = {"tools": {"*": False, "bash": True}} if place.setting.is_trimmed else {}
            (place.work / "opencode.json").write_text(json.dumps({**self.project, **trimmed}))
        image = self.image if place.setting.sends_image else ()
        if image == _MENTIONED:
            prompt, image = image[0].replace("{prompt}", prompt), image[1:]
        arguments = (*self.arguments, *image, *(self.trimmed if place.setting.is_trimmed else ()))
        words = [word.replace("{prompt}", prompt).replace("{image}", str(place.work / IMAGE)) for word in arguments]
        commands = self.for_server(place).runs(words)
        return [command[1:] for command in commands]


_GOOSE_PLATFORM = (
    f"{'darwin' if sys.platform == 'darwin' else 'linux'}-"
    f"{'arm64' if platform.machine() in ('arm64', 'aarch64') else 'x64'}"
)
_CODEX_FLAGS = ("--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")

CLIENTS = (
    Client(
        "Claude Code", "claude", "@anthropic-ai/claude-code", "2.1.332",
        ("-p", "{prompt}", "--allowedTools", SHELL_TOOL, "--output-format", "json"), trimmed=("--tools", SHELL_TOOL),
        image=_MENTIONED,
    ),
    # Nothing in the workplace needs the client's own sandbox.
    Client(
        "Codex", "codex", "@openai/codex", "0.171.0", ("exec", *_CODEX_FLAGS, "{prompt}"), image=("--image={image}",),
    ),
    *(
        Client(
            name, "opencode", "opencode-ai", "1.18.33", ("run", "--format", "json", "{prompt}"),
            provider=provider, project=_OPENCODE_PROJECT, image=("--file={image}",),
        )
        for name, provider in (
            ("opencode", _OPENCODE_PACKAGE),
            ("opencode, Responses", "@ai-sdk/openai"),
            ("opencode, Messages", "@ai-sdk/anthropic"),
        )
    ),
    # It takes the result when the command exits, before it has read the output.
    Client(
        "Qwen Code", "qwen", "@qwen-code/qwen-code", "0.24.4", ("--yolo", "-p", "{prompt}"), image=_MENTIONED,
        loses_output=True,
    ),
    Client("Cline", "cline", "cline", "3.0.65", ("{prompt}",), image=_MENTIONED),
    Client(
        "pi", "pi", "@mariozechner/pi-coding-agent", "0.73.1", ("--print", "{prompt}"), trimmed=("--tools", "bash"),
        image=("@{image}",),
    ),
    Client("Continue", "continue", "@continuedev/cli", "1.5.47", ("--auto", "-p", "{prompt}")),
    Client("Kilo Code", "kilo", "@kilocode/cli", "7.7.7", ("run", "--auto", "{prompt}"), image=("--file={image}",)),
    Client("OpenClaw", "openclaw", "openclaw", "2026.9.6", ("agent", "exec", "{prompt}")),
    Client(
        "GitHub Copilot CLI", "copilot", "@github/copilot", "1.0.102", ("--allow-all-tools", "-p", "{prompt}"),
        image=("--attachment={image}",),
    ),
    Client("Droid", "droid", "droid", "0.215.0", ("exec", "--auto", "high", "{prompt}")),
    Client(
        "goose", "goose", f"@aaif/goose-binary-{_GOOSE_PLATFORM}", "1.52.0", ("run", "-t", "{prompt}"),
        program="bin/goose",
    ),
    Client(
        "Hermes", "hermes", "hermes-agent", "0.19.0", ("chat", "--yolo", "-Q", "-q", "{prompt}"), manager="pip",
        image=("--image={image}",),
    ),
    Client(
        "aider", "aider", "aider-chat", "0.86.2",
        ("--no-git", "--yes-always", "--no-show-model-warnings", "--no-check-update", "--message", "{prompt}"),
        manager="pip", environment={"AIDER_ANALYTICS": "false"}, calls=False, image=("{image}",),
    ),
)  # fmt: skip

# The other clients of the table, and why no session of them runs.
NOT_RUN: Mapping[str, str] = {
    "aichat": "no package on npm or PyPI: Homebrew and crates.io have it",
    "roo": "an extension of VS Code, from its marketplace",
    "vscode": "an application, which is on neither npm nor PyPI",
    "zed": "an application, which is on neither npm nor PyPI",
    **dict.fromkeys(
        ("cursor", "xcode", "jetbrains", "openwebui", "raycast", "crush", "kimi"),
        "it is set up by hand in its settings",
    ),
}
