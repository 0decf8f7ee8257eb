"""Checkpoints that answer everything by rote: a thought of given length, then a tool call. Their KV and state are real.

Every token has one successor: layers add nothing to what is embedded, and the head knows each token's embedding as its
successor's row. So no token may occur twice in the reply.
"""

import json
from pathlib import Path

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer

from .checkpoints import checkpoint

CALL = '{"name": "edit", "arguments": {"text": "x", "path": "a.py"}}'  # one token: spaced as templates write it
_SILENT = ("o_proj.weight", "down_proj.weight", "out_proj.weight")
_HEAD_SCALE = 100.0


def rote_checkpoint(
    folder: Path, architecture: str, *, thought_tokens: int, opens_thought: bool = True, calls: bool = True
) -> Path:
    """`opens_thought`: the reply does, not the prompt. Prompts must end with a line break. Unless it `calls`, it talks.

    The call is one added token, which no grammar takes for text: serve the checkpoint with `tool_grammar="off"`.
    """
    source = checkpoint(architecture)
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(CALL, special=False, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    end = "<end_of_turn>" if architecture.startswith("gemma") else "<|im_end|>"
    words = [text for text, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]) if _is_word(text)]
    chain = ["Ċ", *["<think>"] * opens_thought, *words[:thought_tokens], "</think>"]
    chain += ["<tool_call>", CALL, "</tool_call>", end] if calls else [*words[thought_tokens:][:9], end]
    ids = [tokenizer.token_to_id(text) for text in chain]
    assert len(words) >= thought_tokens and None not in ids and len(set(ids)) == len(ids)
    _teach(folder / "model.safetensors", ids)
    template = (folder / "chat_template.jinja").read_text()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    return folder


def _is_word(text: str) -> bool:
    return text.removeprefix("Ġ").isascii() and text.removeprefix("Ġ").isalpha()


def _teach(weights_file: Path, ids: list[int]) -> None:
    weights = mx.load(str(weights_file))
    for name in weights:
        if name.endswith(_SILENT):
            weights[name] = mx.zeros_like(weights[name])
    [embedding] = [array for name, array in weights.items() if name.endswith("embed_tokens.weight")]
    [head] = [name for name in weights if name.endswith("lm_head.weight")]
    rows = mx.zeros_like(weights[head])
    before, after = mx.array(ids[:-1]), mx.array(ids[1:])
    known = embedding[before]
    rows[after] = _HEAD_SCALE * known / mx.linalg.norm(known, axis=-1, keepdims=True)
    weights[head] = rows
    mx.eval(weights)
    mx.save_safetensors(str(weights_file), weights, metadata={"format": "mlx"})
