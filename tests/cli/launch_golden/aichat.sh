# aichat
(
umask 077
mkdir -p /state/aichat
cat > /state/aichat/config.yaml <<'END'
model: "vllm-mlx:mlx-community/Qwen3-8B-4bit"
clients:
  - type: "openai-compatible"
    name: "vllm-mlx"
    api_base: "http://127.0.0.1:8000/v1"
    api_key: "it's a key"
    models:
      - name: "mlx-community/Qwen3-8B-4bit"
        max_input_tokens: 30720
        max_output_tokens: 10240
        supports_function_calling: true
        supports_vision: false
END
)
export AICHAT_CONFIG_FILE=/state/aichat/config.yaml
aichat
