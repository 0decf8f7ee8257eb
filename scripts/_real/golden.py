"""Computes golden.json anew: what transformers and torch reply in float32 to the prompts of that file.

    python -m venv /tmp/golden && /tmp/golden/bin/pip install torch transformers==5.24.0
    scripts/check --real                                 # makes .real/smollm2-float32 and .real/gemma3-float32
    /tmp/golden/bin/python scripts/_real/golden.py .real

It imports nothing of this project. Of each prompt it keeps the greedy ids, their log probabilities, the near ties among
them (position, runner-up and distance in logits), and the likeliest next tokens after the prompt.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch  # type: ignore[import-not-found]
from transformers import AutoModelForCausalLM

FILE = Path(__file__).with_name("golden.json")
NUM_TOKENS, NUM_NEXT, NEAR = 48, 20, 0.05


def main(folder: Path) -> None:
    torch.manual_seed(0)
    golden = json.loads(FILE.read_text(encoding="utf-8"))
    for name, entries in golden["models"].items():
        model = AutoModelForCausalLM.from_pretrained(folder / f"{name}-float32", dtype=torch.float32)
        for entry in entries:
            entry |= reply(model, entry["prompt"])
        print(name, len(entries), file=sys.stderr)
    golden["note"] = f"transformers and torch {torch.__version__} in float32; made by scripts/_real/golden.py"
    lines = [
        f"{json.dumps(name)}: [\n" + ",\n".join(json.dumps(entry) for entry in entries) + "\n]"
        for name, entries in golden["models"].items()
    ]
    text = f'{{"note": {json.dumps(golden["note"])}, "models": {{\n' + ",\n".join(lines) + "\n}}\n"
    FILE.write_text(text, encoding="utf-8")


@torch.no_grad()  # type: ignore[untyped-decorator]
def reply(model: Any, prompt: list[int]) -> dict[str, Any]:
    stops = model.config.eos_token_id
    stops = stops if isinstance(stops, list) else [stops]
    ids, state = torch.tensor([prompt]), None
    tokens: list[int] = []
    logprobs: list[float] = []
    ties: list[list[float]] = []
    likeliest: dict[int, float] = {}
    while len(tokens) < NUM_TOKENS and (not tokens or tokens[-1] not in stops):
        output = model(ids, past_key_values=state, use_cache=True)
        state, logits = output.past_key_values, output.logits[0, -1]
        shares = torch.log_softmax(logits, -1)
        if not tokens:
            top = torch.topk(shares, NUM_NEXT)
            likeliest = {int(i): round(float(p), 5) for p, i in zip(top.values.exp(), top.indices, strict=True)}
        best = torch.topk(logits, 2)
        token, gap = int(best.indices[0]), float(best.values[0] - best.values[1])
        if gap < NEAR:
            ties.append([len(tokens), int(best.indices[1]), round(gap, 5)])
        tokens.append(token)
        logprobs.append(round(float(shares[token]), 5))
        ids = torch.tensor([[token]])
    return {"tokens": tokens, "logprobs": logprobs, "near_ties": ties, "next": likeliest}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
