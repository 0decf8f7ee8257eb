"""A folder's account survives everything, and its lock ends with the process that holds it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_mlx.disk.ledger import Account, Ledger, day_of, lock


def test_an_account_is_kept(tmp_path):
    with Ledger(tmp_path / "a").locked() as account:
        assert account == Account()
        account.used_bytes = 5
        account.charge(7, 3)
    assert Ledger(tmp_path / "a").peek() == Account(5, {7: 3})
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600


def test_what_an_error_leaves_is_kept(tmp_path):
    with pytest.raises(ZeroDivisionError), Ledger(tmp_path / "a").locked() as account:
        account.charge(7, 3)
        1 / 0  # noqa: B018
    assert Ledger(tmp_path / "a").peek().written == {7: 3}


NONSENSE = [b"", b"{}", b"[1]", b"null", b'{"used_bytes": 1}', b"\xff" * 4096, b"\0" * 4096,
            b'{"used_bytes": "x", "written": {}}', b'{"used_bytes": 1, "written": {"a": 2}}']  # fmt: skip


@pytest.mark.parametrize("content", NONSENSE)
def test_a_file_that_makes_no_sense_counts_as_none(tmp_path, content):
    (tmp_path / "a").write_bytes(content)
    assert Ledger(tmp_path / "a").peek() == Account()
    with Ledger(tmp_path / "a").locked() as account:
        account.charge(1, 2)
    assert Ledger(tmp_path / "a").peek().written == {1: 2}


def test_a_link_in_its_place_is_not_followed(tmp_path):
    (tmp_path / "other").write_bytes(b"kept")
    (tmp_path / "a").symlink_to(tmp_path / "other")
    with pytest.raises(OSError), Ledger(tmp_path / "a").locked():
        pass
    assert (tmp_path / "other").read_bytes() == b"kept"


def test_only_the_last_days_are_kept():
    account = Account()
    for day in range(100):
        account.charge(day, 1)
        account.charge(0, 1)  # is in use
    assert len(account.written) == 32 and account.written[0] == 101 and 99 in account.written


def test_bytes_are_never_negative():
    account = Account(5, {1: 2})
    account.add(-9)
    account.charge(1, -9)
    assert account == Account(0, {1: 0})
    account = Account()
    account.add(5)
    assert account.used_bytes is None


def test_days():
    assert [day_of(now) for now in (0, 86_399, 86_400, 1e9)] == [0, 0, 1, 11574]


def test_changes_of_many_processes_all_count(tmp_path):
    code = """
import sys
from pathlib import Path
from vllm_mlx.disk.ledger import Ledger
for _ in range(200):
    with Ledger(Path(sys.argv[1])).locked() as account:
        account.charge(1, 1)
"""
    processes = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "a")]) for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert Ledger(tmp_path / "a").peek().written == {1: 600}


def test_a_lock_ends_with_its_process(tmp_path):
    path = tmp_path / "a"
    code = """
import os, sys, time
from vllm_mlx.disk.ledger import lock
lock(os.open(sys.argv[1], os.O_RDWR | os.O_CREAT))
print("locked", flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        was_free = is_free(path)
        process.kill()
    assert not was_free and is_free(path)


def is_free(path: Path) -> bool:
    file = os.open(path, os.O_RDWR)
    try:
        return lock(file, wait=False)
    finally:
        os.close(file)
