"""`python -m scripts._replay.restart TRACE`: plays a recorded session to a server that stops after every reply.

Each session is played three times, each time to a folder of its own: without a stop, with SIGTERM after each reply,
and with `kill -9` one second after it. The table gives the computed tokens over those that no earlier prompt or reply
holds.
"""

import argparse
import asyncio
import signal
import sys
import tempfile
import time
from collections import deque
from itertools import groupby
from pathlib import Path

from scripts.served import MODEL_NAME, serving
from vllm_mlx.runner.checkpoint import find_checkpoint

from .checkpoint import SHAPES, write
from .conversation import Conversations
from .ideal import Ideals
from .player import Outcome, Player
from .trace import Recorded, load

ALL_WRITTEN_S = 1.0  # after a reply, the state of its turn must survive a kill
_FLAGS = ("--cache-disk", "4GB", "--log-level", "error")


async def played(trace: list[Recorded], model: Path, folder: Path, end: signal.Signals | None) -> list[Outcome]:
    """Play one request after the other. With `end`, the server gets this signal after each reply."""
    outcomes: list[Outcome] = []
    conversations = Conversations(trace, model=MODEL_NAME, max_tokens=32, echo=True)
    waiting = deque(trace)
    while waiting:
        with serving(None, str(model), *_FLAGS, "--cache-dir", str(folder)) as server:
            player = Player(server.url, conversations)
            is_over = False
            while waiting and not is_over:
                recorded = waiting.popleft()
                await player.play([recorded], outcomes.append)
                is_over = end is not None and recorded.protocol is not None
            if waiting and end is signal.SIGKILL:
                time.sleep(ALL_WRITTEN_S)
                server.kill()
            else:
                server.stop()
    return outcomes


ENDS = {"not stopped": None, "SIGTERM": signal.SIGTERM, "kill -9": signal.SIGKILL}


def print_table(trace: list[Recorded], model: Path, root: Path, stops: list[str]) -> None:
    print("| session | stop | replies | prompts | computed | ideal | computed ÷ ideal |\n|---|---|--:|--:|--:|--:|--:|")
    for session, group in groupby(trace, key=lambda each: each.session):
        requests = list(group)
        for name in stops:
            folder = root / f"{session} {name}".replace(" ", "-")
            outcomes = asyncio.run(played(requests, model, folder, ENDS[name]))
            print(_computed_row(session, name, outcomes, Ideals(model)), flush=True)


def _computed_row(session: str, stop: str, outcomes: list[Outcome], ideals: Ideals) -> str:
    """Return a row of the table; a line on stderr names each request that computed more than it had to."""
    prompts = computed = wanted = num_replies = 0
    for number, ideal in ideals.of(outcomes).items():
        [reply] = [each.reply for each in outcomes if each.recorded.number == number]
        assert reply is not None
        num_replies += 1
        prompts += reply.prompt_tokens
        computed += reply.prompt_tokens - reply.cached_tokens
        wanted += reply.prompt_tokens - ideal.tokens
        if (again := ideal.tokens - reply.cached_tokens) > 0:
            line = f"{session}, {stop}, request {number}: {reply.cached_tokens} of {ideal.tokens} tokens were cached"
            print(f"{line}, {again} were computed again of a prompt of {reply.prompt_tokens}", file=sys.stderr)
    failures = [each.error for each in outcomes if each.error]
    if failures:
        print(f"{session}, {stop}: {len(failures)} requests failed, the first with {failures[0]}", file=sys.stderr)
    cells = (session, stop, num_replies, f"{prompts:,}", f"{computed:,}", f"{wanted:,}", f"{computed / wanted:.4f}")
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, metavar="TRACE")
    parser.add_argument("--session", action="append", default=[], metavar="S", help="play this session only")
    parser.add_argument("--architecture", choices=SHAPES, default="qwen3")
    parser.add_argument("--model", metavar="M", help="a folder of a checkpoint, or demo (default: a tiny random one)")
    parser.add_argument("--stop", action="append", choices=ENDS, help="only this kind of stop; may repeat")
    arguments = parser.parse_args()
    trace = load(arguments.trace, arguments.session)
    with tempfile.TemporaryDirectory(prefix="vllm-mlx-restart-") as folder:
        root = Path(folder)
        if arguments.model is None:
            model = root / "model"
            write(model, load(arguments.trace), arguments.architecture)
        else:
            model = find_checkpoint(arguments.model).path
        print_table(trace, model, root, arguments.stop or list(ENDS))


if __name__ == "__main__":
    main()
