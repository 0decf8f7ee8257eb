"""The real clients: which package they are, how each is pointed at a server, what runs one session. Starts nothing."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

SHELL_TOOL = "Bash"


@dataclass(frozen=True, slots=True)
class Place:
    """Where one session runs. `window`: tokens of context that the client is told of."""

    home: Path
    work: Path
    url: str
    model: str
    window: int
    is_trimmed: bool  # fewest tools, for servers that read slowly


@dataclass(frozen=True, slots=True)
class Command:
    arguments: tuple[str, ...]  # behind the client's binary
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Client:
    name: str
    package: str
    version: str
    binary: str
    prepare: Callable[[Place, str], Command]  # (place, prompt): writes the client's files into the place

    @property
    def spec(self) -> str:
        return f"{self.package}@{self.version}"


def claude_code(place: Place, prompt: str) -> Command:
    models = ("ANTHROPIC_MODEL", *(f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in ("HAIKU", "SONNET", "OPUS")))
    tools = ("--tools", SHELL_TOOL) if place.is_trimmed else ()
    return Command(
        ("-p", prompt, *tools, "--allowedTools", SHELL_TOOL, "--output-format", "json"),
        {
            **dict.fromkeys(models, place.model),
            "ANTHROPIC_BASE_URL": place.url,
            "ANTHROPIC_API_KEY": "none",
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(place.window),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(min(32_000, place.window // 4)),  # it keeps so much free
            "CLAUDE_STREAM_IDLE_TIMEOUT_MS": "1800000",  # a slow prefill is silence to it
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "DISABLE_TELEMETRY": "1",
        },
    )


def codex(place: Place, prompt: str) -> Command:
    folder = place.home / ".codex"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(
        f'model = "{place.model}"\nmodel_provider = "local"\nmodel_context_window = {place.window}\n'
        f'\n[model_providers.local]\nname = "local"\nbase_url = "{place.url}/v1"\nenv_key = "LOCAL_KEY"\n'
        'wire_api = "responses"\n'
    )
    # The workplace is thrown away: nothing in it needs the client's own sandbox.
    flags = ("--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    return Command(("exec", *flags, prompt), {"LOCAL_KEY": "none"})


def opencode(place: Place, prompt: str, *, package: str = "@ai-sdk/openai-compatible") -> Command:
    """`package`: of its provider, which says which protocol it speaks."""
    model = f"local/{place.model}"
    limit = {"context": place.window, "output": 8192}
    config = {
        "autoupdate": False,
        "share": "disabled",
        "model": model,
        "small_model": model,
        "permission": {"bash": "allow"},
        "provider": {
            "local": {
                "npm": package,
                "options": {"baseURL": f"{place.url}/v1", "apiKey": "none"},
                "models": {place.model: {"limit": limit}},
            }
        },
    }
    if place.is_trimmed:
        config["tools"] = {"*": False, "bash": True}
    (place.work / "opencode.json").write_text(json.dumps(config))
    return Command(("run", "--model", model, "--format", "json", prompt), {"OPENCODE_DISABLE_MODELS_FETCH": "1"})


CLIENTS = (
    Client("Claude Code", "@anthropic-ai/claude-code", "2.1.329", "claude", claude_code),
    Client("Codex", "@openai/codex", "0.169.0", "codex", codex),
    Client("opencode", "opencode-ai", "1.18.33", "opencode", opencode),
    Client("opencode, Responses", "opencode-ai", "1.18.33", "opencode", partial(opencode, package="@ai-sdk/openai")),
    Client("opencode, Messages", "opencode-ai", "1.18.33", "opencode", partial(opencode, package="@ai-sdk/anthropic")),
)
