"""The ids of a text are those of the checkpoint's tokenizer.json, whatever class its tokenizer declares."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from tests.support.tokenizers import byte_level_backend, save, sentencepiece_backend
from vllm_mlx.formats.tokenizer import Tokenizer
from vllm_mlx.media.renderers import load_library_processor

# Transformers builds each of these from a vocabulary by its own code.
CLASSES = ("GPT2Tokenizer", "Qwen2Tokenizer", "LlamaTokenizer", "GemmaTokenizer", "CohereTokenizer", "BertTokenizer",
           "GPTNeoXTokenizer", "PreTrainedTokenizerFast")  # fmt: skip
TEXTS = ("in 1995: 12 + 30", "The  quick fox", "été ÉTÉ", "a\n\nb", " hello", "don't 3.14", "ﬁne 東京", "<|Mark|> x")


def split_digits() -> Backend:
    backend = byte_level_backend()
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return backend


def in_lower_case() -> Backend:
    backend = byte_level_backend()
    words = pre_tokenizers.Split(Regex(r"\d{1,3}|\s+|[^\s\d]+"), "isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_])
    backend.add_tokens([AddedToken("<|mark|>", special=False, normalized=True)])
    return backend


def without_merges_of_tokens() -> Backend:
    backend = byte_level_backend()
    model = json.loads(backend.to_str())
    model["model"] |= {"ignore_merges": True, "merges": model["model"]["merges"][:20]}
    return Backend.from_str(json.dumps(model))


@pytest.mark.parametrize("declared", CLASSES)
@pytest.mark.parametrize("made", [split_digits, in_lower_case, without_merges_of_tokens, sentencepiece_backend])
def test_ids_and_texts_are_those_of_the_file(tmp_path: Path, made: Callable[[], Backend], declared: str) -> None:
    folder = _declaring(declared, save(tmp_path, made(), eos="</s>" if made is sentencepiece_backend else "<|im_end|>"))
    tokenizer, exact = Tokenizer.load(folder), Backend.from_file(str(folder / "tokenizer.json"))
    for text in TEXTS:
        ids = exact.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        assert tokenizer.decode(ids) == exact.decode(ids, skip_special_tokens=False), text


def test_the_processor_of_images_gives_the_ids_of_the_file(checkpoint, tmp_path: Path) -> None:
    folder = _declaring("Qwen2Tokenizer", shutil.copytree(checkpoint("vision:qwen3_vl"), tmp_path / "model"))
    exact = Backend.from_file(str(folder / "tokenizer.json"))
    words = pre_tokenizers.Split(Regex(r"[^ ]+ "), "isolated")
    exact.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    exact.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    processor = load_library_processor(folder, config, trust_remote_code=False)
    text = "hello world, this is a test of the tokenizer. <1.5 seconds>"
    assert processor.tokenizer.encode(text, add_special_tokens=False) == exact.encode(text).ids


def _declaring(name: str, folder: Path) -> Path:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": name}))
    return folder
