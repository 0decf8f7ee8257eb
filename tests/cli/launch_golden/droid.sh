# Droid
(
umask 077
mkdir -p /state/droid
cat > /state/droid/settings.json <<'END'
{
  "customModels": [
    {
      "id": "custom:vllm-mlx",
      "model": "mlx-community/Qwen3-8B-4bit",
      "displayName": "vllm-mlx",
      "baseUrl": "http://127.0.0.1:8000/v1",
      "apiKey": "it's a key",
      "provider": "generic-chat-completion-api",
      "maxContextLimit": 40960,
      "maxOutputTokens": 10240,
      "noImageSupport": true
    }
  ],
  "sessionDefaultSettings": {"model": "custom:vllm-mlx"}
}
END
)
droid --settings /state/droid/settings.json
