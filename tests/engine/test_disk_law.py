"""The law of the disk tier: a server that is stopped or killed finds as many cached tokens as one that never stopped.

Each request is compared with the same request to a twin with the same budgets. A turn whose server is killed before it
was written counts for neither.
"""

import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.engine.test_disk_any_load import NUM_TOKENS, SALTS, Server
from tests.support.checkpoints import checkpoint
from tests.support.rows import cases

ARCHITECTURES = ("qwen3", "gemma3_text", "gpt_oss", "qwen3_5", "nemotron_h", "llama4", "afm7")
NUM_REQUESTS, NUM_FEW = 14, 8
Prompt = tuple[int, ...]


@dataclass
class Tree:
    """Conversations that share beginnings, go on, are asked again, and fork."""

    rng: random.Random
    known: list[Prompt] = field(default_factory=list)

    def _words(self, most: int) -> Prompt:
        return tuple(self.rng.randrange(1, 500) for _ in range(self.rng.randrange(1, most)))

    def next(self) -> Prompt:
        if not self.known or self.rng.random() < 0.15:
            return self._words(500)
        kept = self.rng.choice(self.known)
        match self.rng.randrange(4):
            case 0:
                return kept
            case 1:
                return (*kept[: self.rng.randrange(1, len(kept) + 1)], *self._words(200))
            case _:
                return (*kept, *self._words(60))


class Pair:
    """A server that is stopped now and then, and its twin, which never is."""

    def __init__(self, path: Path, root: Path, memory: int | None):
        self._path, self._root, self._settings = path, root, {"cache_memory_bytes": memory, "snapshot_every": 256}
        self.server, self.twin = self._start("cache"), self._start("twin")

    def _start(self, name: str) -> Server:
        driver_settings = dict(self._settings)
        folder = self._root / name
        folder.mkdir(exist_ok=True)
        return Server(self._path, folder, **driver_settings)

    def restart(self, *, killed: bool) -> None:
        self.server.stop(killed=killed)
        self.server = self._start("cache")

    def close(self) -> None:
        self.server.stop(killed=True)
        self.twin.stop(killed=True)


def ask(server: Server, prompt: Prompt, *, points: list[int], salt: str, until: int, keep: int | None) -> int:
    """Ask for a reply, or for its first `until` tokens. Returns the sequence's id."""
    seq_id = server.driver.add(prompt, NUM_TOKENS, points=points, cache_salt=salt)
    while len(server.driver.replies[seq_id].token_ids) < until:
        server.step()
    if until == NUM_TOKENS:
        server.run()
    if keep is not None:
        server.engine.keep(server.driver.seqs[seq_id], keep)
        server.run()
    return seq_id


def settle(server: Server) -> None:
    """Let the second pass after which what a turn stored is on disk."""
    server.disk.write_all(lambda: 30.0)


def play(architecture: str, root: Path, seed: int, num_requests: int = NUM_REQUESTS) -> int:
    """Returns how many tokens the restarted server found on disk."""
    rng = random.Random(f"{architecture} {seed}")
    path, tree = checkpoint(architecture), Tree(rng)
    pair = Pair(path, root, rng.choice([None, None, 3_000_000]))
    num_read = 0
    for number in range(num_requests):
        prompt, salt = tree.next(), rng.choice(SALTS[:2])
        points = sorted(rng.sample(range(1, len(prompt) + 1), min(len(prompt), rng.randrange(4))))
        if rng.random() < 0.15:  # it is killed before anything of the turn was written
            ask(pair.server, prompt, points=points, salt=salt, until=NUM_TOKENS, keep=None)
            pair.restart(killed=True)
            continue
        is_cut = rng.random() < 0.2
        keep = len(prompt) + rng.randrange(NUM_TOKENS) if rng.random() < 0.4 and not is_cut else None
        until = rng.randrange(1, NUM_TOKENS) if is_cut else NUM_TOKENS
        asked = {"points": points, "salt": salt, "until": until, "keep": keep}
        mine, other = ask(pair.server, prompt, **asked), ask(pair.twin, prompt, **asked)
        found, wanted = pair.server.driver.seqs[mine], pair.twin.driver.seqs[other]
        assert found.num_cached_tokens >= wanted.num_cached_tokens, (
            f"{architecture}, seed {seed}, request {number}: {found.num_cached_tokens} of {len(prompt)} tokens were "
            f"cached, in the server that never stopped {wanted.num_cached_tokens}"
        )
        num_read += found.receipt.disk_tokens
        tree.known.append((*prompt, *pair.twin.driver.replies[other].token_ids))
        if is_cut:
            pair.twin.engine.abort([other])
            pair.twin.run()
            pair.restart(killed=False)
        settle(pair.server)
        settle(pair.twin)
        if not is_cut and rng.random() < 0.6:
            pair.restart(killed=rng.random() < 0.5)
    assert pair.server.disk.report().reads_not_made == pair.server.disk.report().reads_not_used == 0
    pair.close()
    return num_read


@pytest.mark.parametrize("architecture", cases(ARCHITECTURES, ["gemma3_text", "qwen3_5"]))
def test_a_restarted_server_finds_what_one_that_never_stopped_finds(architecture: str, tmp_path: Path) -> None:
    assert play(architecture, tmp_path, 0, NUM_FEW) > 0


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1, 31))
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_thirty_orders_of_requests_stops_and_kills_obey_the_law(architecture: str, seed: int, tmp_path: Path) -> None:
    play(architecture, tmp_path, seed)
