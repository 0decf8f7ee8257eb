"""The table of clients. docs/clients has a page for each, which says what was tried."""

from collections.abc import Mapping
from typing import Any

from .clients import PROVIDER, AsJson, Client, Kept

_IDLE_MS = 300_000
_SILENCE_MS = 1_800_000  # the longest that Claude Code takes; pings are silence to it

_CLAUDE_VARIABLES = {
    "ANTHROPIC_BASE_URL": "{url}",
    "ANTHROPIC_AUTH_TOKEN": "{key}",
    "ANTHROPIC_MODEL": "{model}",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL": "{model}",
    "ANTHROPIC_DEFAULT_SONNET_MODEL": "{model}",
    "ANTHROPIC_DEFAULT_OPUS_MODEL": "{model}",
    "CLAUDE_CODE_SUBAGENT_MODEL": "{model}",
    "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "{context!s}",
    "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "{max_reply!s}",
    "CLAUDE_STREAM_IDLE_TIMEOUT_MS": str(_SILENCE_MS),
    "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_TELEMETRY": "1",
}

_CODEX_KEY = "LOCAL_KEY"
_CODEX_PROVIDER = {
    "name": PROVIDER,
    "base_url": "{base_url}",
    "env_key": _CODEX_KEY,
    "wire_api": "responses",
    "stream_idle_timeout_ms": _IDLE_MS,
}
_CODEX_SETTINGS = {
    "model": "{model}",
    "model_provider": PROVIDER,
    "model_context_window": "{context}",
    "model_auto_compact_token_limit": "{max_prompt}",
}

_OPENCODE_CONFIG = {
    "model": f"{PROVIDER}/{{model}}",
    "small_model": f"{PROVIDER}/{{model}}",
    "provider": {
        PROVIDER: {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": "{base_url}", "apiKey": "{key}"},
            "models": {"{model}": {"limit": {"context": "{context}", "output": "{max_reply}"}}},
        }
    },
}

_QWEN_SETTINGS: Mapping[str, Any] = {
    "modelProviders": {
        "openai": [
            {
                "id": "{model}",
                "name": "{model}",
                "envKey": "OPENAI_API_KEY",
                "baseUrl": "{base_url}",
                "generationConfig": {"contextWindowSize": "{context}"},
            }
        ]
    },
    "security": {"auth": {"selectedType": "openai"}},
    "model": {"name": "{model}"},
}

_AIDER_MODEL = "openai/{model}"
_AIDER_ROLES = ("model", "weak-model", "editor-model")


def _codex_flags() -> tuple[str | AsJson, ...]:
    provider = {f"model_providers.{PROVIDER}.{key}": value for key, value in _CODEX_PROVIDER.items()}
    settings = {**_CODEX_SETTINGS, **provider}
    return tuple(word for key, value in settings.items() for word in ("-c", AsJson(value, f"{key}=")))


CLIENTS: Mapping[str, Client] = {
    "claude": Client(
        title="Claude Code",
        install="npm install -g @anthropic-ai/claude-code",
        program="claude",
        environment=_CLAUDE_VARIABLES,
        unset=("ANTHROPIC_API_KEY",),
        first_prompt=12_500,
        kept=Kept("{home}/.claude/settings.json", {"env": _CLAUDE_VARIABLES}),
    ),
    "codex": Client(
        title="Codex",
        install="npm install -g @openai/codex",
        program="codex",
        flags=_codex_flags(),
        environment={_CODEX_KEY: "{key}"},
        first_prompt=10_000,
        kept=Kept(
            f"{{home}}/.codex/{PROVIDER}.config.toml",  # a profile
            {**_CODEX_SETTINGS, "model_providers": {PROVIDER: _CODEX_PROVIDER}},
            "our",
        ),
        after_writing=f"Start it with `{_CODEX_KEY}=KEY codex --profile {PROVIDER}`.",
    ),
    "opencode": Client(
        title="opencode",
        install="npm install -g opencode-ai",
        program="opencode",
        environment={"OPENCODE_CONFIG_CONTENT": AsJson(_OPENCODE_CONFIG), "OPENCODE_DISABLE_MODELS_FETCH": "1"},
        first_prompt=8_000,
        kept=Kept("{home}/.config/opencode/opencode.json", _OPENCODE_CONFIG),
    ),
    "qwen": Client(
        title="Qwen Code",
        install="npm install -g @qwen-code/qwen-code",
        program="qwen",
        flags=("--auth-type", "openai", "-m", "{model}"),
        environment={
            "OPENAI_BASE_URL": "{base_url}",
            "OPENAI_API_KEY": "{key}",
            "OPENAI_MODEL": "{model}",
            "QWEN_CODE_MAX_OUTPUT_TOKENS": "{max_reply}",
            "QWEN_CODE_SYSTEM_SETTINGS_PATH": "{folder}/qwen/settings.json",
        },
        files={"qwen/settings.json": _QWEN_SETTINGS},
        first_prompt=20_000,
        kept=Kept("{home}/.qwen/settings.json", {**_QWEN_SETTINGS, "env": {"OPENAI_API_KEY": "{key}"}}),
    ),
    "cline": Client(
        title="Cline",
        install="npm install -g cline",
        program="cline",
        before=(
            *("auth", "-p", "openai", "-k", "{key}", "-m", "{model}", "-b", "{base_url}"),
            *("--data-dir", "{folder}/cline"),
        ),
        flags=("--data-dir", "{folder}/cline"),
        first_prompt=6_000,
        shows_key="While `cline auth` runs, others on this machine can see the key in the list of processes: it takes "
        "a key as an argument only. Where that matters, run `cline auth` without arguments and type the key.",
    ),
    "aider": Client(
        title="aider",
        install="python3 -m pip install aider-chat",
        program="aider",
        flags=(
            *(word for role in _AIDER_ROLES for word in (f"--{role}", _AIDER_MODEL)),
            *("--model-metadata-file", "{folder}/aider/models.json"),
        ),
        environment={
            "OPENAI_API_BASE": "{base_url}",
            "OPENAI_API_KEY": "{key}",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
        files={
            "aider/models.json": {
                _AIDER_MODEL: {
                    "litellm_provider": "openai",
                    "mode": "chat",
                    "max_input_tokens": "{max_prompt}",
                    "max_output_tokens": "{max_reply}",
                    "max_tokens": "{max_reply}",
                    "input_cost_per_token": 0,
                    "output_cost_per_token": 0,
                }
            }
        },
        first_prompt=2_500,
        kept=Kept(
            "{home}/.aider.conf.yml",
            {
                **dict.fromkeys(_AIDER_ROLES, _AIDER_MODEL),
                "openai-api-base": "{base_url}",
                "openai-api-key": "{key}",
            },
            "append",
        ),
    ),
}
