"""`python -m scripts._replay.checkpoint TRACE DIR`: makes a tiny random checkpoint with the vocabulary of a trace.

Serving real checkpoints' prompts takes minutes without a GPU; what is cached of them does not depend on the weights.
"""

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from scripts._bench.checkpoint import is_word_token, load_weights
from tests.support.checkpoints import MARKER_TOKENS, SPECIAL_TOKENS, write_checkpoint

from .trace import Recorded, load

VOCAB_SIZE = 16384
ENDS = ("<|im_end|>", "<end_of_turn>")
_END_SCALE = 1.6
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": {"num_hidden_layers": 2},
    "qwen3_5": {"num_hidden_layers": 2, "full_attention_interval": 2},
    "gemma3_text": {"num_hidden_layers": 2, "sliding_window_pattern": 2, "sliding_window": 512},
}


def texts_of(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
        case dict():
            for name, item in value.items():
                yield name
                yield from texts_of(item)
        case list():
            for item in value:
                yield from texts_of(item)


def train(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS) - len(MARKER_TOKENS),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKER_TOKENS])
    return tokenizer


def write_plainly(weights_file: Path, tokenizer: Tokenizer, ends: tuple[str, ...]) -> None:
    """Make greedy replies words, and one token in ten or so one of the `ends`."""
    weights = load_weights(weights_file)
    [name] = [name for name in weights if name.endswith("lm_head.weight")]
    scales = [0.0] * weights[name].shape[0]
    for text, row in tokenizer.get_vocab().items():
        scales[row] = _END_SCALE if text in ends else float(is_word_token(text))
    weights[name] = weights[name] * mx.array(scales)[:, None]
    mx.save_safetensors(str(weights_file), weights, metadata={"format": "mlx"})


def write(folder: Path, trace: Iterable[Recorded], architecture: str) -> None:
    write_checkpoint(
        folder,
        architecture,
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        max_position_embeddings=1 << 18,
        **SHAPES[architecture],
    )
    tokenizer = train(list(dict.fromkeys(text for each in trace for text in texts_of(each.body))))
    tokenizer.save(str(folder / "tokenizer.json"))
    opens_thought = "<think>\\n' }}" in (folder / "chat_template.jinja").read_text()
    write_plainly(folder / "model.safetensors", tokenizer, ("</think>", *ENDS) if opens_thought else ENDS)
    end = tokenizer.token_to_id("<end_of_turn>" if architecture.startswith("gemma") else "<|im_end|>")
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**settings, "eos_token_id": [end]}, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, metavar="TRACE")
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--architecture", choices=SHAPES, default="qwen3")
    arguments = parser.parse_args()
    write(arguments.folder, load(arguments.trace), arguments.architecture)


if __name__ == "__main__":
    main()
