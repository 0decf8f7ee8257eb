"""The disk tier under any load: restarts, aborts, tight memory and every kind of damage change no token."""

import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.checkpoints import checkpoint
from tests.support.engine_driver import Driver, plain_loop
from tests.support.integrity import check_integrity
from tests.support.running import eventually
from vllm_mlx.core.config import EngineConfig
from vllm_mlx.engine.loading import open_disk

NUM_TOKENS = 6
ARCHITECTURES = ("qwen3", "gemma3_text", "qwen3_5", "nemotron_h", "llama4", "afm7")
SALTS = ("", "ann", "ben")


class Server:
    """A driver with a disk tier, and what its thread does between two steps."""

    def __init__(
        self, path: Path, root: Path, fingerprint: str = "model", driver: Driver | None = None, **settings: object
    ):
        config = EngineConfig(model=str(path), cache_dir=str(root), **{"cache_disk_bytes": 1 << 30, **settings})
        self.driver = driver or Driver(
            path,
            cache_memory_bytes=config.cache_memory_bytes,
            snapshot_every=config.snapshot_every,
            num_draft_tokens=config.num_draft_tokens,
        )
        self.engine = self.driver.engine
        disk, tree = open_disk(config), self.engine.cache_tree
        assert disk is not None and disk.folder is not None and tree is not None
        self.folder = disk.folder
        planner, model = self.engine.scheduler.prefix_cache, self.engine.runner.model
        planner.fingerprint = fingerprint
        tree.add_model(fingerprint, model.resume_rule, s_per_token=1.0)
        disk.serve(self.engine)
        self.disk = self.engine.disk
        assert self.disk is not None

    @property
    def num_written(self) -> int:
        """Bytes that were written today; they are known also while the folder is gone."""
        return sum(self.folder.database.written.values())

    def run(self) -> None:
        """Step until all sequences have ended."""
        deadline = time.monotonic() + 240  # however busy the machine is
        while self.engine.scheduler.has_work:
            assert time.monotonic() < deadline, "a sequence waits for ever"
            self.step()

    def step(self) -> None:
        self.engine.wake()
        self.driver.step()
        if self.engine.scheduler.awaits_inputs:
            time.sleep(0.001)  # so that the readers' threads run

    def generate(self, *prompts: tuple[int, ...], salt: str = "") -> list[list[int]]:
        seq_ids = [self.driver.add(prompt, NUM_TOKENS, cache_salt=salt) for prompt in prompts]
        self.run()
        return [self.driver.replies[seq_id].token_ids for seq_id in seq_ids]

    def stop(self, *, killed: bool = False) -> None:
        end_s = time.monotonic() + (0 if killed else 30)
        self.engine.close(lambda: end_s - time.monotonic())
        self.folder.close()


@contextmanager
def started(
    path: Path, root: Path, fingerprint: str = "model", driver: Driver | None = None, **settings: object
) -> Iterator[Server]:
    server = Server(path, root, fingerprint, driver, **settings)
    yield server
    server.stop()


def conversations(rng: random.Random) -> list[tuple[int, ...]]:
    """Prompts that share beginnings, and that go on from each other."""
    trunk = [rng.randrange(1, 500) for _ in range(900)]
    found = [tuple(trunk[: rng.randrange(40, 900)]) for _ in range(3)]
    for _ in range(4):
        kept = rng.choice(found)
        found.append((*kept[: rng.randrange(1, len(kept) + 1)], *(rng.randrange(1, 500) for _ in range(60))))
    return found


def files(root: Path) -> list[Path]:
    return sorted(root.rglob("*.kv"))


def cut(root: Path, rng: random.Random) -> None:
    for file in rng.sample(files(root), min(2, len(files(root)))):
        with file.open("r+b") as stream:
            stream.truncate(rng.randrange(file.stat().st_size))


def flip(root: Path, rng: random.Random) -> None:
    for file in rng.sample(files(root), min(3, len(files(root)))):
        data = bytearray(file.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        file.write_bytes(data)


def swap(root: Path, rng: random.Random) -> None:
    found = files(root)
    if len(found) > 1:
        one, other = rng.sample(found, 2)
        content = one.read_bytes()
        one.write_bytes(other.read_bytes())
        other.write_bytes(content)


def remove(root: Path, rng: random.Random) -> None:
    for file in rng.sample(files(root), min(2, len(files(root)))):
        file.unlink()


def gone(root: Path, rng: random.Random) -> None:
    shutil.rmtree(root.rename(root.with_name("gone")))  # at once: the server may be writing


def flip_row(root: Path, rng: random.Random) -> None:
    found = sorted(root.glob("index.sqlite*"))
    for file in rng.sample(found, min(1, len(found))):
        with file.open("r+b") as stream:
            stream.seek(rng.randrange(max(1, file.stat().st_size)))
            stream.write(rng.randbytes(1))


def nothing(root: Path, rng: random.Random) -> None: ...


DAMAGES: tuple[Callable[[Path, random.Random], None], ...] = (cut, flip, swap, remove, gone, flip_row, nothing)


def damage(root: Path, rng: random.Random) -> None:
    with suppress(FileNotFoundError):  # the server has removed it meanwhile
        rng.choice(DAMAGES)(root, rng)


def guessed(rng: random.Random, path: Path, prompt: tuple[int, ...]) -> tuple[int, ...]:
    """The reply, in which one token may be wrong."""
    reply = list(plain_loop(path, prompt, NUM_TOKENS)[0])
    reply[rng.randrange(NUM_TOKENS)] = rng.randrange(1, 500)
    return tuple(reply)


def run_load(
    architecture: str, root: Path, seed: int, num_draft_tokens: int = 0, num_servers: int = 4
) -> tuple[int, int]:
    """Servers come one after the other. Returns how often something was read, and how many damages were found."""
    rng = random.Random(f"{architecture} {seed}")
    path = checkpoint(architecture)
    prompts = conversations(rng)
    num_hits = num_damaged = num_accepted = 0
    for _ in range(num_servers):
        memory = rng.choice([None, None, 2_000_000])
        server = Server(path, root, cache_memory_bytes=memory, num_draft_tokens=num_draft_tokens)
        asked: dict[int, tuple[int, ...]] = {}
        for _ in range(rng.randrange(1, 4)):
            salt = rng.choice(SALTS)
            batch = {}
            for prompt in rng.sample(prompts, rng.randrange(1, 4)):
                prediction = guessed(rng, path, prompt) if num_draft_tokens else ()
                batch[server.driver.add(prompt, NUM_TOKENS, cache_salt=salt, prediction=prediction)] = prompt
            asked |= batch
            for _ in range(rng.randrange(4)):
                server.engine.wake()
                server.driver.step()
            if rng.random() < 0.3:
                server.engine.abort([rng.choice(list(batch))])
            if rng.random() < 0.3:
                damage(root, rng)
            if rng.random() < 0.1:
                server.engine.clear_cache(rng.choice(SALTS))
            server.run()
        for seq_id, prompt in asked.items():
            reply, seq = server.driver.replies[seq_id], server.driver.seqs[seq_id]
            assert reply.error is None, (seed, reply.error)
            if str(seq.finish_reason) != "abort":
                assert plain_loop(path, prompt, NUM_TOKENS)[0] == reply.token_ids, (seed, prompt[:3], len(prompt))
        report = server.disk.report()
        assert report.off_reason is None, (seed, report.off_reason)
        assert not server.engine.scheduler.num_restarts, seed
        num_hits, num_damaged = num_hits + report.hits, num_damaged + report.num_damaged
        if (speculation := server.engine.scheduler.speculation) is not None:
            num_accepted += speculation.num_accepted["prediction"]
        eventually(lambda server=server: server.disk.tick(is_idle=True) or server.disk.reader.reserved_bytes == 0)
        assert not server.disk.reader.reading
        check_integrity(server.engine.cache_tree)
        check_integrity(server.disk.tree)
        held, before = server.engine.cache_tree.used_bytes, server.num_written
        server.stop(killed=rng.random() < 0.2)
        assert server.num_written - before <= 2 * held + 100_000, "something is written again and again"
        if rng.random() < 0.5:
            damage(root, rng)
        root.mkdir(exist_ok=True)
    assert bool(num_accepted) is bool(num_draft_tokens)
    return num_hits, num_damaged


@pytest.mark.parametrize("architecture", ["qwen3_5"])
def test_any_load_has_the_tokens_of_no_cache(architecture: str, tmp_path: Path) -> None:
    num_hits, _ = run_load(architecture, tmp_path / "cache", 0, num_servers=2)
    assert num_hits


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("architecture", ["qwen3", "gemma3_text", "vision:qwen3_5"])
def test_and_with_drafts(architecture: str, seed: int, tmp_path: Path) -> None:
    run_load(architecture, tmp_path / "cache", seed, num_draft_tokens=4)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1, 21))
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_twenty_loads_of_each_kind_have_the_tokens_of_no_cache(architecture: str, seed: int, tmp_path: Path) -> None:
    run_load(architecture, tmp_path / "cache", seed)
