"""One process owns a folder, until it ends in whatever way; a volume without locks is not used."""

import errno
import fcntl
import os
import shutil
import subprocess
import sys

import pytest

from tests.disk.samples import expected, folder, numbers, opened, read, run
from vllm_mlx.disk.faults import FolderUnusable, InUse

CODE = """
import sys, time
from pathlib import Path
from tests.disk.samples import folder, numbers, run
place = folder(Path(sys.argv[1]))
print(place.add(run(), numbers()).name, flush=True)
time.sleep(600)
"""


def test_a_second_server_is_refused_until_the_first_one_is_killed(tmp_path):
    with subprocess.Popen([sys.executable, "-c", CODE, tmp_path], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        name = process.stdout.readline().strip()
        with pytest.raises(InUse) as caught:
            folder(tmp_path)
        for word in (str(tmp_path), f"process {process.pid}", "--cache-dir"):
            assert word in str(caught.value)
        process.kill()
    with opened(tmp_path) as place:
        [record] = place.scan()
        assert record.name == name and read(place, record) == expected()


def test_a_volume_without_locks_is_not_used(tmp_path, monkeypatch):
    def unknown(*_: object) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(fcntl, "flock", unknown)
    with pytest.raises(FolderUnusable, match=r"knows no locks.*--cache-dir"):
        folder(tmp_path)


def test_a_folder_that_was_made_again_has_an_owner_again(tmp_path):
    root = tmp_path / "cache"
    place = folder(root)
    place.add(run(), numbers())
    shutil.rmtree(root)
    again = place.add(run(), numbers())
    with pytest.raises(InUse):
        folder(root)
    shutil.rmtree(root)
    with opened(root) as other:
        with pytest.raises(InUse):
            place.add(run(), numbers())
        other.add(run(), numbers())
    assert read(place, place.add(run(), numbers())) == expected() and not place.path_of(again).exists()


def test_a_closed_folder_is_free_and_a_later_use_owns_it_again(tmp_path):
    place = folder(tmp_path)
    place.close()
    folder(tmp_path).close()
    place.add(run(), numbers())
    with pytest.raises(InUse):
        folder(tmp_path)
    place.close()
    folder(tmp_path).close()
