"""Greedy replies beside torch's: cold, cached, beside each other, after `kill -9` in a stream; drawn shares."""

import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import Tokenizer

from scripts.served import COMPLETIONS, Server, serving

from .checkpoints import checkpoint
from .sources import Source, say

_END = "(end)"
_DEVIATIONS = 4.5  # of a share that was drawn: once in 100,000


@dataclass(frozen=True, slots=True)
class Found:
    """A reply of the server: the texts of its tokens, without the token that stopped it."""

    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    num_prompt: int
    has_stopped: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    is_right: bool
    num_equal: int  # tokens before the first other one
    off: float  # the largest difference of a log probability among them
    remark: str  # empty for an equal reply


@dataclass(frozen=True, slots=True)
class Judge:
    """Judges replies by the checkpoint's tokens, its stop tokens, and the differences that rounding may cause.

    Equal replies are right. So are those that take, where they part, a second best token less than `near` logits
    behind: what follows it cannot be compared. A log probability may be `off` so far.
    """

    tokenizer: Tokenizer
    stops: frozenset[int]
    near: float
    off: float

    def name(self, number: int) -> str:
        return _END if number in self.stops else self.tokenizer.decode([number], skip_special_tokens=False)

    def verdict(self, golden: Mapping[str, Any], found: Found) -> Verdict:
        names = tuple(map(self.name, golden["tokens"]))
        got = (*found.tokens, _END) if found.has_stopped else found.tokens
        same = next((n for n, pair in enumerate(zip(names, got, strict=False)) if pair[0] != pair[1]),
                    min(len(names), len(got)))  # fmt: skip
        off = max((abs(a - b) for a, b in zip(golden["logprobs"][:same], found.logprobs, strict=False)), default=0.0)
        if found.num_prompt != len(golden["prompt"]):
            remark = f"the prompt has {found.num_prompt} tokens instead of {len(golden['prompt'])}"
            return Verdict(False, same, off, remark)
        if off > self.off:
            return Verdict(False, same, off, f"a log probability is {off:.4f} off")
        if got == names:
            return Verdict(True, same, off, "")
        if same == min(len(names), len(got)):
            return Verdict(False, same, off, f"{len(got)} tokens instead of {len(names)}")
        number, gap = golden["second"][same]
        is_near = gap < self.near and got[same] == self.name(number)
        kind = f"near tie ({gap:.3f})" if is_near else f"WRONG (the second best is {gap:.3f} behind)"
        return Verdict(is_near, same, off, f"{kind} at token {same}: {got[same]!r} instead of {names[same]!r}")


def largest_deviation(shares: Mapping[str, float], counts: Mapping[str, int]) -> tuple[float, bool]:
    """Return the largest distance between drawn and golden shares, and whether chance explains it."""
    num = sum(counts.values())
    off = {name: abs(counts.get(name, 0) / num - share) for name, share in shares.items()}
    allowed = {name: _DEVIATIONS * sqrt(share * (1 - share) / num) + 1 / num for name, share in shares.items()}
    return max(off.values()), all(off[name] <= allowed[name] for name in shares)


_GOLDEN = Path(__file__).with_name("golden.json")
_NUM_TOKENS = {"float32": 48, "bfloat16": 16, "4bit": 16}
_NUM_AGAIN = 16  # tokens of a reply that is asked for again

_BESIDE = 4
_NUM_SAMPLES, _AT_ONCE = 1024, 32
_MOST_ON_CPU = 200  # prompt tokens in other types than float32, which MLX multiplies slowly on a CPU


Entry = dict[str, Any]  # a case of golden.json
_NEAR = {"float32": 0.05, "bfloat16": 1.0, "4bit": 1.0}  # logits
_OFF = {"float32": 0.02, "bfloat16": 1.0, "4bit": 1.0}


def check_replies(source: Source, form: str) -> tuple[bool, list[str]]:
    """Compare all replies with torch's. Report each way on stderr as soon as it is done."""
    folder, is_exact = checkpoint(source, form), form == "float32"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    stop = json.loads((folder / "config.json").read_text(encoding="utf-8"))["eos_token_id"]
    judge = Judge(tokenizer, frozenset({stop}), _NEAR[form], _OFF[form])
    is_slow = not is_exact and mx.default_device() != mx.gpu
    asked_for = [entry for entry in golden(source) if not is_slow or len(entry["prompt"]) <= _MOST_ON_CPU]
    entries = [_shorter(entry, _NUM_TOKENS[form]) for entry in asked_for]
    is_right, lines, cold = True, [], [Found((), (), 0, False)] * len(entries)
    for way, asked, replies in _ways(folder, entries):
        cold = replies if way == "cold" else cold
        verdicts = [judge.verdict(entry, reply) for entry, reply in zip(asked, replies, strict=True)]
        is_right &= all(verdict.is_right for verdict in verdicts)
        equal, off = sum(not verdict.remark for verdict in verdicts), max(verdict.off for verdict in verdicts)
        new = [f"{way}: {equal} of {len(entries)} are torch's, log probabilities within {off:.4f}"]
        new += [f"  {number}: {verdict.remark}" for number, verdict in enumerate(verdicts) if verdict.remark]
        pairs = enumerate(zip(cold, replies, strict=True))
        others = [number for number, (first, reply) in pairs if first.tokens[: len(reply.tokens)] != reply.tokens]
        new += [f"  not as cold: {others}"] if others else []
        is_right &= not (is_exact and others)
        say("\n".join(new))
        lines += new
    if is_exact:
        off, is_chance = _draw(folder, entries[0], tokenizer)
        is_right &= is_chance
        text = f"shares of {_NUM_SAMPLES} drawn tokens: {off:.3f} off at most"
        lines.append(text if is_chance else f"{text}, which chance does not explain")
    return is_right, lines


def _ways(folder: Path, entries: list[Entry]) -> Iterator[tuple[str, list[Entry], list[Found]]]:
    """Yield the name of a way to ask, the cases, and their replies."""
    again = [_shorter(entry, _NUM_AGAIN) for entry in entries]
    with tempfile.TemporaryDirectory() as kept:
        arguments = ("--cache-dir", kept, "--cache-disk", "2GB")
        with serving(None, str(folder), *arguments) as server:
            yield "cold", entries, [_reply(server, entry) for entry in entries]
            yield "cached", again, [_reply(server, entry) for entry in again]
            with ThreadPoolExecutor(_BESIDE) as pool:
                yield "beside others", again, list(pool.map(lambda entry: _reply(server, entry), again))
            server.stream(entries[1]["prompt"], 400, most_reads=8)  # of a long reply
            server.kill()
        with serving(None, str(folder), *arguments) as server:
            yield "after kill -9", again, [_reply(server, entry) for entry in again]


def _shorter(entry: Entry, num_tokens: int) -> Entry:
    return {**entry, "tokens": entry["tokens"][:num_tokens]}


def golden(source: Source) -> list[Entry]:
    models = json.loads(_GOLDEN.read_text(encoding="utf-8"))["models"]
    return list(models[source.name])


def _reply(server: Server, entry: Entry) -> Found:
    body = {"max_tokens": len(entry["tokens"]), "temperature": 0}
    if "messages" in entry:
        found = server.post("/v1/chat/completions", {**body, "messages": entry["messages"], "logprobs": True})
        [choice] = found["choices"]
        pairs = [(token["token"], token["logprob"]) for token in choice["logprobs"]["content"]]
    else:
        found = server.post(COMPLETIONS, {**body, "prompt": entry.get("text", entry["prompt"]), "logprobs": 0})
        [choice] = found["choices"]
        pairs = list(zip(choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"], strict=True))
    tokens, logprobs = zip(*pairs, strict=True)
    return Found(tokens, logprobs, found["usage"]["prompt_tokens"], choice["finish_reason"] == "stop")


def _draw(folder: Path, entry: Entry, tokenizer: Tokenizer) -> tuple[float, bool]:
    """Return the largest distance between shares of drawn next tokens and torch's, and whether chance explains it."""
    counts: Counter[str] = Counter()
    with serving(None, str(folder)) as server:
        for seed in range(0, _NUM_SAMPLES, _AT_ONCE):
            body = {"prompt": entry["prompt"], "max_tokens": 1, "temperature": 1, "top_p": 1, "n": _AT_ONCE}
            counts.update(choice["text"] for choice in server.post(COMPLETIONS, {**body, "seed": seed})["choices"])
    shares: Counter[str] = Counter()
    for number, share in entry["next"].items():
        shares[tokenizer.decode([int(number)], skip_special_tokens=False)] += share
    return largest_deviation(shares, counts)
