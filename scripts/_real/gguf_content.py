"""The content of a GGUF file: values of its header, weights under the names and in the order of Hugging Face, and a
tokenizer made of its vocabulary.
"""

import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from .sources import unpack

Weights = Iterator[tuple[str, mx.array]]
_FIXED = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_SHARED = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm",
}  # fmt: skip
_LLAMA = _SHARED | {"ffn_norm": "post_attention_layernorm"}
_GEMMA = _SHARED | {
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
GROUP_SIZE = 32  # values that share a scale in the GGUF types which MLX holds as they are


@dataclass(frozen=True, slots=True)
class Header:
    values: Mapping[str, Any]

    @property
    def is_llama(self) -> bool:
        return bool(self["general.architecture"] == "llama")

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def own(self, name: str, default: Any = None) -> Any:
        """Return a value of the architecture."""
        return self.values.get(f"{self['general.architecture']}.{name}", default)


def read_llama(file: Path) -> tuple[Header, dict[str, mx.array]]:
    """Read the header, and the packed weights as MLX has them: Q4_1 and Q8_0 are its own 4 and 8 bits, without loss."""
    loaded: Any = mx.load(str(file), return_metadata=True)
    tensors, values = loaded
    header = Header({name: value.tolist() if isinstance(value, mx.array) else value for name, value in values.items()})
    return header, tensors


def packed_weights(header: Header, tensors: Mapping[str, mx.array]) -> Weights:
    for name, array in tensors.items():
        base, _, suffix = name.rpartition(".")
        ordered = _rows_in_order(header, base, array)
        half = array.astype(mx.float16) if array.dtype == mx.float32 else ordered
        yield _renamed(f"{base}.weight", _LLAMA).removesuffix("weight") + suffix, half


def llama_weights(header: Header, tensors: Mapping[str, mx.array]) -> Weights:
    """Yield the weights in float32."""
    for name in (name for name in tensors if name.endswith(".weight")):
        base = name.removesuffix(".weight")
        array = tensors[name]
        if (scales := tensors.get(f"{base}.scales")) is not None:
            exact, biases = (part.astype(mx.float32) for part in (scales, tensors[f"{base}.biases"]))
            bits = array.shape[-1] * 32 // (scales.shape[-1] * GROUP_SIZE)
            array = mx.dequantize(array, exact, biases, group_size=GROUP_SIZE, bits=bits)
        yield _renamed(name, _LLAMA), _rows_in_order(header, base, array.astype(mx.float32))


def read_gemma(file: Path, lock: Path) -> tuple[Header, Weights]:
    """Read the header, and the weights in float32. MLX does not know their types: `lock` names a package that does."""
    packages = file.with_name("packages")
    if not packages.is_dir():
        with tempfile.TemporaryDirectory(dir=packages.parent) as unpacked:
            unpack(lock, Path(unpacked))
            shutil.copytree(unpacked, packages.with_suffix(".new"), dirs_exist_ok=True)
            packages.with_suffix(".new").rename(packages)
    sys.path.append(str(packages))
    from gguf import GGUFReader  # type: ignore[import-not-found]
    from gguf.quants import dequantize  # type: ignore[import-not-found]

    reader = GGUFReader(file)

    def weights() -> Weights:
        for tensor in reader.tensors:
            array = mx.array(dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape[::-1].tolist()))
            # Gemma's norms multiply by 1 + weight, and the file holds the sum.
            yield _renamed(tensor.name, _GEMMA), array - 1 if tensor.name.endswith("norm.weight") else array

    return Header({name: field.contents() for name, field in reader.fields.items()}), weights()


def _renamed(name: str, names: Mapping[str, str]) -> str:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`."""
    if name in _FIXED:
        return _FIXED[name]
    _, layer, part, suffix = name.split(".")
    return f"model.layers.{layer}.{names[part]}.{suffix}"


def _rows_in_order(header: Header, base: str, array: mx.array) -> mx.array:
    """Undo the order of rows that llama.cpp gives to q and k, for a rotation of neighbours: ours is one of halves."""
    names = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
    name = names.get(base.rpartition(".")[2])
    if name is None:
        return array
    num_heads, num_rows = header.own(name), array.shape[0]
    return array.reshape(num_heads, num_rows // num_heads // 2, 2, -1).swapaxes(1, 2).reshape(array.shape)


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
