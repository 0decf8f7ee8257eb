# VS Code
(
umask 077
mkdir -p /state/vscode
cat > /state/vscode/chatLanguageModels.json <<'END'
[
  {
    "name": "vllm-mlx",
    "vendor": "customendpoint",
    "apiKey": "it's a key",
    "apiType": "chat-completions",
    "models": [
      {
        "id": "mlx-community/Qwen3-8B-4bit",
        "name": "mlx-community/Qwen3-8B-4bit",
        "url": "http://127.0.0.1:8000/v1/chat/completions",
        "toolCalling": true,
        "vision": false,
        "maxInputTokens": 30720,
        "maxOutputTokens": 10240
      }
    ]
  }
]
END
)
# Merge that file into chatLanguageModels.json in the user's folder of VS Code, on a Mac ~/Library/Application Support/Code/User. Then choose the model in the model picker of the chat.
