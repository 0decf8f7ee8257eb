"""Greedy replies beside torch's: cold, from the cache, beside each other, after `kill -9` in a stream; drawn shares."""

import json
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from .checkpoints import checkpoint
from .judging import Found, judge, largest_deviation
from .sources import Source
from .talking import Server, serving

_GOLDEN = Path(__file__).with_name("golden.json")
_NUM_TOKENS = 48
_NUM_SAMPLES, _AT_ONCE = 1024, 32


@dataclass(frozen=True, slots=True)
class Bounds:
    """What rounding may change: a second best token this near may be taken, and a log probability may be so far off."""

    near: float
    off: float


_BOUNDS = {"float32": Bounds(0.05, 0.02), "bfloat16": Bounds(1.0, 1.0), "4bit": Bounds(1.0, 1.0)}


def check(source: Source, form: str) -> tuple[bool, list[str]]:
    folder, bounds = checkpoint(source, form), _BOUNDS[form]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    entries = golden(source)
    with tempfile.TemporaryDirectory() as kept:
        arguments = ("--cache-dir", kept, "--cache-disk", "2GB")
        with serving(folder, *arguments) as server:
            found = {"cold": [_reply(server, entry) for entry in entries]}
            found["cached"] = [_reply(server, entry) for entry in entries]
            with ThreadPoolExecutor(4) as pool:
                found["beside others"] = list(pool.map(lambda entry: _reply(server, entry), entries))
            off, is_chance = _draw(server, entries[0], tokenizer) if form == "float32" else (0.0, True)
            server.begin_stream({"prompt": entries[1]["prompt"]})
        with serving(folder, *arguments) as server:
            found["after kill -9"] = [_reply(server, entry) for entry in entries]
    lines, is_right = [], is_chance
    for way, replies in found.items():
        verdicts = [judge(entry, reply, tokenizer, bounds.near, bounds.off)
                    for entry, reply in zip(entries, replies, strict=True)]  # fmt: skip
        is_right &= all(verdict.is_right for verdict in verdicts)
        equal, least = sum(not verdict.remark for verdict in verdicts), max(verdict.off for verdict in verdicts)
        lines.append(f"{way}: {equal} of {len(entries)} are torch's, log probabilities within {least:.4f}")
        lines += [f"  {number}: {verdict.remark}" for number, verdict in enumerate(verdicts) if verdict.remark]
        if form == "float32" and (others := [n for n, (a, b) in enumerate(zip(found["cold"], replies, strict=True))
                                             if a.tokens != b.tokens]):  # fmt: skip
            is_right = False
            lines.append(f"  NOT AS THE COLD ONES: {others}")
    if form == "float32":
        lines.append(f"shares of {_NUM_SAMPLES} drawn tokens: {off:.3f} off at most{'' if is_chance else ', NO CHANCE'}")
    return is_right, lines


def golden(source: Source) -> list[dict[str, Any]]:
    models = json.loads(_GOLDEN.read_text(encoding="utf-8"))["models"]
    return list(models[source.name])


def _reply(server: Server, entry: dict[str, Any]) -> Found:
    body = {"max_tokens": _NUM_TOKENS, "temperature": 0}
    if "messages" in entry:
        found = server.post("/v1/chat/completions", {**body, "messages": entry["messages"], "logprobs": True})
        [choice] = found["choices"]
        pairs = [(token["token"], token["logprob"]) for token in choice["logprobs"]["content"]]
    else:
        found = server.post("/v1/completions", {**body, "prompt": entry.get("text", entry["prompt"]), "logprobs": 0})
        [choice] = found["choices"]
        pairs = list(zip(choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"], strict=True))
    tokens, logprobs = zip(*pairs, strict=True)
    return Found(tokens, logprobs, found["usage"]["prompt_tokens"], choice["finish_reason"] == "stop")


def _draw(server: Server, entry: dict[str, Any], tokenizer: Tokenizer) -> tuple[float, bool]:
    """How far the shares of drawn next tokens are from torch's, and whether chance explains it."""
    counts: Counter[str] = Counter()
    for seed in range(0, _NUM_SAMPLES, _AT_ONCE):
        body = {"prompt": entry["prompt"], "max_tokens": 1, "temperature": 1, "top_p": 1, "n": _AT_ONCE, "seed": seed}
        counts.update(choice["text"] for choice in server.post("/v1/completions", body)["choices"])
    shares: Counter[str] = Counter()
    for number, share in entry["next"].items():
        shares[tokenizer.decode([int(number)], skip_special_tokens=False)] += share
    return largest_deviation(shares, counts)
