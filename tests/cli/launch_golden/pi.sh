# pi
(
umask 077
mkdir -p /state/pi
cat > /state/pi/provider.ts <<'END'
export default (pi) => pi.registerProvider("vllm-mlx", {"baseUrl": "http://127.0.0.1:8000/v1", "api": "openai-completions", "models": [{"id": "mlx-community/Qwen3-8B-4bit", "name": "mlx-community/Qwen3-8B-4bit", "reasoning": true, "input": ["text"], "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0}, "contextWindow": 40960, "maxTokens": 10240}], "apiKey": "PI_LOCAL_KEY"});
END
)
export PI_LOCAL_KEY='it'"'"'s a key'
export PI_OFFLINE=1
pi --extension /state/pi/provider.ts --provider vllm-mlx --model mlx-community/Qwen3-8B-4bit
