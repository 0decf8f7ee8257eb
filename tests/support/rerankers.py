"""Tiny causal rerankers, and their scores without any of our code."""

import json
import shutil
from collections.abc import Sequence as Ids
from pathlib import Path

import mlx.core as mx
from tokenizers import Tokenizer

from .checkpoints import checkpoint
from .engine_driver import plain_loop

JUDGE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
ANSWER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
SEARCH = "Given a web search query, retrieve relevant passages that answer the query"


def reranker(folder: Path, architecture: str = "qwen3") -> Path:
    """A checkpoint whose tokenizer has tokens of the two answers, as Qwen's tokenizers do."""
    shutil.copytree(checkpoint(architecture), folder)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    last = max([*vocab.values(), *(token["id"] for token in tokenizer["added_tokens"])])
    for pair in (["y", "e"], ["ye", "s"], ["n", "o"]):
        if (word := "".join(pair)) not in vocab:
            last += 1
            vocab[word] = last
            merges.append(pair)
    file.write_text(json.dumps(tokenizer))
    return folder


def reference_ids(folder: Path, query: str, document: str, instruction: str = SEARCH) -> list[int]:
    """The prompt as the model card makes it: the pair is tokenized alone, between the ids of its frame."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    pair = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    return [each for text in (JUDGE, pair, ANSWER) for each in tokenizer.encode(text, add_special_tokens=False).ids]


def reference_score(folder: Path, token_ids: Ids[int], yes: int, no: int) -> float:
    """Of a forward pass of the complete prompt."""
    _, (logits,) = plain_loop(folder, token_ids, 1)
    score: float = mx.softmax(logits[mx.array([yes, no])].astype(mx.float32))[0].item()
    return score
