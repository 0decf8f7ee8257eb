"""Small tokenizers of the two common kinds, saved and loaded as checkpoints are."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from vllm_mlx.formats.tokenizer import Tokenizer

TEMPLATES = Path(__file__).parents[1] / "templates"
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
CORPUS = ["The quick brown fox says hello world, and def main(): return 1 + 2\n", "été 東京 🙂 ñ user assistant "] * 4


def byte_level_backend() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    )
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROL])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKERS])
    return backend


def sentencepiece_backend() -> Backend:
    """As Llama 2's: `▁` for a space, a leading one added, and a token for every byte."""
    words = ["▁The", "▁quick", "▁fox", "▁hello", "▁", "ing", "e", "h", "l", "o", "a", "b", ",", "\n", "x", "é"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    letters = sorted({char for word in words for char in word} - set(pieces))
    vocab = {piece: index for index, piece in enumerate([*pieces, *letters, "▁T", "▁Th", "▁f", "▁fo", "▁h", "▁he"])}
    merges = [("▁", "T"), ("▁T", "h"), ("▁Th", "e"), ("▁", "f"), ("▁f", "o"), ("▁fo", "x")]
    backend = Backend(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    backend.add_tokens([AddedToken("▁▁▁", special=False, normalized=False)])
    return backend


def save(folder: Path, backend: Backend, *, eos: str, template: str | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture(scope="session")
def qwen_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    template = (TEMPLATES / "qwen3.jinja").read_text()
    return save(tmp_path_factory.mktemp("qwen"), byte_level_backend(), eos="<|im_end|>", template=template)


@pytest.fixture(scope="session")
def qwen(qwen_folder: Path) -> Tokenizer:
    return Tokenizer.load(qwen_folder)


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("llama"), sentencepiece_backend(), eos="</s>")


@pytest.fixture(scope="session")
def llama(llama_folder: Path) -> Tokenizer:
    return Tokenizer.load(llama_folder)


@pytest.fixture(params=["qwen", "llama"])
def any_tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    tokenizer: Tokenizer = request.getfixturevalue(request.param)
    return tokenizer
