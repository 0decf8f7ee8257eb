"""The command behind `scripts/check --real`: it judges replies of real weights, over a real socket."""

import argparse
import sys
import time
from collections.abc import Callable, Iterable

import mlx.core as mx

from . import replies, talks
from .sources import GEMMA3, SMOLLM2, Source

PARTS: dict[str, tuple[Callable[[Source, str], tuple[bool, list[str]]], str]] = {
    "replies": (
        replies.check_replies,
        "greedy replies beside torch's, cold, cached, beside others, restored; drawn shares",
    ),
    "conversation": (talks.check_conversation, "twelve turns, and what the cache gives them"),
    "content": (talks.check_content, "schemas, choices and tools"),
    "drafts": (
        talks.check_drafts,
        "replies with drafts beside those without; what drafts are worth, by the kind of text",
    ),
}
MODELS = {
    f"{source.name}-{form}": (source, form)
    for source, form in (
        (SMOLLM2, "float32"), (GEMMA3, "float32"), (SMOLLM2, "bfloat16"), (GEMMA3, "bfloat16"), (SMOLLM2, "4bit"),
    )
}  # fmt: skip
SLOW_ON_CPU = ("conversation", "content", "drafts")  # in float32 alone there, unless --model names another type


def main() -> int:
    parts = "; ".join(f"{name}: {help}" for name, (_, help) in PARTS.items())
    parser = argparse.ArgumentParser(prog="scripts/check --real", description=f"{__doc__} Parts: {parts}.")
    parser.add_argument("--only", choices=PARTS, action="append", help="a part (may be given again; default: all)")
    parser.add_argument("--model", choices=MODELS, action="append", help="a checkpoint (may be given again)")
    options = parser.parse_args()
    started, results = time.monotonic(), []
    for part in options.only or PARTS:
        results += [_run(part, model) for model in options.model or _models(part)]
    print(f"{sum(results)} of {len(results)} pass, {time.monotonic() - started:.0f} s", flush=True)
    return int(not all(results))


def _models(part: str) -> Iterable[str]:
    is_float32 = part in SLOW_ON_CPU and mx.default_device() != mx.gpu
    return [name for name, (_, form) in MODELS.items() if form == "float32" or not is_float32]


def _run(part: str, model: str) -> bool:
    started = time.monotonic()
    is_right, lines = PARTS[part][0](*MODELS[model])
    seconds = time.monotonic() - started
    print(f"{'pass' if is_right else 'FAIL'}  {part}, {model}, {seconds:.0f} s")
    print("\n".join(f"      {line}" for line in lines), flush=True)
    return is_right


if __name__ == "__main__":
    sys.exit(main())
