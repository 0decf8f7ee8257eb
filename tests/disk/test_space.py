"""The limits hold for all servers together, and a folder that cannot be used is an error with advice."""

import errno
import fcntl
import os
import random
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.disk.samples import expected, folder, numbers, on_disk, read, run
from vllm_mlx.disk.folder import Folder
from vllm_mlx.disk.own_files import LEDGER
from vllm_mlx.disk.space import FolderUnusable, NoRoom


@pytest.fixture(scope="module", autouse=True)
def size(tmp_path_factory: pytest.TempPathFactory) -> int:
    """Bytes of the sample's file."""
    return folder(tmp_path_factory.mktemp("size")).add(run(), numbers()).file_bytes


def fill(place: Folder, count: int, *, first: int = 0) -> list[str]:
    """Why each of `count` records was not written; "" for those that were."""
    reasons = []
    for seed in range(first, first + count):
        try:
            place.add(run(seed=seed), numbers(seed))
        except NoRoom as error:
            reasons.append(error.limit)
        else:
            reasons.append("")
    return reasons


def test_the_cap_holds_for_all_files(tmp_path, size):
    cap = 3 * size + 10
    place, other = folder(tmp_path, max_bytes=cap), folder(tmp_path, max_bytes=cap)
    assert fill(place, 2) + fill(other, 3, first=2) == ["", "", "", "cap", "cap"]
    assert on_disk(tmp_path) == place.usage().used_bytes == cap - 10
    place.remove(next(place.scan()))
    assert fill(other, 2, first=3) == ["", "cap"]


def test_files_removed_by_hand_make_room(tmp_path, size):
    place = folder(tmp_path, max_bytes=size)
    assert fill(place, 2) == ["", "cap"]
    next(tmp_path.rglob("*.safetensors")).unlink()
    assert fill(place, 2) == ["", "cap"]


def test_files_that_came_by_themselves_count_from_the_next_start_on(tmp_path, size):
    place = folder(tmp_path, max_bytes=2 * size)
    (tmp_path / "index.sqlite").write_bytes(bytes(size))
    list(place.scan())
    assert fill(place, 2) == ["", "cap"]


def test_journals_share_the_limits_and_grow_at_the_cost_of_records(tmp_path, size):
    place = folder(tmp_path, max_bytes=10 * size, daily_bytes=2 * size)
    assert place.charge(size) and fill(place, 2) == ["", "daily"]
    assert not place.charge(1) and place.usage().written_bytes == 2 * size
    full = folder(tmp_path, max_bytes=size - 1)
    assert full.charge(1) and full.usage().excess_bytes > 0
    assert not folder(tmp_path, floor_bytes=1 << 60).charge(1)
    assert not folder(tmp_path / "missing" / "deep" / "x").charge(10**12)


def test_excess_is_what_must_be_removed(tmp_path, size):
    fill(folder(tmp_path), 3)
    used_bytes = 3 * size
    assert folder(tmp_path, max_bytes=used_bytes).usage().excess_bytes == 0
    assert folder(tmp_path, max_bytes=used_bytes - 7).usage().excess_bytes == 7
    assert folder(tmp_path, floor_bytes=1 << 60).usage().excess_bytes == used_bytes


def test_free_space_is_left(tmp_path, size):
    free_bytes = folder(tmp_path).usage().free_bytes
    place = folder(tmp_path, floor_bytes=free_bytes + (1 << 40))
    assert fill(place, 1) == ["free"] and on_disk(tmp_path) == 0


def test_the_daily_budget_is_shared_and_survives_a_restart(tmp_path, size):
    now = [5 * 86_400.0]
    servers = [folder(tmp_path, daily_bytes=3 * size, clock=lambda: now[0]) for _ in range(2)]
    assert fill(servers[0], 2) + fill(servers[1], 2, first=2) == ["", "", "", "daily"]
    again = folder(tmp_path, daily_bytes=3 * size, clock=lambda: now[0])
    for record in list(again.scan()):
        again.remove(record)  # what was written stays written
    assert fill(again, 1, first=9) == ["daily"] and again.usage().written_bytes == 3 * size
    now[0] += 86_400
    assert fill(again, 4, first=9) == ["", "", "", "daily"]


def test_a_clock_that_is_put_back_gives_no_second_budget_and_locks_nothing(tmp_path, size):
    now = [10 * 86_400.0]
    place = folder(tmp_path, daily_bytes=size, clock=lambda: now[0])
    seeds = iter(range(100))
    day = 86_400.0
    written = []
    for now[0] in (10 * day, 11 * day, 10 * day, 9 * day, 11 * day, 9000 * day, 11.5 * day, 12 * day, 12.9 * day):
        written += fill(place, 1, first=next(seeds))
    assert written == ["", "", "daily", "", "daily", "", "daily", "", "daily"]


def test_limits_hold_under_a_days_load(tmp_path, size):
    """Two servers with a clock of their own, for three days: writes, evictions, failures, restarts."""
    cap, daily = 20 * size, 50 * size
    rng, now, seed = random.Random(1), [0.0], 0
    servers = [folder(tmp_path, max_bytes=cap, daily_bytes=daily, clock=lambda: now[0]) for _ in range(2)]
    written: dict[int, int] = {}
    while now[0] < 3 * 86_400 - 900:
        now[0] += rng.uniform(60, 900)
        place = rng.choice(servers)
        seed += 1
        try:
            written[int(now[0] // 86_400)] = (
                written.get(int(now[0] // 86_400), 0) + place.add(run(seed=seed), numbers(seed)).file_bytes
            )
        except NoRoom as error:
            if error.limit == "cap":
                for record in list(place.scan())[: rng.randrange(1, 9)]:
                    place.remove(record)
        if rng.random() < 0.02:
            servers[0] = folder(tmp_path, max_bytes=cap, daily_bytes=daily, clock=lambda: now[0])
        assert on_disk(tmp_path) <= cap
    assert set(written) == {0, 1, 2} and set(written.values()) == {daily}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_full_disk_is_no_room_and_leaves_nothing(tmp_path, size, monkeypatch, number, after):
    place, calls = folder(tmp_path), []
    fill(place, 1)
    before, write = on_disk(tmp_path), os.write

    def full(file: int, data: memoryview) -> int:
        calls.append(0)
        if len(calls) > after:
            raise OSError(number, os.strerror(number))
        return write(file, data)

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        assert fill(place, 1, first=1) == ["disk"]
    assert on_disk(tmp_path) == place.usage().used_bytes == before
    assert size <= place.usage().written_bytes < 2 * size
    assert fill(place, 1, first=1) == [""]


def test_a_full_disk_lets_records_be_removed(tmp_path, monkeypatch):
    """Some file systems need room even to change a byte of a file."""
    place = folder(tmp_path)
    fill(place, 2)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    records = list(place.scan())
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        for record in records:
            place.remove(record)
    assert list(place.scan()) == [] and place.usage().used_bytes == on_disk(tmp_path) == 0


def test_a_real_limit_of_the_system_is_no_room(tmp_path):
    """A process that may write files of 64 KB only."""
    code = """
import resource, sys
from pathlib import Path
from tests.disk.samples import folder, numbers, run
from vllm_mlx.disk.space import NoRoom
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
place = folder(Path(sys.argv[1]))
small = place.add(run(), numbers())
try:
    place.add(run(seed=1), [("big", "U8", (100_000,), memoryview(bytes(100_000)))])
except NoRoom as error:
    print(error.limit, list(place.scan()) == [small], place.usage().used_bytes == small.file_bytes)
"""
    printed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert printed.stdout == "disk True True\n"


USES: dict[str, Callable[[Folder], object]] = {
    "scan": lambda place: list(place.scan()),
    "changes": lambda place: place.changes(),
    "add": lambda place: place.add(run(seed=1), numbers(1)),
    "usage": lambda place: place.usage(),
}


@pytest.mark.parametrize("use", USES)
def test_a_folder_that_is_gone_works_again_when_it_is_back(tmp_path, use):
    """As when a disk is unplugged: the folder above it is gone too, and is not made in its place."""
    (tmp_path / "disk").mkdir()
    place = folder(tmp_path / "disk" / "cache")
    record = place.add(run(), numbers())
    (tmp_path / "disk").rename(tmp_path / "unplugged")
    with pytest.raises(FolderUnusable, match=str(tmp_path)):
        USES[use](place)
    for gone in (lambda: read(place, record), lambda: place.remove(record)):
        with pytest.raises(FolderUnusable):
            gone()
    assert not (tmp_path / "disk").exists()
    (tmp_path / "unplugged").rename(tmp_path / "disk")
    USES[use](place)
    assert record in place.scan() and read(place, record) == expected()


def test_a_folder_that_was_deleted_is_made_again(tmp_path):
    place = folder(tmp_path / "cache")
    record = place.add(run(), numbers())
    place.path_of(record).unlink()
    place.path_of(record).parent.rmdir()
    (tmp_path / "cache" / LEDGER).unlink()
    (tmp_path / "cache").rmdir()
    assert place.add(run(), numbers()).name == record.name


@pytest.mark.parametrize("root", ["file", "file/below", "link"])
def test_a_root_that_is_no_folder_cannot_be_used(tmp_path, root):
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere" / "deep")
    place = folder(tmp_path / root)
    for use in USES.values():
        with pytest.raises(FolderUnusable):
            use(place)


def test_a_read_only_folder_serves_what_it_has(as_user):
    printed = as_user(
        """
place = folder(root)
record = place.add(run(), numbers())
damaged = place.add(run(seed=1), numbers(1))
with place.path_of(damaged).open("r+b") as file:
    file.seek(damaged.tensors[0].offset)
    file.write(bytes(8))
for path in (root, place.path_of(record).parent):
    path.chmod(0o500)
(root / "usage.json").chmod(0o400)
place = folder(root)
records = list(place.scan())
print(len(records), read(place, record) == expected(), place.usage().num_records)
for use in (lambda: place.add(run(seed=2), numbers()), lambda: place.remove(record), lambda: read(place, damaged)):
    try:
        use()
    except (FolderUnusable, Damaged) as error:
        print(type(error).__name__)
place.touch(record)
for path in (root, place.path_of(record).parent):
    path.chmod(0o700)
(root / "usage.json").chmod(0o600)
place.add(run(seed=2), numbers())
print(len(list(place.scan())))
"""
    )
    assert printed == "2 True 2\nFolderUnusable\nFolderUnusable\nDamaged\n3\n"


def test_files_of_another_user_are_left_alone(as_user):
    printed = as_user(
        """
place = folder(root)
record, other = place.add(run(), numbers()), place.add(run(seed=1), numbers())
place.path_of(other).chmod(0)
place = folder(root)
print(list(place.scan()) == [record], place.usage().other_bytes == other.file_bytes)
try:
    read(place, other)
except FolderUnusable:
    print("unusable", place.path_of(other).exists())
"""
    )
    assert printed == "True True\nunusable True\n"


@pytest.fixture
def as_user() -> Iterator[Callable[[str], str]]:
    """Runs code in a process that is not root, whom no right is missing; returns what it prints."""
    begin = """
import os, sys
from pathlib import Path
from tests.disk.samples import expected, folder, numbers, read, run
from vllm_mlx.disk.record import Damaged
from vllm_mlx.disk.space import FolderUnusable
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
root = Path(sys.argv[1])
"""

    def runs(code: str) -> str:
        if os.getuid() == 0:
            os.chown(root, 65534, 65534)
        done = subprocess.run([sys.executable, "-c", begin + code, root], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    with tempfile.TemporaryDirectory() as root:  # the folders of `tmp_path` are closed to other users
        yield runs


def test_drafts_of_the_dead_are_removed_and_drafts_of_the_living_stay(tmp_path, size):
    place = folder(tmp_path)
    code = """
import os, sys, time
from pathlib import Path
from tests.disk.samples import folder, run, numbers
def slow():
    yield memoryview(bytes(4))
    print("begun", flush=True)
    time.sleep(600)
folder(Path(sys.argv[1])).add(run(), [("slow", "U8", (8,), slow())])
"""
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"begun\n"
        [draft] = tmp_path.rglob("*.draft")
        reserved, records, is_kept = place.usage().used_bytes, list(place.scan()), draft.exists()
        counted, written = place.usage().used_bytes, on_disk(tmp_path)
        process.kill()
    assert records == [] and is_kept and counted == reserved > written
    assert list(place.scan()) == [] and not draft.exists() and not draft.parent.exists()
    assert place.usage().used_bytes == 0 and place.usage().written_bytes > 0


def test_without_locks_only_old_drafts_are_removed(tmp_path, monkeypatch):
    def unknown(*_: object) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(fcntl, "flock", unknown)
    place = folder(tmp_path)
    assert fill(place, 2) == ["", ""]
    drafts = [
        next(tmp_path.rglob("*.safetensors")).with_name(f".{'a' * 40}-7-{number:016x}.draft") for number in (1, 2)
    ]
    for draft in drafts:
        draft.write_bytes(b"1")
    os.utime(drafts[1], (0, 0))
    assert len(list(place.scan())) == 2 and [draft.exists() for draft in drafts] == [True, False]


def test_the_limit_of_open_files_is_not_reached(tmp_path):
    place = folder(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/dev/fd").iterdir())) + 4, hard))
        assert fill(place, 20) == [""] * 20
        for seed, record in enumerate(list(place.scan())):
            assert len(read(place, record)) == 5, seed
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
