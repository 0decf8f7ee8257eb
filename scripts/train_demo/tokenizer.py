"""The demo tokenizer: byte-level BPE over our own text, cut so that a copied word is the same token everywhere."""

import json
import random
import re
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX

from . import words
from .chat import NO_THOUGHT, WITH_THOUGHT, segments
from .errands import by_echo
from .mixture import KINDS
from .model import MAX_POSITIONS, VOCAB_SIZE, TokenIds

SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
# Letters, digits, blanks and marks never share a token: ` Paris`, `=Paris` and `"Paris` all hold the token `Paris`.
PIECES = r"</?(?:parameter|function)[=>]|\p{L}+|\p{N}|[\r\n]+|[^\S\r\n]+|[^\s\p{L}\p{N}]"
CALL_PIECES = ("<function=", "</function>", "<parameter=", "</parameter>")
BYTE_OF = {symbol: byte for byte, symbol in bytes_to_unicode().items()}
TEMPLATE = Path(__file__).with_name("chat_template.jinja")
NUM_CONVERSATIONS = 9_000


def corpus(seed: int) -> list[str]:
    """Return rendered conversations without the markers, and every known word often enough to become one token."""
    rng = random.Random(seed)
    kinds = ("text", "tools", "agent", "recall", "image")
    markers = re.compile("|".join(map(re.escape, SPECIAL + MARKERS)))
    texts = []
    for i in range(NUM_CONVERSATIONS):
        conversation = by_echo(KINDS[kinds[i % len(kinds)]](rng))
        thoughts = WITH_THOUGHT if i % 2 else NO_THOUGHT
        texts.append(markers.sub(" ", "".join(s.text for s in segments(conversation, thoughts))))
    known = words.WORDS + words.COMMON + words.NAMES + words.CITIES + words.FOLDERS + words.STEMS + words.EXTENSIONS
    capitals = [w.capitalize() for w in words.COMMON + words.WORK]
    return texts + known * 60 + capitals * 15


def train(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    cut = pre_tokenizers.Split(Regex(PIECES), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL) - len(MARKERS),
        min_frequency=8,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIAL])
    tokenizer.add_tokens([AddedToken(s, special=False, normalized=False) for s in MARKERS])
    return tokenizer


def build(seed: int) -> PreTrainedTokenizerFast:
    """Return a new tokenizer with the chat template on it."""
    return wrapped(train(corpus(seed)))


def wrapped(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    result = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    result.chat_template = TEMPLATE.read_text()
    return result


def portable(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Return the same tokens and ids under Qwen's own cut, which transformers imposes on this architecture.

    That cut is coarser, so what kept our tokens apart must sit elsewhere: merges across kinds of characters go, and the
    four strings of a call become added tokens. Only words after an apostrophe (`'test`) may fall apart differently.
    """
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["model"]["merges"] = [pair for pair in state["model"]["merges"] if one_kind("".join(pair))]
    result = Tokenizer.from_str(json.dumps(state))
    result.normalizer = normalizers.NFC()
    cut = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    result.pre_tokenizer = pre_tokenizers.Sequence([cut, as_bytes])
    result.add_tokens([AddedToken(s, special=False, normalized=False) for s in CALL_PIECES])
    return wrapped(result)


def one_kind(merged: str) -> bool:
    """Is this merge of byte symbols all letters or all line breaks?"""
    text = bytes(BYTE_OF[c] for c in merged).decode("utf-8", "replace")
    return text.isalpha() or not text.strip("\r\n") or "\ufffd" in text


def token_ids(tokenizer: PreTrainedTokenizerFast) -> TokenIds:
    find = tokenizer.convert_tokens_to_ids
    return TokenIds(
        image=find("<|image_pad|>"),
        video=find("<|video_pad|>"),
        vision_start=find("<|vision_start|>"),
        vision_end=find("<|vision_end|>"),
        turn_end=find("<|im_end|>"),
        text_end=find("<|endoftext|>"),
    )
