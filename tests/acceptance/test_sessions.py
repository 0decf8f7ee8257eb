"""The first request of an agent's next session computes what no earlier session began with, and little more."""

import asyncio
import json
from pathlib import Path

import httpx
import pytest

from scripts._replay.beginnings import MOST_COMPUTED, requests_of
from scripts._replay.checkpoint import write
from scripts._replay.conversation import Conversations
from scripts._replay.ideal import Ideals, groups
from scripts._replay.player import Outcome, Player
from tests.server.watched import engine_served
from tests.support.checkpoints import checkpoint
from tests.support.rows import cases, row

RECORDED = json.loads((Path(__file__).parents[1] / "support" / "recorded_beginnings.json").read_text(encoding="utf-8"))
RULES = "Read the file before you change it, and say what you did. " * 20  # more than a snapshot is worth
SESSION = (
    "Work in the folder {folder} and nowhere else.\n{rules}\n"
    "Today's date: {date}\n{rules}\nCurrent branch: {branch}\nStatus: clean\n{rules}"
)
FIRST = {"folder": "/Users/ann/work/shop", "date": "2026-03-01", "branch": "main"}
OTHERS = {"branch": "fix/login", "date": "2026-03-02", "folder": "/Users/ann/work/site"}
NEAR = 100  # characters


def computed(client: httpx.Client, values: dict[str, str], question: str) -> tuple[int, int]:
    """The prompt's tokens, and how many of them were computed."""
    system = {"role": "system", "content": RULES + SESSION.format(rules=RULES, **values)}
    body = {"model": "tiny", "max_tokens": 1, "messages": [system, {"role": "user", "content": question}]}
    reply = client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    usage = reply.json()["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]


@row("S4-28")
@pytest.mark.parametrize(
    "name", cases(("gemma3_text", "gpt_oss", "llama4", "qwen3_5", "nemotron_h"), {"gemma3_text", "qwen3_5"})
)
def test_a_session_on_another_branch_or_day_or_in_another_folder_shares_what_is_before(name: str) -> None:
    text = RULES + SESSION.format(rules=RULES, **FIRST)
    with engine_served(checkpoint(name), max_model_len=40_000) as running, running.http() as client:
        for field, other in OTHERS.items():
            assert client.delete("/v1/cache").status_code == 200
            tokens, num_computed = computed(client, FIRST, "A question.")
            assert num_computed == tokens
            tokens, num_computed = computed(client, {**FIRST, field: other}, "Another one.")
            behind = len(text) - text.index(FIRST[field])
            assert num_computed <= tokens * (behind + NEAR) / len(text), field


@row("S4-28")
@pytest.mark.parametrize("agent", cases(RECORDED, {"opencode"}))
def test_recorded_agents_stay_within_their_bounds(tmp_path: Path, agent: str) -> None:
    requests = requests_of(RECORDED[agent])
    write(tmp_path, requests, "qwen3_5")
    outcomes: list[Outcome] = []
    with engine_served(tmp_path) as running:
        player = Player(running.url, Conversations(requests, model="tiny", max_tokens=1, echo=False))
        for request in requests:
            asyncio.run(player.play([request], outcomes.append))
    assert [each.error for each in outcomes if each.error] == []
    sums = groups(outcomes, Ideals(tmp_path).of(outcomes))["across sessions"]
    assert sums.computed_of_ideal is not None and sums.computed_of_ideal <= MOST_COMPUTED[agent]
