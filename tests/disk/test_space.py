"""The limits hold for all files, and a folder that cannot be used is an error with advice."""

import random
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.disk.samples import Specs, folder, numbers, on_disk, opened, read, run
from vllm_mlx.disk.faults import FolderUnusable, NoRoom
from vllm_mlx.disk.folder import Folder

BIG = [("keys", "U8", (300_000,))]  # next to which the database is small
ROOM = 250_000  # for the database


@pytest.fixture(scope="module", autouse=True)
def size(tmp_path_factory: pytest.TempPathFactory) -> int:
    """Bytes of the sample's file."""
    return folder(tmp_path_factory.mktemp("size")).add(run(), numbers(0, BIG)).file_bytes


def fill(place: Folder, count: int, *, first: int = 0, specs: Specs = BIG) -> list[str]:
    """Why each of `count` records was not written; "" for those that were."""
    reasons = []
    for seed in range(first, first + count):
        try:
            place.add(run(seed=seed), numbers(seed, specs))
        except NoRoom as error:
            reasons.append(error.limit)
        else:
            reasons.append("")
    return reasons


def test_the_cap_holds_for_all_files(tmp_path, size):
    place = folder(tmp_path)
    cap = place.usage().used_bytes + 3 * size + ROOM
    place.close()
    place = folder(tmp_path, max_bytes=cap)
    assert fill(place, 4) == ["", "", "", "cap"]
    assert on_disk(tmp_path) == place.usage().used_bytes <= cap
    place.remove(place.scan()[:1])
    assert fill(place, 2, first=3) == ["", "cap"]


def test_what_is_remembered_shares_the_limits_and_grows_at_the_cost_of_records(tmp_path, size):
    place = folder(tmp_path, daily_bytes=2 * size)
    assert place.charge(size) and fill(place, 2) == ["", "daily"]
    assert place.charge(1) and place.usage().written_bytes == 2 * size + 1
    full = folder(tmp_path / "full", max_bytes=1)
    assert full.charge(1) and full.usage().excess_bytes > 0
    assert not folder(tmp_path / "read", daily_bytes=0).charge(1)


def test_excess_is_what_must_be_removed(tmp_path):
    with opened(tmp_path) as place:
        fill(place, 3)
        used_bytes = place.usage().used_bytes
    for limits, excess in (({"max_bytes": used_bytes}, 0), ({"max_bytes": used_bytes - 7}, 7),
                           ({"floor_bytes": 1 << 60}, used_bytes)):  # fmt: skip
        with opened(tmp_path, **limits) as place:
            list(place.scan())
            moved = place.usage().used_bytes - used_bytes
            assert place.usage().excess_bytes == pytest.approx(max(0, excess + moved), abs=abs(moved))


def test_free_space_is_left(tmp_path):
    place = folder(tmp_path, floor_bytes=1 << 60)
    assert fill(place, 1) == ["free"] and not list(tmp_path.rglob("*.kv"))


def test_the_daily_budget_survives_a_restart(tmp_path, size):
    now = [5 * 86_400.0]
    limits = {"daily_bytes": 3 * size, "clock": lambda: now[0]}
    with opened(tmp_path, **limits) as place:
        assert fill(place, 2) == ["", ""]
    with opened(tmp_path, **limits) as place:
        place.remove(list(place.scan()))  # what was written stays written
        assert fill(place, 2, first=9) == ["", "daily"] and place.usage().written_bytes == 3 * size
        now[0] += 86_400
        assert fill(place, 4, first=9) == ["", "", "", "daily"]


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
    """Three days: writes, evictions, failures, restarts."""
    daily, rng, now, seed = 50 * size, random.Random(1), [0.0], 0
    cap = 20 * size + 20 * ROOM
    limits = {"max_bytes": cap, "daily_bytes": daily, "clock": lambda: now[0]}
    place, written = folder(tmp_path, **limits), dict.fromkeys(range(3), 0)
    while now[0] < 3 * 86_400 - 900:
        now[0] += rng.uniform(60, 900)
        seed += 1
        try:
            written[int(now[0] // 86_400)] += place.add(run(seed=seed), numbers(seed, BIG)).file_bytes
        except NoRoom as error:
            if error.limit == "cap":
                place.remove(list(place.scan())[: rng.randrange(1, 9)])
        if rng.random() < 0.02:
            place.close()
            place = folder(tmp_path, **limits)
            list(place.scan())
        records = sum(file.stat().st_size for file in tmp_path.rglob("*.kv"))
        assert records <= cap
    assert set(written.values()) == {daily}


def test_a_full_disk_lets_records_be_removed(tmp_path):
    """The process may not make any file longer, so that SQLite cannot write."""
    code = """
import resource, sys
from contextlib import suppress
from pathlib import Path
from tests.disk.samples import folder, numbers, run
from vllm_mlx.disk.folder import look
from vllm_mlx.disk.faults import FolderUnusable, NoRoom
place = folder(Path(sys.argv[1]))
records = [place.add(run(seed=seed), numbers()) for seed in range(3)]
resource.setrlimit(resource.RLIMIT_FSIZE, (1, 1))
try:
    place.add(run(seed=9), numbers())
except NoRoom as error:
    print(error.limit)
for use in (lambda: place.note_use(records, 5.0), lambda: place.remove(records[1:])):
    with suppress(FolderUnusable, NoRoom):
        use()
place.note_model("model", "Name")
print(len(place.scan()), look(place.root).models)
print(len(list((Path(sys.argv[1]) / "records").iterdir())), place.usage().num_records)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout == "disk\n1 {}\n1 1\n"
    with opened(tmp_path) as place:
        assert len(list(place.scan())) == 1


@pytest.mark.parametrize("root", ["file", "file/below", "link"])
def test_a_root_that_is_no_folder_cannot_be_used(tmp_path, root):
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere" / "deep")
    with pytest.raises(FolderUnusable):
        folder(tmp_path / root)


def test_the_limit_of_open_files_is_not_reached(tmp_path):
    place = folder(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/dev/fd").iterdir())) + 10, hard))
        assert fill(place, 20) == [""] * 20
        for seed, record in enumerate(list(place.scan())):
            assert len(read(place, record)) == 1, seed
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_folder_that_cannot_be_opened_is_left_free(tmp_path):
    (tmp_path / "index.sqlite").mkdir()
    with pytest.raises(FolderUnusable):
        folder(tmp_path)
    (tmp_path / "index.sqlite").rmdir()
    with opened(tmp_path) as place:
        assert place.add(run(), numbers())
