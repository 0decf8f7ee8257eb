# Roo Code
(
umask 077
mkdir -p /state/roo
cat > /state/roo/roo-code-settings.json <<'END'
{
  "providerProfiles": {
    "currentApiConfigName": "vllm-mlx",
    "apiConfigs": {
      "vllm-mlx": {
        "id": "vllm-mlx",
        "apiProvider": "openai",
        "openAiBaseUrl": "http://127.0.0.1:8000/v1",
        "openAiApiKey": "it's a key",
        "openAiModelId": "mlx-community/Qwen3-8B-4bit",
        "openAiCustomModelInfo": {
          "contextWindow": 40960,
          "maxTokens": 10240,
          "supportsImages": false,
          "supportsPromptCache": false
        }
      }
    }
  }
}
END
)
# In Roo Code, choose Settings, About Roo Code, Import, and that file.
