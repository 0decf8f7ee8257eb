# Continue
(
umask 077
mkdir -p /state/continue
cat > /state/continue/config.yaml <<'END'
name: "vllm-mlx"
version: "1.0.0"
schema: "v1"
models:
  - name: "mlx-community/Qwen3-8B-4bit"
    provider: "openai"
    model: "mlx-community/Qwen3-8B-4bit"
    apiBase: "http://127.0.0.1:8000/v1"
    apiKey: "it's a key"
    capabilities: ["tool_use"]
    defaultCompletionOptions:
      contextLength: 40960
      maxTokens: 10240
END
)
export CONTINUE_TELEMETRY_ENABLED=0
cn --config /state/continue/config.yaml
