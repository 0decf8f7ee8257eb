"""The contents of clients' settings files and environment variables, as templates for the table of clients."""

from collections.abc import Mapping
from typing import Any

from .clients import PROVIDER

_IDLE_MS = 300_000
FREE = {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0}
_SILENCE_MS = 1_800_000  # the longest limit that Claude Code accepts; it counts pings as silence

CLAUDE_VARIABLES = {
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

CODEX_KEY = "LOCAL_KEY"
CODEX_PROVIDER = {
    "name": PROVIDER,
    "base_url": "{base_url}",
    "env_key": CODEX_KEY,
    "wire_api": "responses",
    "stream_idle_timeout_ms": _IDLE_MS,
}
CODEX_SETTINGS = {
    "model": "{model}",
    "model_provider": PROVIDER,
    "model_context_window": "{context}",
    "model_auto_compact_token_limit": "{max_prompt}",
    "web_search": "{web_search}",
}

OPENCODE_CONFIG = {
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

QWEN_SETTINGS: Mapping[str, Any] = {
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

AIDER_MODEL = "openai/{model}"
AIDER_ROLES = ("model", "weak-model", "editor-model")


# pi and OpenClaw describe a model in the same way.
_PI_MODEL = {
    "id": "{model}",
    "name": "{model}",
    "reasoning": True,
    "input": ["text"],
    "cost": FREE,
    "contextWindow": "{context}",
    "maxTokens": "{max_reply}",
}
PI_PROVIDER = {
    "baseUrl": "{base_url}",
    "api": "openai-completions",
    "models": [_PI_MODEL],
}

CONTINUE_CONFIG = {
    "name": PROVIDER,
    "version": "1.0.0",
    "schema": "v1",
    "models": [
        {
            "name": "{model}",
            "provider": "openai",
            "model": "{model}",
            "apiBase": "{base_url}",
            "apiKey": "{key}",
            "capabilities": ["tool_use"],
            "defaultCompletionOptions": {"contextLength": "{context}", "maxTokens": "{max_reply}"},
        }
    ],
}

GOOSE_SETTINGS = {
    "GOOSE_PROVIDER": "openai",
    "GOOSE_MODEL": "{model}",
    "OPENAI_HOST": "{url}",
    "GOOSE_CONTEXT_LIMIT": "{context!s}",
}

ROO_SETTINGS = {
    "providerProfiles": {
        "currentApiConfigName": PROVIDER,
        "apiConfigs": {
            PROVIDER: {
                "id": PROVIDER,
                "apiProvider": "openai",
                "openAiBaseUrl": "{base_url}",
                "openAiApiKey": "{key}",
                "openAiModelId": "{model}",
                "openAiCustomModelInfo": {
                    "contextWindow": "{context}",
                    "maxTokens": "{max_reply}",
                    "supportsImages": False,
                    "supportsPromptCache": False,
                },
            }
        },
    }
}

OPENCLAW_CONFIG = {
    "models": {
        "providers": {
            PROVIDER: {
                "baseUrl": "{base_url}",
                "apiKey": "{key}",
                "api": "openai-completions",
                "models": [_PI_MODEL],
            }
        }
    },
    "agents": {"defaults": {"model": {"primary": f"{PROVIDER}/{{model}}"}}},
}

HERMES_CONFIG = {
    "model": {
        "provider": "custom",
        "default": "{model}",
        "base_url": "{base_url}",
        "api_key": "{key}",
        "context_length": "{context}",
        "max_tokens": "{max_reply}",
    }
}

DROID_SETTINGS = {
    "customModels": [
        {
            "id": f"custom:{PROVIDER}",
            "model": "{model}",
            "displayName": PROVIDER,
            "baseUrl": "{base_url}",
            "apiKey": "{key}",
            "provider": "generic-chat-completion-api",
            "maxContextLimit": "{context}",
            "maxOutputTokens": "{max_reply}",
        }
    ],
    "sessionDefaultSettings": {"model": f"custom:{PROVIDER}"},
}

VSCODE_MODELS = [
    {
        "name": PROVIDER,
        "vendor": "customendpoint",
        "apiKey": "{key}",
        "apiType": "chat-completions",
        "models": [
            {
                "id": "{model}",
                "name": "{model}",
                "url": "{base_url}/chat/completions",
                "toolCalling": True,
                "vision": False,
                "maxInputTokens": "{max_prompt}",
                "maxOutputTokens": "{max_reply}",
            }
        ],
    }
]

ZED_SETTINGS = {
    "language_models": {
        "openai_compatible": {
            PROVIDER: {
                "api_url": "{base_url}",
                "available_models": [
                    {
                        "name": "{model}",
                        "display_name": "{model}",
                        "max_tokens": "{context}",
                        "max_output_tokens": "{max_reply}",
                        "capabilities": {
                            "tools": True,
                            "images": False,
                            "parallel_tool_calls": True,
                            "prompt_cache_key": False,
                        },
                    }
                ],
            }
        }
    },
    "agent": {"default_model": {"provider": PROVIDER, "model": "{model}"}},
}

AICHAT_CONFIG = {
    "model": f"{PROVIDER}:{{model}}",
    "clients": [
        {
            "type": "openai-compatible",
            "name": PROVIDER,
            "api_base": "{base_url}",
            "api_key": "{key}",
            "models": [
                {
                    "name": "{model}",
                    "max_input_tokens": "{max_prompt}",
                    "max_output_tokens": "{max_reply}",
                    "supports_function_calling": True,
                }
            ],
        }
    ],
}
