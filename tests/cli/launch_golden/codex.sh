# Codex
export LOCAL_KEY='it'"'"'s a key'
codex -c 'model="mlx-community/Qwen3-8B-4bit"' -c 'model_provider="vllm-mlx"' -c model_context_window=40960 -c model_auto_compact_token_limit=30720 -c 'web_search="disabled"' -c 'model_providers.vllm-mlx.name="vllm-mlx"' -c 'model_providers.vllm-mlx.base_url="http://127.0.0.1:8000/v1"' -c 'model_providers.vllm-mlx.env_key="LOCAL_KEY"' -c 'model_providers.vllm-mlx.wire_api="responses"' -c model_providers.vllm-mlx.stream_idle_timeout_ms=300000
