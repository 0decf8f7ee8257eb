# Kilo Code
export KILO_CONFIG_CONTENT='{"model": "vllm-mlx/mlx-community/Qwen3-8B-4bit", "small_model": "vllm-mlx/mlx-community/Qwen3-8B-4bit", "provider": {"vllm-mlx": {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": "http://127.0.0.1:8000/v1", "apiKey": "it'"'"'s a key"}, "models": {"mlx-community/Qwen3-8B-4bit": {"limit": {"context": 40960, "output": 10240}, "attachment": false, "modalities": {"input": ["text"], "output": ["text"]}, "reasoning": true, "tool_call": true}}}}}'
export KILO_DISABLE_MODELS_FETCH=1
kilo
