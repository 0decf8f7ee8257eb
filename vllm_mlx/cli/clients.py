"""The clients that `launch` starts: how each is installed and how it is pointed at a server. See docs/clients.

A client is a function that returns its `Plan` for a `Target`. This module starts and writes nothing.
"""

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .terminal import one_line

NO_KEY = "none"  # sent where the server asks for none


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The server that a client shall use, and the folders in which the client's files are."""

    url: str  # without /v1
    model: str
    context: int  # tokens of prompt and reply
    api_key: str  # `NO_KEY` if the server needs none
    folder: Path  # where our own files for clients are
    home: Path = field(default_factory=Path.home)

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    @property
    def max_reply(self) -> int:
        """Tokens that clients keep free for a reply: a quarter of the context, at most 32,000."""
        return max(1, min(32_000, self.context // 4))


@dataclass(frozen=True, slots=True)
class JsonEntries:
    """Values for a JSON file of the client's user; the other values of that file stay."""

    path: Path
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TextLines:
    """Lines for the end of a file of the client's user, unless one of its lines begins with `marker` already."""

    path: Path
    marker: str
    text: str


@dataclass(frozen=True, slots=True)
class OwnFile:
    """A file in the client's folder that only we write."""

    path: Path
    text: str


Lasting = JsonEntries | TextLines | OwnFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How to install a client, start it, and set it up for a server."""

    title: str
    install: str
    commands: tuple[tuple[str, ...], ...]  # the last one is the client itself
    environment: Mapping[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()  # variables that would override these
    files: Mapping[Path, str] = field(default_factory=dict)  # in the target's folder
    first_prompt: int = 0  # tokens of the client's first prompt, about
    warning: str = ""  # what the user should know before the client starts
    lasting: Lasting | None = None  # what `--write` writes; None: the client has no such file
    start_after_writing: str = ""  # the command to start the client with, if it is not the usual one

    def script(self, title: str) -> str:
        """A shell script that does what `launch` does."""
        lines = [f"# {one_line(comment)}" for comment in (title, self.warning) if comment]
        for path, text in self.files.items():  # only their owner may read them, as with `write_own`
            lines += ["(", "umask 077", f"mkdir -p {shlex.quote(str(path.parent))}"]
            lines += [f"cat > {shlex.quote(str(path))} <<'END'", text.rstrip("\n"), "END", ")"]
        lines += [f"export {name}={shlex.quote(value)}" for name, value in self.environment.items()]
        lines += [f"unset {name}" for name in self.unset]
        return "\n".join([*lines, *(shlex.join(command) for command in self.commands)]) + "\n"


def pretty(values: Any) -> str:
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"


_PROVIDER = "vllm-mlx"
_CODEX_KEY = "LOCAL_KEY"
_CLINE_SHOWS_KEY = (
    "While `cline auth` runs, others on this machine can see the key in the list of processes: it takes a key as an "
    "argument only. Where that matters, run `cline auth` without arguments and type the key."
)
_IDLE_MS = 300_000
_SILENCE_MS = 1_800_000  # the longest that Claude Code takes; pings are silence to it


def claude(target: Target) -> Plan:
    models = ("ANTHROPIC_MODEL", *(f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in ("HAIKU", "SONNET", "OPUS")))
    environment = {
        "ANTHROPIC_BASE_URL": target.url,
        "ANTHROPIC_AUTH_TOKEN": target.api_key,
        **dict.fromkeys((*models, "CLAUDE_CODE_SUBAGENT_MODEL"), target.model),
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(target.context),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(target.max_reply),
        "CLAUDE_STREAM_IDLE_TIMEOUT_MS": str(_SILENCE_MS),
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_TELEMETRY": "1",
    }
    return Plan(
        title="Claude Code",
        install="npm install -g @anthropic-ai/claude-code",
        commands=(("claude",),),
        environment=environment,
        unset=("ANTHROPIC_API_KEY",),
        first_prompt=12_500,
        lasting=JsonEntries(target.home / ".claude" / "settings.json", {"env": environment}),
    )


def codex(target: Target) -> Plan:
    provider = {
        "name": _PROVIDER,
        "base_url": target.base_url,
        "env_key": _CODEX_KEY,
        "wire_api": "responses",
        "stream_idle_timeout_ms": _IDLE_MS,
    }
    settings = {
        "model": target.model,
        "model_provider": _PROVIDER,
        "model_context_window": target.context,
        "model_auto_compact_token_limit": target.context - target.max_reply,
    }
    overrides = [*_toml(settings, "="), f"model_providers.{_PROVIDER}={{ {', '.join(_toml(provider))} }}"]
    lines = [*_toml(settings), "", f"[model_providers.{_PROVIDER}]", *_toml(provider), ""]
    return Plan(
        title="Codex",
        install="npm install -g @openai/codex",
        commands=(("codex", *(word for override in overrides for word in ("-c", override))),),
        environment={_CODEX_KEY: target.api_key},
        first_prompt=10_000,
        lasting=OwnFile(target.home / ".codex" / f"{_PROVIDER}.config.toml", "\n".join(lines)),  # a profile
        start_after_writing=f"{_CODEX_KEY}=KEY codex --profile {_PROVIDER}",
    )


def _toml(values: Mapping[str, Any], sign: str = " = ") -> list[str]:
    """Lines of TOML. JSON's texts and numbers are TOML too."""
    return [f"{key}{sign}{json.dumps(value)}" for key, value in values.items()]


def opencode(target: Target) -> Plan:
    config = {
        "model": f"{_PROVIDER}/{target.model}",
        "small_model": f"{_PROVIDER}/{target.model}",
        "provider": {
            _PROVIDER: {
                "npm": "@ai-sdk/openai-compatible",
                "options": {"baseURL": target.base_url, "apiKey": target.api_key},
                "models": {target.model: {"limit": {"context": target.context, "output": target.max_reply}}},
            }
        },
    }
    return Plan(
        title="opencode",
        install="npm install -g opencode-ai",
        commands=(("opencode",),),
        environment={"OPENCODE_CONFIG_CONTENT": json.dumps(config), "OPENCODE_DISABLE_MODELS_FETCH": "1"},
        first_prompt=8_000,
        lasting=JsonEntries(target.home / ".config" / "opencode" / "opencode.json", config),
    )


def qwen(target: Target) -> Plan:
    entry = {
        "id": target.model,
        "name": target.model,
        "envKey": "OPENAI_API_KEY",
        "baseUrl": target.base_url,
        "generationConfig": {"contextWindowSize": target.context},
    }
    settings = {
        "modelProviders": {"openai": [entry]},
        "security": {"auth": {"selectedType": "openai"}},
        "model": {"name": target.model},
    }
    lasting = {**settings, "env": {"OPENAI_API_KEY": target.api_key}}
    file = target.folder / "qwen" / "settings.json"
    return Plan(
        title="Qwen Code",
        install="npm install -g @qwen-code/qwen-code",
        commands=(("qwen", "--auth-type", "openai", "-m", target.model),),
        environment={
            "OPENAI_BASE_URL": target.base_url,
            "OPENAI_API_KEY": target.api_key,
            "OPENAI_MODEL": target.model,
            "QWEN_CODE_MAX_OUTPUT_TOKENS": str(target.max_reply),
            "QWEN_CODE_SYSTEM_SETTINGS_PATH": str(file),
        },
        files={file: pretty(settings)},
        first_prompt=20_000,
        lasting=JsonEntries(target.home / ".qwen" / "settings.json", lasting),
    )


def cline(target: Target) -> Plan:
    folder = ("--data-dir", str(target.folder / "cline"))
    provider = ("-p", "openai", "-k", target.api_key, "-m", target.model, "-b", target.base_url)
    return Plan(
        title="Cline",
        install="npm install -g cline",
        commands=(("cline", "auth", *provider, *folder), ("cline", *folder)),
        first_prompt=6_000,
        warning="" if target.api_key == NO_KEY else _CLINE_SHOWS_KEY,
    )


def aider(target: Target) -> Plan:
    name = f"openai/{target.model}"
    file = target.folder / "aider" / "models.json"
    limits = {
        name: {
            "litellm_provider": "openai",
            "mode": "chat",
            "max_input_tokens": target.context - target.max_reply,
            "max_output_tokens": target.max_reply,
            "max_tokens": target.max_reply,
            "input_cost_per_token": 0,
            "output_cost_per_token": 0,
        }
    }
    roles = ("model", "weak-model", "editor-model")
    flags = tuple(word for role in roles for word in (f"--{role}", name))
    lines = [f"{role}: {json.dumps(name)}" for role in roles]
    lines += [f"openai-api-base: {target.base_url}", f"openai-api-key: {json.dumps(target.api_key)}", ""]
    return Plan(
        title="aider",
        install="python3 -m pip install aider-chat",
        commands=(("aider", *flags, "--model-metadata-file", str(file)),),
        environment={
            "OPENAI_API_BASE": target.base_url,
            "OPENAI_API_KEY": target.api_key,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
        files={file: pretty(limits)},
        first_prompt=2_500,
        lasting=TextLines(target.home / ".aider.conf.yml", "model:", "\n".join(lines)),
    )


CLIENTS: Mapping[str, Callable[[Target], Plan]] = {
    client.__name__: client for client in (claude, codex, opencode, qwen, cline, aider)
}
