# OpenClaw
(
umask 077
mkdir -p /state/openclaw
cat > /state/openclaw/openclaw.json <<'END'
{
  "models": {
    "providers": {
      "vllm-mlx": {
        "baseUrl": "http://127.0.0.1:8000/v1",
        "apiKey": "it's a key",
        "api": "openai-completions",
        "models": [
          {
            "id": "mlx-community/Qwen3-8B-4bit",
            "name": "mlx-community/Qwen3-8B-4bit",
            "reasoning": true,
            "input": ["text"],
            "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
            "contextWindow": 40960,
            "maxTokens": 10240
          }
        ]
      }
    }
  },
  "agents": {"defaults": {"model": {"primary": "vllm-mlx/mlx-community/Qwen3-8B-4bit"}}}
}
END
)
export OPENCLAW_STATE_DIR=/state/openclaw
export OPENCLAW_CONFIG_PATH=/state/openclaw/openclaw.json
openclaw tui --local
