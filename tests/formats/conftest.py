"""The tokenizers that these tests share."""

from tests.support.tokenizers import any_tokenizer, llama, llama_folder, qwen, qwen_folder

__all__ = ["any_tokenizer", "llama", "llama_folder", "qwen", "qwen_folder"]
