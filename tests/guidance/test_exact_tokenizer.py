"""Forced text is written with exactly its bytes, whatever the checkpoint's own tokenizer makes of such a text."""

import json
import random
from collections.abc import Callable

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import normalizers, pre_tokenizers
from tokenizers.normalizers import Normalizer
from transformers import PreTrainedTokenizerFast

from tests.support.tokenizers import byte_level_backend, sentencepiece_backend
from vllm_mlx.formats.tokenizer import AddedTokens, Tokenizer
from vllm_mlx.guidance.exact_tokenizer import ExactTokenizer
from vllm_mlx.guidance.grammar_compiler import GrammarCompiler
from vllm_mlx.guidance.grammars.lark import LarkWriter, literal

PARTS = (
    "e\u0301", "a\u030a\u0323", "\u212b", "\u1100\u1161\u11a8", "가", "ﬁ", "①", "ｆｕｌｌ", "ß", "İ", "ABC", "x",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467", "👍🏽", "\u200f", "שָׁלוֹם", "\u202e", "\u00a0", "\u3000", " ", "  ",
    "\t", "▁", "▁▁▁", "<tool_call>", "<|im_end|>", "</s>", "<0x41>", "the quick fox", "\U0010ffff", "\ufffd",
)  # fmt: skip
PLAIN = ("hello world, and def main(): return 1 + 2", "été 東京 🙂", "fox says", "{}\n[]")


def normalized(normalizer: Normalizer) -> Backend:
    backend = byte_level_backend()
    backend.normalizer = normalizer
    return backend


def spaced() -> Backend:
    """As GPT-2's relatives: a space before the first word."""
    backend = byte_level_backend()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(add_prefix_space=True)]
    )
    return backend


def gemma() -> Backend:
    backend = sentencepiece_backend()
    backend.normalizer = normalizers.Replace(" ", "▁")
    return backend


def metaspace() -> Backend:
    """As newer conversions of sentencepiece models: no normalizer, the space is the pre-tokenizer's."""
    backend = sentencepiece_backend()
    backend.normalizer = normalizers.Sequence([])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return backend


KINDS: dict[str, Callable[[], Backend]] = {
    "bytes": byte_level_backend,
    "nfc": lambda: normalized(normalizers.NFC()),
    "nfkc": lambda: normalized(normalizers.NFKC()),
    "lowercase": lambda: normalized(
        normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase(), normalizers.StripAccents()])
    ),
    "stripped": lambda: normalized(normalizers.Sequence([normalizers.Strip(), normalizers.Replace("fox", "dog")])),
    "spaced": spaced,
    "llama-2": sentencepiece_backend,
    "gemma": gemma,
    "metaspace": metaspace,
}
SAME = ("bytes", "nfc", "nfkc", "gemma")  # their own tokens of ordinary text have exactly its bytes


def tokenizer_of(kind: str) -> Tokenizer:
    eos = "</s>" if kind in ("llama-2", "gemma", "metaspace") else "<|im_end|>"
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=KINDS[kind](), eos_token=eos))


def draw_texts(num: int) -> list[str]:
    draw = random.Random(0)
    return ["".join(draw.choices(PARTS, k=draw.randint(1, 5))) for _ in range(num)]


class Model:
    """Writes any token that a grammar allows."""

    def __init__(self, kind: str):
        self.tokenizer = tokenizer_of(kind)
        self._compiler = GrammarCompiler(self.tokenizer, self.tokenizer.vocab_size + 40)

    def reply(self, lark: str) -> bytes:
        matcher = self._compiler.compile_own(json.dumps({"grammars": [{"lark_grammar": lark}]}), "").deep_copy()
        draw = random.Random(1)
        written = b""
        for _ in range(400):
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
            assert not matcher.is_error(), (matcher.get_error(), written)
            token_id = int(draw.choice(np.flatnonzero(bits)))
            if token_id in self.tokenizer.eos_token_ids:
                return written
            assert self.tokenizer.added_token(token_id) is None
            written += self.tokenizer.token_bytes(token_id)
            matcher.consume_token(token_id)
        raise AssertionError(f"the reply does not end: {written!r}")


@pytest.mark.parametrize("kind", KINDS)
def test_forced_text_has_exactly_its_bytes(kind: str) -> None:
    model = Model(kind)
    for text in (*PARTS, *draw_texts(20)):
        assert model.reply(f"start: {literal(text)}") == text.encode()


@pytest.mark.parametrize("kind", KINDS)
def test_names_and_values_of_a_schema_come_back_as_they_were_declared(kind: str) -> None:
    model = Model(kind)
    for text in (*PARTS, *draw_texts(10)):
        schema = {
            "type": "object",
            "properties": {text: {"enum": [text]}},
            "required": [text],
            "additionalProperties": False,
        }
        writer = LarkWriter(AddedTokens({}))
        written = model.reply(writer.build(writer.json(schema)))
        assert json.loads(written) == {text: text}


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_any_text_have_its_bytes(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    exact = ExactTokenizer(tokenizer, tokenizer.vocab_size)
    for text in (*PARTS, *PLAIN, *draw_texts(200)):
        ids = exact.encode(text)
        assert ids is not None and not any(map(tokenizer.added_token, ids))
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


@pytest.mark.parametrize("kind", SAME)
def test_ordinary_text_keeps_the_tokens_that_the_model_knows(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    exact = ExactTokenizer(tokenizer, tokenizer.vocab_size)
    for text in PLAIN:
        assert exact.encode(text) == tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("kind", ["spaced", "llama-2", "metaspace"])
def test_no_space_is_put_before_the_first_word(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    exact = ExactTokenizer(tokenizer, tokenizer.vocab_size)
    ids = exact.encode(" The fox says hello")
    assert ids == tokenizer.encode("The fox says hello", add_special_tokens=False), "words keep their own tokens"
    assert exact.encode("fox") is not None
    assert tokenizer.decode(exact.encode("x fox") or [])[-5:] == "x fox"


def test_a_text_that_the_vocabulary_cannot_spell_has_no_tokens() -> None:
    description = json.loads(byte_level_backend().to_str())
    vocabulary = description["model"]["vocab"]
    lost = vocabulary.pop("Ľ")  # the byte 0x9b, as byte-level vocabularies write it
    vocabulary["unused"] = lost
    tokenizer = Tokenizer(
        PreTrainedTokenizerFast(tokenizer_object=Backend.from_str(json.dumps(description)), eos_token="<|im_end|>")
    )
    exact = ExactTokenizer(tokenizer, tokenizer.vocab_size)
    assert exact.encode("a\u009bb") is None and exact.encode("ab") is not None
