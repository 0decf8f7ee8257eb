"""The command behind `scripts/check --real`: replies of real checkpoints beside those of torch, over a real socket.

Greedy replies in float32 equal golden.json: cold, from the cache, beside each other, and after `kill -9`. In bf16 and
in 4 bits, which round otherwise, figures are printed. Next tokens are drawn, and their shares compared with torch's.
"""

import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer

from tests.support.commands import address, served

from .checkpoints import checkpoint
from .sources import GEMMA3, SMOLLM2, Source

_FORMS = ((SMOLLM2, "float32"), (GEMMA3, "float32"), (SMOLLM2, "bfloat16"), (GEMMA3, "bfloat16"), (SMOLLM2, "4bit"))
_GOLDEN = Path(__file__).with_name("golden.json")
_NUM_SAMPLES = 512
_MAX_OFF = 0.08  # of a share that is drawn so often: more than three standard deviations
_SILENCE_S = 600.0


@dataclass(frozen=True, slots=True)
class Case:
    prompt: list[int]
    text: str  # torch's reply
    num_tokens: int
    sure_text: str  # up to the first near tie


def main() -> int:
    results = [_check(source, form) for source, form in _FORMS]
    return int(not all(results))


def _check(source: Source, form: str) -> bool:
    folder = checkpoint(source, form)
    entries = json.loads(_GOLDEN.read_text(encoding="utf-8"))["models"][source.name]
    cases = [_case(entry, Tokenizer.from_file(str(folder / "tokenizer.json"))) for entry in entries]
    is_exact = form == "float32"
    with tempfile.TemporaryDirectory() as kept:
        arguments = (str(folder), "--cache-dir", kept, "--cache-disk", "2GB")
        with served(*arguments) as (process, printed):
            url = address(printed)
            cold = [_reply(url, case) for case in cases]
            warm = [_reply(url, case) for case in cases]
            with ThreadPoolExecutor(4) as pool:
                beside = list(pool.map(lambda case: _reply(url, case), cases))
            drawn = _draw(url, entries[0]) if is_exact else 0.0
            _begin_stream(url, cases[1])
            process.kill()
        with served(*arguments) as (_, printed):
            restored = [_reply(address(printed), case) for case in cases]
    equal = [sum(a == b for a, b in zip(cold, others, strict=True)) for others in (warm, beside, restored)]
    golden = sum(reply == case.text for reply, case in zip(cold, cases, strict=True))
    sure = sum(reply.startswith(case.sure_text) for reply, case in zip(cold, cases, strict=True))
    is_right = not is_exact or (equal == [len(cases)] * 3 and sure == len(cases) and drawn <= _MAX_OFF)
    text = (
        f"of {len(cases)} replies {golden} are torch's, {sure} up to the first near tie; equal to the cold one: "
        f"{equal[0]} cached, {equal[1]} beside others, {equal[2]} after kill -9"
    )
    more = f"shares of next tokens differ by {drawn:.3f} at most" if is_exact else "nothing is demanded"
    print(f"{'pass' if is_right else 'FAIL'}  {folder.name}: {text}; {more}", flush=True)
    return is_right


def _case(entry: dict[str, Any], tokenizer: Tokenizer) -> Case:
    tokens, ties = entry["tokens"], entry["near_ties"]
    text = tokenizer.decode(tokens)
    sure = tokenizer.decode(tokens[: ties[0][0]]) if ties else text
    return Case(entry["prompt"], text, len(tokens), sure.rstrip("\ufffd"))


def _reply(url: str, case: Case) -> str:
    body = {"prompt": case.prompt, "max_tokens": case.num_tokens, "temperature": 0}
    return str(_post(url, body)["choices"][0]["text"])


def _draw(url: str, entry: dict[str, Any]) -> float:
    """The largest difference between torch's shares of next tokens and those of many replies of one token."""
    tokenizer = Tokenizer.from_file(str(checkpoint(SMOLLM2, "float32") / "tokenizer.json"))
    if entry["prompt"][0] != tokenizer.token_to_id("<|im_start|>"):
        return 0.0  # the first prompt of Gemma: its tokens are compared greedily alone
    counts: dict[str, int] = {}
    for seed in range(0, _NUM_SAMPLES, 32):
        body = {"prompt": entry["prompt"], "max_tokens": 1, "temperature": 1, "top_p": 1, "n": 32, "seed": seed}
        for choice in _post(url, body)["choices"]:
            counts[choice["text"]] = counts.get(choice["text"], 0) + 1
    shares = {tokenizer.decode([int(number)]): share for number, share in entry["next"].items()}
    return float(max(abs(counts.get(text, 0) / _NUM_SAMPLES - share) for text, share in shares.items()))


def _begin_stream(url: str, case: Case) -> None:
    """Read the first events of a stream, and leave it where it is."""
    body = {"prompt": case.prompt, "max_tokens": 400, "ignore_eos": True, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=_SILENCE_S, trust_env=False) as answer:
        lines = answer.iter_lines()
        for _ in range(8):
            next(lines)


def _post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=_SILENCE_S, trust_env=False)
    return dict(answer.raise_for_status().json())


if __name__ == "__main__":
    sys.exit(main())
