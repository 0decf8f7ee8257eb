"""One folder of salts and checkpoints; what is cleared; images; a folder that comes and goes."""

import errno
import logging
import os
import random
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.disk.samples import folder
from tests.engine.test_disk_any_load import Server, files, started
from tests.support.checkpoints import checkpoint
from tests.support.engine_driver import Driver, plain_loop
from tests.support.running import eventually
from vllm_mlx.core.config import EngineConfig
from vllm_mlx.core.errors import ConfigError
from vllm_mlx.disk import reader
from vllm_mlx.disk.faults import InUse
from vllm_mlx.disk.kept import Kept, Memories
from vllm_mlx.engine import loading
from vllm_mlx.engine.loading import fingerprint, start_engine
from vllm_mlx.runner.checkpoint import find_checkpoint

PROMPT = tuple(7 + (5 * place * place + 3 * place) % 180 for place in range(400))
LONGER = (*PROMPT, 3, 5, 8)


def hold_reads(server: Server, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Keep the threads that read waiting until the event is set."""
    held, read_into = threading.Event(), server.folder.read_into
    monkeypatch.setattr(server.folder, "read_into", lambda *args: (held.wait(30), read_into(*args)))
    return held


@pytest.fixture
def path() -> Path:
    return checkpoint("qwen3")


def test_a_second_server_on_the_folder_goes_on_without_it_with_one_line(
    path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with started(path, tmp_path) as server:
        server.generate(PROMPT)
        second = loading.open_disk(EngineConfig(model=str(path), cache_dir=str(tmp_path), cache_disk_bytes=1 << 30))
        assert second is not None and second.folder is None
        [line] = [record.getMessage() for record in caplog.records if "Nothing is kept" in record.getMessage()]
        for word in (str(tmp_path), f"process {os.getpid()}", "--cache-dir"):
            assert word in line and word in str(second.report.off_reason)
        assert server.generate(LONGER) == [plain_loop(path, LONGER, 6)[0]]


def test_a_load_that_fails_frees_the_folder(tmp_path: Path) -> None:
    config = EngineConfig(model=str(tmp_path / "none"), cache_dir=str(tmp_path / "kept"), cache_disk_bytes=1 << 30)
    for _ in range(2):
        opened = loading.open_disk(config)
        assert opened is not None and opened.folder is not None
        with pytest.raises(ConfigError):
            start_engine(config, opened)


def test_salts_and_checkpoints_share_no_state_and_are_cleared_alone(path: Path, tmp_path: Path) -> None:
    with started(path, tmp_path) as server:
        for salt in ("ann", "ben"):
            server.generate(PROMPT, salt=salt)
    kept = files(tmp_path)
    with started(path, tmp_path, "other") as server:
        server.generate(LONGER, salt="ann")
        assert server.disk.report().hits == 0
    with started(path, tmp_path) as server:
        server.generate(LONGER, salt="cat")
        assert server.disk.report().hits == 0
        server.engine.clear_cache("ann")
        assert server.generate(LONGER, salt="ann") == [plain_loop(path, LONGER, 6)[0]]
        assert server.disk.report().hits == 0
        server.generate(LONGER, salt="ben")
        assert server.disk.report().hits == 1
    assert sum(file in kept for file in files(tmp_path)) == len(kept) // 2


def test_state_of_another_version_is_not_found_and_removed(path: Path, tmp_path: Path) -> None:
    for name in ("one-text-cpu-1", "two-text-cpu-1"):
        with started(path, tmp_path, name) as server:
            server.generate(PROMPT)
    kept = files(tmp_path)
    with started(path, tmp_path, "one-text-cpu-2") as server:
        assert server.generate(LONGER) == [plain_loop(path, LONGER, 6)[0]]
        assert server.disk.report().hits == 0
    left = files(tmp_path)
    assert len(set(kept) & set(left)) == len(kept) // 2, "those of another checkpoint stay"
    with started(path, tmp_path, "one-text-cpu-2") as server:
        server.generate(LONGER)
        assert server.disk.report().hits == 1


def test_versions_of_what_computes_state_are_part_of_its_fingerprint(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, model = find_checkpoint(str(path)), Driver(path).engine.runner.model
    before = fingerprint(checkpoint, model)
    for name in ("mlx", "mlx-lm"):
        with monkeypatch.context() as patching:
            patching.setattr(loading, "version", lambda asked, name=name: "0" if asked == name else version(asked))
            other = fingerprint(checkpoint, model)
        assert other != before and other.rpartition("-")[0] == before.rpartition("-")[0]


def test_what_is_read_or_written_while_it_is_cleared_leaves_no_file(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(path, tmp_path) as server:
        server.generate(PROMPT)
    with started(path, tmp_path) as server:
        held = hold_reads(server, monkeypatch)
        server.driver.add(LONGER, 6)
        server.driver.step()
        assert server.disk.reader.reading
        held.set()
        server.engine.clear_cache()
        assert not server.disk.reader.reading
        server.run()
        assert server.driver.replies[0].token_ids == plain_loop(path, LONGER, 6)[0]
        assert server.disk.report().hits == 0
        server.disk.tick(is_idle=True, is_last=True)
        assert server.disk.writer.is_writing
        server.engine.clear_cache()
        server.engine.cache_tree.clear()
    assert not files(tmp_path)


def test_a_sequence_that_leaves_frees_what_its_read_had_reserved(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(path, tmp_path) as server:
        server.generate(PROMPT)
    with started(path, tmp_path) as server:
        held = hold_reads(server, monkeypatch)
        seq_ids = [server.driver.add(LONGER, 6) for _ in range(2)]
        server.driver.step()
        assert server.disk.reader.reading == {seq_ids[0]}, "the second one waits for the first one's read"
        before = server.disk.reader.reserved_bytes
        server.engine.abort(seq_ids[:1])
        server.driver.step()
        held.set()
        assert before > 0 and server.disk.reader.reading <= {seq_ids[1]}
        server.run()
        assert server.driver.replies[seq_ids[1]].token_ids == plain_loop(path, LONGER, 6)[0]
        assert server.disk.reader.reserved_bytes == 0


@pytest.mark.parametrize(
    ("place", "error"),
    [("empty_arrays", RuntimeError("[malloc] Unable to allocate 8 bytes.")), ("segment_of", ValueError("unforeseen"))],
)
def test_an_error_of_a_read_keeps_no_sequence_waiting(
    path: Path, tmp_path: Path, error: Exception, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(path, tmp_path) as server:
        server.generate(PROMPT)

    def failing(*_: object) -> None:
        raise error

    with started(path, tmp_path) as server:
        monkeypatch.setattr(reader, place, failing)
        assert server.generate(LONGER, PROMPT) == [plain_loop(path, prompt, 6)[0] for prompt in (LONGER, PROMPT)]
        assert server.disk.report().hits == 0 and server.disk.reader.reserved_bytes == 0
        assert (server.disk.report().off_reason is None) is isinstance(error, RuntimeError)


def test_a_folder_that_goes_and_comes_back_is_used_again(
    path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root, away = tmp_path / "disk" / "cache", tmp_path / "away"
    root.mkdir(parents=True)
    with started(path, root) as server:
        server.generate(PROMPT)
    with started(path, root) as server, caplog.at_level(logging.WARNING):
        root.parent.rename(away)
        for number in range(3):
            assert server.generate((*PROMPT, number)) == [plain_loop(path, (*PROMPT, number), 6)[0]]
            server.engine.cache_tree.clear()
        lines = [record for record in caplog.records if "is gone" in record.getMessage()]
        assert len(lines) == 1 and server.disk.report().hits == 0
        away.rename(root.parent)
        server.generate(LONGER)
        assert server.disk.report().hits == 1


def read_only(called: Callable[..., int]) -> Callable[..., int]:
    """`os.open` where nothing may be written."""

    def opened(path: object, flags: int, *args: object, **kwargs: object) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        return called(path, flags, *args, **kwargs)

    return opened


def test_a_folder_that_can_no_longer_be_written_is_read(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with started(path, tmp_path) as server:
        server.generate(PROMPT)
    before = files(tmp_path)
    with started(path, tmp_path) as server, monkeypatch.context() as patching:
        patching.setattr(os, "open", read_only(os.open))
        assert server.generate(LONGER) == [plain_loop(path, LONGER, 6)[0]]
        server.disk.write_all(lambda: 5.0)
        assert server.disk.report().hits == 1 and server.disk.report().off_reason is None
        server.stop()
    assert files(tmp_path) == before
    lines = [record.getMessage() for record in caplog.records if "Read-only file system" in record.getMessage()]
    assert len(lines) == 1 and "Give this user the right to read and write it" in lines[0]


def test_threads_end_with_the_tier(path: Path, tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with started(path, tmp_path) as server:
        server.generate(PROMPT)
    with started(path, tmp_path) as server:
        server.driver.add(LONGER, 6)
        server.driver.step()
        server.stop(killed=True)
    eventually(lambda: {t for t in threading.enumerate() if t.name.startswith("disk-")} <= before)


def test_the_folder_is_free_only_when_what_is_remembered_is_written(path: Path, tmp_path: Path) -> None:
    with started(path, tmp_path) as server:
        memories = Memories.at(server.folder, "f1", cap_bytes=1 << 30)
        server.disk.close()
        with pytest.raises(InUse):
            folder(tmp_path)
        memories.responses.put("a", "", lambda: 1, num_bytes=1)
        memories.close()
        free = folder(tmp_path)  # as another server
        found: list[list[Kept]] = []
        again = Memories.at(free, "f1", cap_bytes=1 << 30)
        again.responses.restore(found.append)
        again.close()
        assert [value.name for value in found[0]] == ["a"]


def test_the_cap_is_kept_by_what_is_least_worth(path: Path, tmp_path: Path) -> None:
    rng = random.Random(3)
    prompts = [tuple(rng.randrange(1, 500) for _ in range(300)) for _ in range(6)]
    with started(path, tmp_path) as server:
        for prompt in prompts:
            server.generate(prompt)
    before = sum(file.stat().st_size for file in files(tmp_path))
    with started(path, tmp_path) as server:
        assert server.disk.store.make_room(before // 2) >= before // 2
        server.disk.close()
        left = sum(file.stat().st_size for file in files(tmp_path))
        assert 0 < left <= before - before // 2
        assert len(server.disk.store.index) == len(files(tmp_path))


def test_a_lower_cap_is_kept_from_the_start_on(path: Path, tmp_path: Path) -> None:
    rng = random.Random(4)
    with started(path, tmp_path) as server:
        for _ in range(4):
            server.generate(tuple(rng.randrange(1, 500) for _ in range(300)))
    cap = sum(file.stat().st_size for file in files(tmp_path)) // 2

    def is_kept(server: Server) -> bool:
        server.disk.tick(is_idle=True, wait_s=0.01)
        with suppress(FileNotFoundError):  # it was removed after the listing
            return sum(file.stat().st_size for file in files(tmp_path)) <= cap
        return False

    with started(path, tmp_path, cache_disk_bytes=cap) as server:
        eventually(lambda: is_kept(server))
        assert files(tmp_path)


def test_a_stop_in_the_middle_of_a_reply_leaves_what_was_computed(path: Path, tmp_path: Path) -> None:
    with started(path, tmp_path) as server:
        seq_id = server.driver.add(PROMPT, 200)
        while len(server.driver.replies[seq_id].token_ids) < 50:
            server.driver.step()
        reply = server.driver.replies[seq_id].token_ids
    again = (*PROMPT, *reply[:48], 3)
    with started(path, tmp_path) as server:
        assert server.generate(again) == [plain_loop(path, again, 6)[0]]
        assert server.disk.report().tokens_read >= len(PROMPT) + 48
