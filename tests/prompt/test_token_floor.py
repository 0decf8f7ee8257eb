"""The floor of a text's tokens: never above what its tokenizer makes of it, and near enough to refuse long texts."""

import random
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from tests.support.checkpoints import train_tokenizer
from vllm_mlx.core.config import EngineConfig
from vllm_mlx.core.errors import ContextLengthExceeded
from vllm_mlx.core.messages import Message, TextPart
from vllm_mlx.core.request import Request
from vllm_mlx.formats.tokenizer import Tokenizer
from vllm_mlx.prompt.context_window import TokenFloor
from vllm_mlx.prompt.processor import RequestProcessor
from vllm_mlx.prompt.reply_formats import reply_formats

DEMO = Path(__file__).parents[2] / "vllm_mlx" / "demo"
BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)}
WORDS = ["▁", "▁▁", "▁▁▁▁", "a", "b", "ab", "▁ab", "abab", "é"]
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def wrapped(backend: Backend) -> Tokenizer:
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=TEMPLATE))


def with_byte_fallback() -> Backend:
    """As Gemma and Llama 2 have it: spaces are written as ▁, unknown characters as bytes."""
    vocabulary = BYTES | {word: 256 + number for number, word in enumerate(WORDS)}
    merges = [("▁", "▁"), ("▁▁", "▁▁"), ("a", "b"), ("▁", "ab"), ("ab", "ab")]
    backend = Backend(models.BPE(vocabulary, merges, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def byte_level() -> Backend:
    return Backend.from_str(train_tokenizer().to_str())


def stripping() -> Backend:
    """Its added tokens take the white space around them along, as Phi's do."""
    backend = byte_level()
    backend.add_special_tokens([AddedToken("<|cut|>", lstrip=True, rstrip=True)])
    return backend


def composing() -> Backend:
    backend = byte_level()
    backend.normalizer = normalizers.NFC()
    return backend


def dropping() -> Backend:
    backend = byte_level()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return backend


def collapsing() -> Backend:
    backend = byte_level()
    backend.normalizer = normalizers.Replace("    ", " ")
    return backend


def without_all_bytes() -> Backend:
    return Backend(models.BPE({"a": 0, "<unk>": 1}, [], unk_token="<unk>", fuse_unk=True))


KINDS: dict[str, Callable[[], Backend]] = {
    kind.__name__: kind
    for kind in (with_byte_fallback, byte_level, stripping, composing, dropping, collapsing, without_all_bytes)
}
UNKNOWN = ("dropping", "collapsing", "without_all_bytes")
TOKENIZERS = {name: wrapped(kind()) for name, kind in KINDS.items()}
TOKENIZERS["demo"] = Tokenizer.load(DEMO)
FLOORS = {name: TokenFloor(tokenizer) for name, tokenizer in TOKENIZERS.items()}

PIECES = st.sampled_from(
    (
        *(" ", "    ", "ab", "\n", "=" * 9, "e\u0301", "\u1100\u1161\u11a8", "\u2126\u0314\u0342\u0345", "日本"),
        *("<|cut|>", "<|im_end|>", "\u3000", "the ", "<0x41>", "▁", "Ġ", "🙂"),
    )
)
TEXTS = st.lists(PIECES | st.text(max_size=4), max_size=40).map("".join)


@settings(max_examples=60)
@given(text=TEXTS, times=st.integers(1, 300))
@pytest.mark.parametrize("name", TOKENIZERS)
def test_no_text_has_fewer_tokens_than_its_floor(name: str, text: str, times: int) -> None:
    num_tokens = len(TOKENIZERS[name].encode(text * times, add_special_tokens=False))
    assert FLOORS[name].least_tokens(text * times) <= num_tokens


@pytest.mark.parametrize("name", [name for name in TOKENIZERS if name not in UNKNOWN])
@pytest.mark.parametrize("word", ["word ", "日本語", "\n", "x = 1;\n"])
def test_a_long_text_has_a_floor_that_grows_with_it(name: str, word: str) -> None:
    floor = FLOORS[name]
    text = word * 50_000
    if name == "stripping" and not text.strip():
        return
    assert floor.least_tokens(text) > 1000
    assert floor.least_tokens(text * 2) >= 1.9 * floor.least_tokens(text)


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_tokenizer_that_drops_text_has_no_floor(name: str) -> None:
    assert FLOORS[name].least_tokens("ab " * 100_000) == 0


def test_composing_characters_across_a_cut_saves_less_than_is_allowed_for() -> None:
    dice = random.Random(3)
    marks = [chr(code) for code in range(0x300, 0x370)]
    for _ in range(2000):
        text = "".join(dice.choice(["a", "ω", "Å", "ᄀ", "ᅡ", "ᆨ", *dice.sample(marks, 3)]) for _ in range(12))
        cut = dice.randrange(12)
        apart = sum(len(unicodedata.normalize("NFC", part).encode()) for part in (text[:cut], text[cut:]))
        assert apart - len(unicodedata.normalize("NFC", text).encode()) <= 16


@pytest.mark.parametrize("is_chat", [False, True])
def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(
    monkeypatch: pytest.MonkeyPatch, is_chat: bool
) -> None:
    def tokenised(*args: object, **kwargs: object) -> None:
        raise AssertionError("it was tokenised")

    tokenizer = wrapped(byte_level())
    config = EngineConfig(model="m")
    formats = reply_formats(config, tokenizer)
    processor = RequestProcessor(
        tokenizer, config, Path("/nowhere"), formats=formats, max_model_len=1000, vocab_size=400
    )
    text = "word " * 1_000_000
    fits = "word " * 300
    request = Request(request_id="r", messages=(Message("user", (TextPart(text),)),))
    processor.prepare(Request(request_id="r", prompt=fits))
    monkeypatch.setattr(Tokenizer, "encode", tokenised)
    monkeypatch.setattr(Tokenizer, "encoding", tokenised)
    with pytest.raises(ContextLengthExceeded, match="at least") as raised:
        processor.prepare(request if is_chat else Request(request_id="r", prompt=text))
    assert raised.value.num_prompt_tokens > 32_768 and raised.value.is_least
