"""`python -m scripts._replay.restart TRACE`: plays a recorded session twice, once against a server that is stopped in
the middle of each session and started again on the same folder. Reports how much of each prompt was cached.

What a prompt can share within its session is what the run without a stop found cached.
"""

import argparse
import asyncio
import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from scripts._bench.servers import await_ready, free_port

from .checkpoint import SHAPES, write
from .conversation import Conversations
from .ideal import Ideals
from .player import Outcome, Player
from .trace import Recorded, load

SETTLED_S = 2.0  # after the last request, before a kill: what is kept on disk has been written then
_STOP_S = 60.0
_MODEL = "model"


@dataclass(slots=True)
class Server:
    """Our server in a process of its own, on one folder."""

    model: Path
    folder: Path
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "vllm_mlx", "serve", str(self.model), "--served-model-name", _MODEL]
        command += ["--port", str(self.port), "--cache-dir", str(self.folder), "--cache-disk", "4GB"]
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        if not await_ready(self.process, self.port):
            raise SystemExit("The server did not start.")

    def stop(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_STOP_S)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def halves(trace: list[Recorded]) -> Iterator[tuple[list[Recorded], list[Recorded]]]:
    """Each session, cut in the middle of its requests for replies."""
    for _, group in groupby(trace, key=lambda each: each.session):
        session = list(group)
        replies = [at for at, recorded in enumerate(session) if recorded.protocol is not None]
        cut = replies[len(replies) // 2] if len(replies) > 1 else len(session)
        yield session[:cut], session[cut:]


async def played(
    trace: list[Recorded], model: Path, folder: Path, between: Callable[[Server], None] | None
) -> tuple[list[Outcome], set[int]]:
    """The outcomes, and the numbers of the requests that come after the middle of their session."""
    server = Server(model, folder)
    server.start()
    outcomes: list[Outcome] = []
    later: set[int] = set()
    try:
        conversations = Conversations(trace, model=_MODEL, max_tokens=32, echo=True)
        player = Player(f"http://127.0.0.1:{server.port}", conversations)
        for first, second in halves(trace):
            await player.play(first, outcomes.append)
            if between is not None and second:
                between(server)
            await player.play(second, outcomes.append)
            later |= {recorded.number for recorded in second}
    finally:
        server.stop(signal.SIGTERM)
    return outcomes, later


def stopped(server: Server) -> None:
    server.stop(signal.SIGTERM)
    server.start()


def killed(server: Server) -> None:
    time.sleep(SETTLED_S)
    server.stop(signal.SIGKILL)
    server.start()


BETWEEN: dict[str, Callable[[Server], None] | None] = {"not stopped": None, "SIGTERM": stopped, "kill -9": killed}


def share(outcomes: list[Outcome], numbers: set[int], checkpoint: Path) -> tuple[int, int, int, int]:
    """Of the requests of these numbers whose beginning was seen in their session: how many there are, their prompts'
    tokens, the cached ones and the most that could be."""
    ideals = Ideals(checkpoint).of(outcomes)
    found = [
        (outcome.reply, ideals[outcome.recorded.number])
        for outcome in outcomes
        if outcome.recorded.number in numbers & ideals.keys() and ideals[outcome.recorded.number].is_in_session
    ]
    return (
        len(found),
        sum(reply.prompt_tokens for reply, _ in found if reply),
        sum(reply.cached_tokens for reply, _ in found if reply),
        sum(ideal.tokens for _, ideal in found),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, metavar="TRACE")
    parser.add_argument("--session", action="append", default=[], metavar="S", help="play this session only")
    parser.add_argument("--architecture", choices=SHAPES, default="qwen3")
    arguments = parser.parse_args()
    trace = load(arguments.trace, arguments.session)
    print("| stop | requests after it | prompts | cached | could be | share |\n|---|--:|--:|--:|--:|--:|")
    with tempfile.TemporaryDirectory(prefix="vllm-mlx-restart-") as root:
        model = Path(root) / "model"
        write(model, arguments.trace, arguments.architecture)
        for name, between in BETWEEN.items():
            outcomes, later = asyncio.run(played(trace, model, Path(root) / name.replace(" ", "-"), between))
            num_requests, prompts, cached, ideal = share(outcomes, later, model)
            row = (name, num_requests, f"{prompts:,}", f"{cached:,}", f"{ideal:,}", f"{100 * cached / ideal:.2f} %")
            print("| " + " | ".join(str(cell) for cell in row) + " |", flush=True)


if __name__ == "__main__":
    main()
