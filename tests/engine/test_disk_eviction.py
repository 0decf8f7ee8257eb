"""What memory evicts once it was written: it is read when its conversation goes on."""

import random
from pathlib import Path

import pytest

from tests.engine.test_disk_any_load import NUM_TOKENS, files, started
from tests.support.checkpoints import checkpoint
from tests.support.engine_driver import Driver, plain_loop
from tests.support.rows import cases
from tests.support.running import eventually

TURNS = 2


def conversations(num: int, num_tokens: int = 400) -> list[list[int]]:
    rng = random.Random(num)
    return [[rng.randrange(1, 500) for _ in range(num_tokens)] for _ in range(num)]


def turn(driver: Driver, conversation: list[int]) -> int:
    """Add a question to the conversation and ask it. Returns its seq_id."""
    conversation += range(30, 55)
    return driver.add(conversation, NUM_TOKENS, points=[len(conversation) - 2])


def bytes_of_one(path: Path) -> int:
    """What the prefix cache holds of one conversation."""
    driver = Driver(path)
    [conversation] = conversations(1)
    for _ in range(TURNS):
        seq_id = turn(driver, conversation)
        driver.run()
        conversation += driver.replies[seq_id].token_ids
    return driver.engine.cache_tree.used_bytes


def play(path: Path, driver: Driver, run: object) -> list[tuple[int, list[int]]]:
    """Three conversations in turn, without a pause. Returns each turn's cached tokens and its reply."""
    found = []
    open_ones = conversations(3)
    for _ in range(TURNS):
        for conversation in open_ones:
            seq_id = turn(driver, conversation)
            run()  # type: ignore[operator]
            reply = driver.replies[seq_id].token_ids
            conversation += reply
            found.append((driver.seqs[seq_id].num_cached_tokens, reply))
    return found


@pytest.mark.parametrize("architecture", cases(["qwen3", "qwen3_5", "gemma3_text"], ["qwen3_5"]))
def test_conversations_that_memory_has_no_room_for_go_on_from_disk(architecture: str, tmp_path: Path) -> None:
    path = checkpoint(architecture)
    large = Driver(path)
    expected = play(path, large, large.run)
    with started(path, tmp_path, cache_memory_bytes=bytes_of_one(path) * 5 // 4) as server:

        def run() -> None:
            server.run()
            server.disk.write_all(lambda: 30.0)

        found = play(path, server.driver, run)
        report = server.disk.report()
        assert [reply for _, reply in found] == [reply for _, reply in expected]
        assert all(few <= num for (num, _), (few, _) in zip(found, expected, strict=True))
        assert report.hits == 3 * (TURNS - 1)
        eventually(lambda: server.disk.tick(is_idle=True) or server.disk.reader.reserved_bytes == 0)
        assert server.engine.cache_tree.used_bytes <= server.engine.cache_tree.max_bytes


def test_a_preempted_sequence_reads_again_what_memory_has_evicted(tmp_path: Path) -> None:
    path = checkpoint("qwen3")
    prompts = [tuple(prompt) for prompt in conversations(2)]
    with started(path, tmp_path) as server:
        server.generate(*prompts)
    with started(path, tmp_path) as server:
        first, second = (server.driver.add(prompt, 24) for prompt in prompts)
        while len(server.driver.replies[second].token_ids) < 8:
            server.engine.wake()
            server.driver.step()
        scheduler = server.engine.scheduler
        scheduler._max_num_seqs = 1
        scheduler._preempt(server.driver.seqs[second])
        server.driver.step()
        server.engine.cache_tree.shrink_to(0)
        server.run()
        assert server.driver.seqs[second].num_preemptions == 1
        assert server.disk.report().hits == 3, "one of each sequence, and one after the preemption"
        for seq_id, prompt in zip((first, second), prompts, strict=True):
            assert server.driver.replies[seq_id].token_ids == plain_loop(path, prompt, 24)[0]


@pytest.mark.parametrize("is_read_first", [False, True])
def test_a_sequence_that_waits_reads_again_what_memory_has_evicted(is_read_first: bool, tmp_path: Path) -> None:
    """Another tenant has the only place. Memory loses what it held, or what was read, before the sequence gets one."""
    path = checkpoint("qwen3")
    other, prompt = (tuple(prompt) for prompt in conversations(2))
    with started(path, tmp_path) as server:
        server.generate(prompt)
    with started(path, tmp_path, driver=Driver(path, max_num_seqs=1)) as server:
        if not is_read_first:
            server.generate(prompt)
        hits = server.disk.report().hits
        server.driver.add(other, 60, tenant="ann")
        server.step()
        seq_id = server.driver.add(prompt, NUM_TOKENS, tenant="ben")
        while not server.driver.replies[0 if is_read_first else 1].token_ids or server.disk.reader.reading:
            server.step()
        assert server.disk.report().hits == hits + is_read_first and server.engine.scheduler.waiting
        server.engine.cache_tree.shrink_to(0)
        server.run()
        assert server.disk.report().hits == hits + is_read_first + 1
        assert server.driver.seqs[seq_id].receipt.disk_tokens >= 200
        assert server.driver.replies[seq_id].token_ids == plain_loop(path, prompt, NUM_TOKENS)[0]


@pytest.mark.parametrize("architecture", cases(["qwen3", "qwen3_5", "gemma3_text"], ["gemma3_text"]))
def test_a_conversation_that_outgrows_memory_keeps_the_beginning_that_fits(architecture: str, tmp_path: Path) -> None:
    """It does not push its own beginning out, and the beginning outlives the server."""
    path = checkpoint(architecture)
    [conversation] = conversations(1)
    with started(path, tmp_path, cache_memory_bytes=bytes_of_one(path) // 2) as server:
        for _ in range(2):
            server.driver.add(conversation, NUM_TOKENS, points=[200, 390])
            server.run()
            conversation += range(30, 55)
        cached = server.driver.seqs[1].num_cached_tokens
        assert 200 <= cached < 390 and server.disk.report().hits == 0
    with started(path, tmp_path) as server:
        seq_id = server.driver.add(conversation, NUM_TOKENS)
        server.run()
        assert server.driver.seqs[seq_id].receipt.disk_tokens >= 200


@pytest.mark.parametrize("architecture", cases(["qwen3", "qwen3_5"], ["qwen3_5"]))
def test_a_conversation_that_is_larger_than_the_folder_is_not_written_again_and_again(
    architecture: str, tmp_path: Path
) -> None:
    path, points = checkpoint(architecture), [100, 200, 300]
    [prompt] = conversations(1)
    with started(path, tmp_path / "whole") as server:
        server.driver.add(prompt, NUM_TOKENS, points=points)
        server.run()
    num_bytes = sum(file.stat().st_size for file in files(tmp_path / "whole"))
    with started(path, tmp_path / "half", cache_disk_bytes=num_bytes // 2) as server:
        for _ in range(3):
            server.driver.add(prompt, NUM_TOKENS, points=points)
            server.run()
            server.disk.write_all(lambda: 30.0)
        assert server.num_written < 3 * num_bytes
