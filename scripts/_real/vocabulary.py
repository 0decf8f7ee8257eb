"""The tokenizers of the real checkpoints, made of the vocabularies in their GGUF files."""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from .gguf_content import Header

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4


def write_tokenizer(header: Header, folder: Path) -> None:
    tokens, kinds = _tokens(header), header["tokenizer.ggml.token_type"]
    made = _byte_level(header) if header.is_llama else _sentencepiece(tokens, kinds)
    added = [(text, kind) for text, kind in zip(tokens, kinds, strict=True) if kind in (_CONTROL, _USER_DEFINED)]
    made.add_tokens([_added(text, kind) for text, kind in added])
    made.save(str(folder / "tokenizer.json"))


def tokenizer_config(header: Header) -> dict[str, Any]:
    """Return the values of tokenizer_config.json. The original checkpoints declare the same `tokenizer_class`."""
    tokens, names = _tokens(header), {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    return {
        **{f"{name}_token": tokens[header[f"tokenizer.ggml.{key}_token_id"]] for name, key in names.items()},
        "add_bos_token": header["tokenizer.ggml.add_bos_token"],
        "model_max_length": header.own("context_length"),
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "GPT2Tokenizer" if header.is_llama else "GemmaTokenizer",
    }


def _tokens(header: Header) -> list[str]:
    """Return the vocabulary. A run of spaces is written with `▁`, as other tokens of Gemma are."""
    tokens: list[str] = header["tokenizer.ggml.tokens"]
    return tokens if header.is_llama else [text if text.strip(" ") else "▁" * len(text) for text in tokens]


def _added(text: str, kind: int) -> AddedToken:
    is_special = kind == _CONTROL and not text.startswith("<unused")
    return AddedToken(text, special=is_special, normalized=False)


def _byte_level(header: Header) -> Tokenizer:
    """Make SmolLM2's: byte-level BPE, with digits one by one."""
    vocab = {text: number for number, text in enumerate(_tokens(header))}
    merges = [tuple(merge.split(" ")) for merge in header["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    made.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    made.decoder = decoders.ByteLevel()
    return made


def _sentencepiece(tokens: list[str], kinds: list[int]) -> Tokenizer:
    """Make Gemma's: BPE over characters, with bytes for the rest.

    The file has no merges: a piece is made of any two pieces that make it up, and pieces come in the order of their
    ids.
    """
    vocab = {text: number for number, text in enumerate(tokens)}
    merges = []
    for text, kind in zip(tokens, kinds, strict=True):
        if kind == _NORMAL or (kind == _USER_DEFINED and len(set(text)) == 1):
            halves = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
            merges += [half for half in halves if half[0] in vocab and half[1] in vocab]
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", vocab["<bos>"])]
    )
    return made
