# aider
(
umask 077
mkdir -p /state/aider
cat > /state/aider/models.json <<'END'
{
  "openai/mlx-community/Qwen3-8B-4bit": {
    "litellm_provider": "openai",
    "mode": "chat",
    "max_input_tokens": 30720,
    "max_output_tokens": 10240,
    "max_tokens": 10240,
    "input_cost_per_token": 0,
    "output_cost_per_token": 0,
    "supports_vision": false
  }
}
END
)
export OPENAI_API_BASE=http://127.0.0.1:8000/v1
export OPENAI_API_KEY='it'"'"'s a key'
export LITELLM_LOCAL_MODEL_COST_MAP=True
aider --model openai/mlx-community/Qwen3-8B-4bit --weak-model openai/mlx-community/Qwen3-8B-4bit --editor-model openai/mlx-community/Qwen3-8B-4bit --model-metadata-file /state/aider/models.json
