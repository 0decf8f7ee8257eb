"""Replies with drafts beside those without, greedy and drawn, and what drafts are worth on three kinds of text."""

import json
from typing import Any

from scripts.served import Server, serving

from .checkpoints import checkpoint
from .sources import Source

_FILE = "\n".join(f"def area_{name}(width, height):\n    return width * height\n" for name in ("door", "wall", "roof"))
_LOOP = "\n".join(json.dumps({"tool": "read", "path": f"src/file_{number}.py"}) for number in range(4))
# A prompt, and the kind of text with which the model goes on.
TEXTS = {
    "editing a file": f"The file:\n{_FILE}\nThe same file with `size_` in place of `area_`:\n",
    "prose": "A short story about a lighthouse keeper who found a letter in a bottle.\n\nOne morning",
    "a loop of tools": f"The calls of an agent, one a line:\n{_LOOP}\n",
}
_REPLY = 96
SETTINGS: tuple[dict[str, Any], ...] = ({"temperature": 0}, {"temperature": 1, "seed": 11})


def check(source: Source, form: str) -> tuple[bool, list[str]]:
    path, lines, is_right = checkpoint(source, form), [], True
    with serving(None, str(path), "--num-draft-tokens", "0") as server:
        plain = {kind: [_reply(server, text, **settings) for settings in SETTINGS] for kind, text in TEXTS.items()}
    for wanted in ("7", "auto"):
        with serving(None, str(path), "--num-draft-tokens", wanted) as server:
            for kind, text in TEXTS.items():
                before = _counts(server)
                replies = [_reply(server, text, **settings) for settings in SETTINGS]
                drafted, accepted, rows = (now - old for now, old in zip(_counts(server), before, strict=True))
                num_equal = sum(own == other for own, other in zip(replies, plain[kind], strict=True))
                is_right &= num_equal == len(SETTINGS) or form != "float32"
                gain = f"{1 + accepted / rows:.1f} tokens in a pass with drafts" if rows else "no drafts"
                lines.append(
                    f"--num-draft-tokens {wanted}, {kind}: {num_equal} of {len(SETTINGS)} replies are equal; "
                    f"{accepted} of {drafted} drafts accepted, {gain}"
                )
            parked = server.status()["drafts"]["parked"]
            lines.append(
                f"--num-draft-tokens {wanted}: " + (f"parked: {parked}" if parked else "not parked at the end")
            )
    return is_right, lines


def _reply(server: Server, text: str, **settings: Any) -> str:
    body = {"prompt": text, "max_tokens": _REPLY, "ignore_eos": True, **settings}
    reply: str = server.post("/v1/completions", body)["choices"][0]["text"]
    return reply


def _counts(server: Server) -> tuple[int, int, int]:
    """Drafted and accepted tokens, and how often a row had drafts, since the start."""
    drafts = server.status()["drafts"]
    return sum(drafts["drafted_tokens"].values()), sum(drafts["accepted_tokens"].values()), drafts["num_drafts"]
