# Cline
cline auth -p openai -k 'it'"'"'s a key' -m mlx-community/Qwen3-8B-4bit -b http://127.0.0.1:8000/v1 --data-dir /state/cline
cline --data-dir /state/cline
