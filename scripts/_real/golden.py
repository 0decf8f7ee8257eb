"""Computes golden.json again: the replies of transformers and torch in float32 to the prompts of that file.

    python -m venv /tmp/golden && /tmp/golden/bin/pip install torch transformers==5.24.0
    scripts/check --real --only replies                  # makes .real/smollm2-float32 and .real/gemma3-float32
    /tmp/golden/bin/python scripts/_real/golden.py .real

It imports nothing of this project. A new case is a `prompt` of ids, a `text`, or the `messages` of a chat. Of each it
keeps the ids of the prompt, the greedy ids of the reply, their log probabilities, for each the second best id and its
distance in logits, and the likeliest next tokens after the prompt.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch  # type: ignore[import-not-found]
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

FILE = Path(__file__).with_name("golden.json")
NUM_TOKENS, NUM_NEXT = 48, 20


def main(folder: Path) -> None:
    golden = json.loads(FILE.read_text(encoding="utf-8"))
    for name, entries in golden["models"].items():
        model = AutoModelForCausalLM.from_pretrained(folder / f"{name}-float32", dtype=torch.float32)
        for entry in entries:
            entry["prompt"] = prompt(folder / f"{name}-float32", entry)
            entry |= reply(model, entry["prompt"])
            print(name, len(entry["prompt"]), len(entry["tokens"]), file=sys.stderr, flush=True)
    note = f"transformers and torch {torch.__version__} in float32; made by scripts/_real/golden.py"
    lines = [
        f"{json.dumps(name)}: [\n" + ",\n".join(json.dumps(entry) for entry in entries) + "\n]"
        for name, entries in golden["models"].items()
    ]
    text = f'{{"note": {json.dumps(note)}, "models": {{\n' + ",\n".join(lines) + "\n}}\n"
    FILE.write_text(text, encoding="utf-8")


def prompt(folder: Path, entry: dict[str, Any]) -> list[int]:
    """Return the ids of a text or chat, by the tokenizer's file alone: transformers builds some classes otherwise."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    if "text" in entry:
        return list(tokenizer(entry["text"])["input_ids"])
    if "messages" in entry:
        template = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))["chat_template"]
        options = {"tokenize": False, "add_generation_prompt": True, "chat_template": template}
        return list(tokenizer(tokenizer.apply_chat_template(entry["messages"], **options))["input_ids"])
    return list(entry["prompt"])


@torch.no_grad()  # type: ignore[untyped-decorator]
def reply(model: Any, prompt: list[int]) -> dict[str, Any]:
    stops = model.config.eos_token_id
    stops = stops if isinstance(stops, list) else [stops]
    ids, state = torch.tensor([prompt]), None
    tokens: list[int] = []
    logprobs: list[float] = []
    second: list[list[float]] = []
    likeliest: dict[int, float] = {}
    while len(tokens) < NUM_TOKENS and (not tokens or tokens[-1] not in stops):
        output = model(ids, past_key_values=state, use_cache=True, logits_to_keep=1)
        state, logits = output.past_key_values, output.logits[0, -1]
        shares = torch.log_softmax(logits, -1)
        if not tokens:
            top = torch.topk(shares, NUM_NEXT)
            likeliest = {int(i): round(float(p), 5) for p, i in zip(top.values.exp(), top.indices, strict=True)}
        best = torch.topk(logits, 2)
        token = int(best.indices[0])
        second.append([int(best.indices[1]), round(float(best.values[0] - best.values[1]), 4)])
        tokens.append(token)
        logprobs.append(round(float(shares[token]), 5))
        ids = torch.tensor([[token]])
    return {"tokens": tokens, "logprobs": logprobs, "second": second, "next": likeliest}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
