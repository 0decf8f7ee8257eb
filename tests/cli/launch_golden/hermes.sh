# Hermes
(
umask 077
mkdir -p /state/hermes
cat > /state/hermes/config.yaml <<'END'
model:
  provider: "custom"
  default: "mlx-community/Qwen3-8B-4bit"
  base_url: "http://127.0.0.1:8000/v1"
  api_key: "it's a key"
  context_length: 40960
  max_tokens: 10240
  supports_vision: false
END
)
export HERMES_HOME=/state/hermes
hermes
