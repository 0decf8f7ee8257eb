# Cline
# While `cline auth` runs, others on this machine can see the key in the list of processes: it takes a key as an argument only. Where that matters, run `cline auth` without arguments and type the key.
cline auth -p openai -k 'it'"'"'s a key' -m mlx-community/Qwen3-8B-4bit -b http://127.0.0.1:8000/v1 --data-dir /state/cline
cline --data-dir /state/cline
