# Zed
(
umask 077
mkdir -p /state/zed
cat > /state/zed/settings.json <<'END'
{
  "language_models": {
    "openai_compatible": {
      "vllm-mlx": {
        "api_url": "http://127.0.0.1:8000/v1",
        "available_models": [
          {
            "name": "mlx-community/Qwen3-8B-4bit",
            "display_name": "mlx-community/Qwen3-8B-4bit",
            "max_tokens": 40960,
            "max_output_tokens": 10240,
            "capabilities": {
              "tools": true,
              "images": false,
              "parallel_tool_calls": true,
              "prompt_cache_key": false
            }
          }
        ]
      }
    }
  },
  "agent": {"default_model": {"provider": "vllm-mlx", "model": "mlx-community/Qwen3-8B-4bit"}}
}
END
)
# Merge that file into ~/.config/zed/settings.json. Zed reads no key from it: start it with `VLLM_MLX_API_KEY=KEY zed`, or type the key under Agent Settings.
