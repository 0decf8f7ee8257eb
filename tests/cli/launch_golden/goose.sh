# goose
export GOOSE_PROVIDER=openai
export GOOSE_MODEL=mlx-community/Qwen3-8B-4bit
export OPENAI_HOST=http://127.0.0.1:8000
export GOOSE_CONTEXT_LIMIT=40960
export OPENAI_API_KEY='it'"'"'s a key'
goose session
