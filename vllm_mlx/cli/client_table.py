"""The table of clients. docs/clients has a page for each, which says what was tried."""

from collections.abc import Mapping

from .client_documents import (
    AICHAT_CONFIG,
    AIDER_MODEL,
    AIDER_ROLES,
    CLAUDE_VARIABLES,
    CODEX_KEY,
    CODEX_PROVIDER,
    CODEX_SETTINGS,
    CONTINUE_CONFIG,
    DROID_SETTINGS,
    GOOSE_SETTINGS,
    HERMES_CONFIG,
    OPENCLAW_CONFIG,
    OPENCODE_CONFIG,
    PI_PROVIDER,
    QWEN_SETTINGS,
    ROO_SETTINGS,
    VSCODE_MODELS,
    ZED_SETTINGS,
)
from .clients import PROVIDER, AsJson, Client, SettingsFile


def _codex_flags() -> tuple[str | AsJson, ...]:
    provider = {f"model_providers.{PROVIDER}.{key}": value for key, value in CODEX_PROVIDER.items()}
    settings = {**CODEX_SETTINGS, **provider}
    return tuple(word for key, value in settings.items() for word in ("-c", AsJson(value, f"{key}=")))


CLIENTS: Mapping[str, Client] = {
    "claude": Client(
        title="Claude Code",
        install="npm install -g @anthropic-ai/claude-code",
        program="claude",
        environment=CLAUDE_VARIABLES,
        unset=("ANTHROPIC_API_KEY",),
        first_prompt=12_500,
        settings=SettingsFile("{home}/.claude/settings.json", {"env": CLAUDE_VARIABLES}),
    ),
    "codex": Client(
        title="Codex",
        install="npm install -g @openai/codex",
        program="codex",
        flags=_codex_flags(),
        environment={CODEX_KEY: "{key}"},
        first_prompt=10_000,
        settings=SettingsFile(
            f"{{home}}/.codex/{PROVIDER}.config.toml",  # a profile
            {**CODEX_SETTINGS, "model_providers": {PROVIDER: CODEX_PROVIDER}},
            "own",
        ),
        after_writing=f"Start it with `{CODEX_KEY}=KEY codex --profile {PROVIDER}`.",
    ),
    "opencode": Client(
        title="opencode",
        install="npm install -g opencode-ai",
        program="opencode",
        environment={"OPENCODE_CONFIG_CONTENT": AsJson(OPENCODE_CONFIG), "OPENCODE_DISABLE_MODELS_FETCH": "1"},
        first_prompt=8_000,
        settings=SettingsFile("{home}/.config/opencode/opencode.json", OPENCODE_CONFIG),
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
        files={"qwen/settings.json": QWEN_SETTINGS},
        first_prompt=20_000,
        settings=SettingsFile("{home}/.qwen/settings.json", {**QWEN_SETTINGS, "env": {"OPENAI_API_KEY": "{key}"}}),
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
            *(word for role in AIDER_ROLES for word in (f"--{role}", AIDER_MODEL)),
            *("--model-metadata-file", "{folder}/aider/models.json"),
        ),
        environment={
            "OPENAI_API_BASE": "{base_url}",
            "OPENAI_API_KEY": "{key}",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
        files={
            "aider/models.json": {
                AIDER_MODEL: {
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
        settings=SettingsFile(
            "{home}/.aider.conf.yml",
            {
                **dict.fromkeys(AIDER_ROLES, AIDER_MODEL),
                "openai-api-base": "{base_url}",
                "openai-api-key": "{key}",
            },
            "append",
        ),
    ),
    "pi": Client(
        title="pi",
        install="npm install -g @mariozechner/pi-coding-agent",
        program="pi",
        flags=("--extension", "{folder}/pi/provider.ts", "--provider", PROVIDER, "--model", "{model}"),
        environment={"PI_LOCAL_KEY": "{key}", "PI_OFFLINE": "1"},
        files={
            "pi/provider.ts": AsJson(
                {**PI_PROVIDER, "apiKey": "PI_LOCAL_KEY"},
                f'export default (pi) => pi.registerProvider("{PROVIDER}", ',
                ");",
            )
        },
        first_prompt=1_500,
        settings=SettingsFile(
            "{home}/.pi/agent/models.json", {"providers": {PROVIDER: {**PI_PROVIDER, "apiKey": "{key}"}}}
        ),
        after_writing=f"Start it with `pi --provider {PROVIDER} --model {{model}}`.",
    ),
    "continue": Client(
        title="Continue",
        install="npm install -g @continuedev/cli",
        program="cn",
        flags=("--config", "{folder}/continue/config.yaml"),
        environment={"CONTINUE_TELEMETRY_ENABLED": "0"},
        files={"continue/config.yaml": CONTINUE_CONFIG},
        first_prompt=2_000,
        settings=SettingsFile(f"{{home}}/.continue/{PROVIDER}.yaml", CONTINUE_CONFIG, "own"),
        after_writing=f"Start it with `cn --config ~/.continue/{PROVIDER}.yaml`.",
    ),
    "goose": Client(
        title="goose",
        install="brew install block-goose-cli",
        program="goose",
        default_arguments=("session",),
        environment={**GOOSE_SETTINGS, "OPENAI_API_KEY": "{key}"},
        first_prompt=5_000,
        settings=SettingsFile(
            "{home}/.config/goose/config.yaml", {**GOOSE_SETTINGS, "GOOSE_CONTEXT_LIMIT": "{context}"}, "append"
        ),
        after_writing="Start it with `OPENAI_API_KEY=KEY goose session`: it reads no key from that file.",
    ),
    "kilo": Client(
        title="Kilo Code",
        install="npm install -g @kilocode/cli",
        program="kilo",
        environment={"KILO_CONFIG_CONTENT": AsJson(OPENCODE_CONFIG), "KILO_DISABLE_MODELS_FETCH": "1"},
        first_prompt=13_000,
        settings=SettingsFile("{home}/.config/kilo/kilo.json", OPENCODE_CONFIG),
    ),
    "roo": Client(
        title="Roo Code",
        install="code --install-extension RooVeterinaryInc.roo-cline",
        files={"roo/roo-code-settings.json": ROO_SETTINGS},
        first_prompt=10_000,
        settings=SettingsFile("{folder}/roo/roo-code-settings.json", ROO_SETTINGS),
        after_writing="In Roo Code, choose Settings, About Roo Code, Import, and that file.",
    ),
    "openclaw": Client(
        title="OpenClaw",
        install="npm install -g openclaw",
        program="openclaw",
        default_arguments=("tui", "--local"),
        environment={
            "OPENCLAW_STATE_DIR": "{folder}/openclaw",
            "OPENCLAW_CONFIG_PATH": "{folder}/openclaw/openclaw.json",
        },
        files={"openclaw/openclaw.json": OPENCLAW_CONFIG},
        first_prompt=9_000,
        settings=SettingsFile("{home}/.openclaw/openclaw.json", OPENCLAW_CONFIG),
    ),
    "hermes": Client(
        title="Hermes",
        install="python3 -m pip install hermes-agent",
        program="hermes",
        environment={"HERMES_HOME": "{folder}/hermes"},
        files={"hermes/config.yaml": HERMES_CONFIG},
        first_prompt=14_000,
        least_context=64_000,
        settings=SettingsFile("{home}/.hermes/config.yaml", HERMES_CONFIG, "append"),
    ),
    "copilot": Client(
        title="GitHub Copilot CLI",
        install="npm install -g @github/copilot",
        program="copilot",
        environment={
            "COPILOT_PROVIDER_BASE_URL": "{base_url}",
            "COPILOT_PROVIDER_TYPE": "openai",
            "COPILOT_PROVIDER_API_KEY": "{key}",
            "COPILOT_MODEL": "{model}",
            "COPILOT_PROVIDER_MAX_PROMPT_TOKENS": "{max_prompt}",
            "COPILOT_PROVIDER_MAX_OUTPUT_TOKENS": "{max_reply}",
            "COPILOT_OFFLINE": "true",
        },
        unset=("COPILOT_PROVIDER_BEARER_TOKEN", "COPILOT_PROVIDER_MODEL_ID", "COPILOT_PROVIDER_WIRE_MODEL"),
        first_prompt=12_000,
    ),
    "droid": Client(
        title="Droid",
        install="npm install -g droid",
        program="droid",
        flags=("--settings", "{folder}/droid/settings.json"),
        files={"droid/settings.json": DROID_SETTINGS},
        first_prompt=11_500,
        settings=SettingsFile("{home}/.factory/settings.json", DROID_SETTINGS),
    ),
    "vscode": Client(
        title="VS Code",
        install="brew install --cask visual-studio-code",
        files={"vscode/chatLanguageModels.json": VSCODE_MODELS},
        first_prompt=10_000,
        settings=SettingsFile("{support}/Code/User/chatLanguageModels.json", VSCODE_MODELS),
        after_writing="In VS Code, choose {model} in the model picker of the chat.",
    ),
    "zed": Client(
        title="Zed",
        install="brew install --cask zed",
        files={"zed/settings.json": ZED_SETTINGS},
        first_prompt=5_000,
        settings=SettingsFile("{home}/.config/zed/settings.json", ZED_SETTINGS),
        after_writing="Start it with `VLLM_MLX_API_KEY=KEY zed`, or type the key under Agent Settings: it reads no key "
        "from that file.",
    ),
    "aichat": Client(
        title="aichat",
        install="brew install aichat",
        program="aichat",
        environment={"AICHAT_CONFIG_FILE": "{folder}/aichat/config.yaml"},
        files={"aichat/config.yaml": AICHAT_CONFIG},
        first_prompt=100,
        settings=SettingsFile("{support}/aichat/config.yaml", AICHAT_CONFIG, "append"),
    ),
}
