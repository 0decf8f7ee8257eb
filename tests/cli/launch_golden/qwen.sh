# Qwen Code
(
umask 077
mkdir -p /state/qwen
cat > /state/qwen/settings.json <<'END'
{
  "modelProviders": {
    "openai": [
      {
        "id": "mlx-community/Qwen3-8B-4bit",
        "name": "mlx-community/Qwen3-8B-4bit",
        "envKey": "OPENAI_API_KEY",
        "baseUrl": "http://127.0.0.1:8000/v1",
        "generationConfig": {"contextWindowSize": 40960, "modalities": {"image": false}}
      }
    ]
  },
  "security": {"auth": {"selectedType": "openai"}},
  "model": {"name": "mlx-community/Qwen3-8B-4bit"}
}
END
)
export OPENAI_BASE_URL=http://127.0.0.1:8000/v1
export OPENAI_API_KEY='it'"'"'s a key'
export OPENAI_MODEL=mlx-community/Qwen3-8B-4bit
export QWEN_CODE_MAX_OUTPUT_TOKENS=10240
export QWEN_CODE_SYSTEM_SETTINGS_PATH=/state/qwen/settings.json
qwen --auth-type openai -m mlx-community/Qwen3-8B-4bit
