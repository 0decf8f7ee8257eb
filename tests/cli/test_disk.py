"""`vllm-mlx cache --disk` over a folder of records that no server wrote."""

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import address, refusal, run, served
from tests.support.rows import cases
from vllm_mlx.cli.disk import age
from vllm_mlx.demo import demo_path
from vllm_mlx.disk.folder import Folder
from vllm_mlx.disk.kept import Journals
from vllm_mlx.disk.record import Header, Record
from vllm_mlx.runner.checkpoint import Checkpoint

DAY_S = 86_400
TENSOR_BYTES = 4096
FOREIGN = "f" * 32 + "-text"


def demo_fingerprint() -> str:
    return Checkpoint(demo_path(), {}).fingerprint() + "-text"


def folder_at(root: Path) -> Folder:
    return Folder(root, max_bytes=sys.maxsize, daily_bytes=sys.maxsize, floor_bytes=0)


def add(folder: Folder, parent: Record | None, ids: list[int], *, start: int | None = None, **header: Any) -> Record:
    """A run of token ids, or a state if there are none."""
    fields = {"fingerprint": FOREIGN, "salt": ""} | header
    begins = 0 if parent is None else parent.header.end if start is None else start
    return folder.add(
        Header(
            kind="run" if ids else "state", parent="" if parent is None else parent.name, start=begins,
            words=b"".join(token_id.to_bytes(8, "big") for token_id in ids), layout={}, s_per_token=0.001, rule={},
            **fields,
        ),
        [("keys.0", "U8", (TENSOR_BYTES,), memoryview(random.Random(len(ids)).randbytes(TENSOR_BYTES)))],
    )  # fmt: skip


def filled(root: Path) -> dict[str, Record]:
    """Two conversations that part at token 3, one with a snapshot, and one with a salt, used 40 days ago."""
    folder = folder_at(root)
    first = add(folder, None, [11, 12, 13, 14])
    snapshot = add(folder, first, [])
    long = add(folder, first, [15, 16])
    short = add(folder, first, [21], start=3)
    salted = add(folder, None, [31, 32], salt="ann/")
    old_s = salted.used_s - 40 * DAY_S
    os.utime(folder.path_of(salted), (old_s, old_s))
    return {"first": first, "snapshot": snapshot, "long": long, "short": short, "salted": salted}


def remember(root: Path) -> None:
    journals = Journals(root / "index.sqlite")
    replies = journals.open("replies", FOREIGN)
    replies.restore(lambda _: None)
    for name, salt in (("one", "ann/"), ("two", "ben/")):
        replies.put(name, salt, lambda name=name: name, num_bytes=3)
    journals.close()


def disk(root: Path, *arguments: str, **variables: str) -> Any:
    return run("cache", "--disk", "--cache-dir", str(root), *arguments, **variables)


def listed(root: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    """The conversations by the number of their tokens."""
    result = disk(root, "--json", *arguments)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    return {fields["tokens"]: fields for place in found["checkpoints"] for fields in place["conversations"]}


def files(root: Path) -> set[str]:
    return {file.stem for file in root.rglob("*.safetensors")}


def test_conversations_are_listed_with_what_they_take(tmp_path: Path) -> None:
    records = filled(tmp_path)
    found = listed(tmp_path)
    sizes = {name: record.file_bytes for name, record in records.items()}
    assert found.keys() == {6, 4, 2}
    assert found[6]["bytes"] == sizes["first"] + sizes["snapshot"] + sizes["long"]
    assert found[6]["own_bytes"] == sizes["snapshot"] + sizes["long"] and found[6]["snapshots"] == 1
    assert found[4]["own_bytes"] == sizes["short"] and found[4]["snapshots"] == 0
    assert (found[2]["salt"], found[6]["salt"]) == ("ann/", "")
    assert found[2]["age_s"] > 39 * DAY_S
    shown = disk(tmp_path)
    assert shown.returncode == 0 and "checkpoint ffffffff: 3 conversations" in shown.stdout
    assert "40 days ago" in shown.stdout and found[6]["id"] in shown.stdout and str(tmp_path) in shown.stdout
    assert "5 files" in shown.stdout


def test_a_server_says_what_it_keeps_and_the_command_finds_it(tmp_path: Path) -> None:
    with served("demo", "--cache-disk", "1GB", "--cache-dir", str(tmp_path)) as (process, printed):
        said = "".join(printed.split())  # a long path is divided between lines
        assert f"conversationsarekeptin{tmp_path},upto1.0GB" in said
        assert run("chat", "What is 2 + 3?", "--url", address(printed), "--no-thinking").returncode == 0
        process.terminate()
        assert process.wait(60) == 0
    shown = disk(tmp_path)
    assert "demo: 1 conversation" in shown.stdout and disk(tmp_path, "--verify").returncode == 0


def everything(root: Path) -> dict[str, tuple[bytes, int]]:
    """The content and the time of the last change of all that lies below a folder."""
    return {
        str(path.relative_to(root)): (path.read_bytes() if path.is_file() else b"", path.lstat().st_mtime_ns)
        for path in (root, *root.rglob("*"))
    }


@pytest.fixture
def strangers(tmp_path: Path) -> Path:
    """A folder of somebody else's, with files whose names are like those of a cache."""
    root = tmp_path / "documents"
    for name in ("usage.json", "notes.journal", "work/diary.v1.journal", "work/x.safetensors", "CACHEDIR.TAG"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("mine")
    return root


KINDS = ("missing", "a file", "below a file", "empty", "of others", "a link to nothing")
CHANGES = [("--verify",), ("--clear", "--yes"), ("--clear", "--salt", "a", "--yes")]


@pytest.mark.parametrize("kind", cases(KINDS, ["a file", "of others"]))
def test_what_is_no_cache_is_named_and_left_as_it_is(tmp_path: Path, strangers: Path, kind: str) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    root, why = {
        "missing": (tmp_path / "no folder", "there is no folder "),
        "a file": (tmp_path / "file", " is not a folder"),
        "below a file": (tmp_path / "file" / "folder", "there is no folder "),
        "empty": (tmp_path / "empty", " is not a cache of vllm-mlx"),
        "of others": (strangers, " is not a cache of vllm-mlx"),
        "a link to nothing": (tmp_path / "link", "there is no folder "),
    }[kind]
    before = everything(tmp_path)
    for arguments in CHANGES if kind in ("missing", "of others") else CHANGES[1:2]:
        line = refusal("cache", "--disk", "--cache-dir", str(root), *arguments)
        assert line.startswith("vllm-mlx: Nothing is kept on disk: ") and why in line and str(root) in line
    shown = disk(root)
    assert shown.returncode == 0 and why in shown.stdout and str(root) in shown.stdout
    assert listed(root) == {}
    assert everything(tmp_path) == before


def test_looking_changes_nothing(tmp_path: Path) -> None:
    """Not even what a server would remove: damaged records, ones whose beginning is gone, drafts of the dead."""
    root = tmp_path / "cache"
    records = filled(root)
    path_of = folder_at(root).path_of
    (root / "usage.json").unlink()
    damaged = bytearray(path_of(records["salted"]).read_bytes())
    damaged[20] ^= 1
    path_of(records["salted"]).write_bytes(damaged)
    path_of(records["first"]).unlink()
    draft = path_of(records["long"]).with_name(f".{'1' * 40}-4096-{'2' * 16}.draft")
    draft.write_bytes(b"half")
    (root / "holiday.jpg").write_bytes(bytes(10**6))
    (root / "holidays").mkdir()
    (root / "holidays" / "film.mp4").write_bytes(bytes(10**6))
    before = everything(tmp_path)
    shown = disk(root)
    assert shown.returncode == 0 and "1 files are damaged: --verify names and removes them." in shown.stdout
    assert json.loads(disk(root, "--json").stdout)["used_bytes"] == 4096 + sum(
        path_of(records[name]).stat().st_size for name in ("snapshot", "long", "short", "salted")
    )
    assert "will be removed" in refusal("cache", "--disk", "--cache-dir", str(root), "--clear", code=2)
    assert everything(tmp_path) == before


def test_clearing_removes_all_that_is_the_caches_and_nothing_else(tmp_path: Path, strangers: Path) -> None:
    (strangers / "usage.json").unlink()
    filled(strangers)
    remember(strangers)
    others = {name: found for name, found in everything(strangers).items() if found[0] == b"mine" or name == "work"}
    line = refusal("cache", "--disk", "--cache-dir", str(strangers), "--clear", code=2)
    assert "5 files with" in line and "Add --yes" in line
    assert json.loads(disk(strangers, "--clear", "--yes", "--json").stdout)["removed_files"] == 5
    left = everything(strangers)
    assert {name: left[name] for name in others} == others
    assert left.keys() == others.keys() | {".", "index.sqlite", "usage.json"}


def test_a_folder_through_a_link_is_cleared(tmp_path: Path) -> None:
    filled(tmp_path / "cache")
    (tmp_path / "link").symlink_to(tmp_path / "cache")
    assert disk(tmp_path / "link", "--clear", "--yes").returncode == 0
    assert files(tmp_path / "cache") == set() and (tmp_path / "link").is_symlink()


def test_what_was_damaged_at_its_beginning_is_found_and_named(tmp_path: Path) -> None:
    records = filled(tmp_path)
    path = folder_at(tmp_path).path_of(records["salted"])
    content = bytearray(path.read_bytes())
    content[20] ^= 1
    path.write_bytes(content)
    bad = disk(tmp_path, "--verify", "--json")
    assert bad.returncode == 1
    found = json.loads(bad.stdout)
    assert [fault["file"] for fault in found["damaged"]] == [str(path)]
    assert (found["files"], found["unread"], path.exists()) == (5, 0, False)


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")
def test_a_folder_without_rights_is_one_line(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    filled(root)
    root.chmod(0)
    try:
        for arguments in ((), *CHANGES):
            assert "Permission denied" in refusal("cache", "--disk", "--cache-dir", str(root), *arguments)
            assert "Permission denied" in refusal("cache", "--disk", "--cache-dir", str(root / "below"), *arguments)
    finally:
        root.chmod(0o700)


def test_verify_finds_each_damaged_byte(tmp_path: Path) -> None:
    records = filled(tmp_path)
    good = disk(tmp_path, "--verify")
    assert (good.returncode, "Every byte is as it was written." in good.stdout) == (0, True)
    path = folder_at(tmp_path).path_of(records["short"])
    content = bytearray(path.read_bytes())
    content[-TENSOR_BYTES // 2] ^= 1
    path.write_bytes(content)
    bad = disk(tmp_path, "--verify", "--json")
    assert bad.returncode == 1
    assert [fault["file"] for fault in json.loads(bad.stdout)["damaged"]] == [str(path)]
    assert files(tmp_path) == {record.name for name, record in records.items() if name != "short"}


def test_clear_removes_all_or_one_salt(tmp_path: Path) -> None:
    records = filled(tmp_path)
    remember(tmp_path)

    def remembered() -> bytes:
        return b"".join(file.read_bytes() for file in tmp_path.glob("index.sqlite*"))

    assert b"ann/" in remembered() and b"ben/" in remembered()
    assert disk(tmp_path, "--clear", "--salt", "ann/", "--yes").returncode == 0
    assert files(tmp_path) == {record.name for name, record in records.items() if name != "salted"}
    assert b"ann/" not in remembered() and b"ben/" in remembered()
    freed = json.loads(disk(tmp_path, "--clear", "--yes", "--json").stdout)
    assert freed["removed_files"] == 4
    assert files(tmp_path) == set() and b"ben/" not in remembered()


def test_nothing_is_removed_without_a_yes(tmp_path: Path) -> None:
    filled(tmp_path)
    before = files(tmp_path)
    line = refusal("cache", "--disk", "--cache-dir", str(tmp_path), "--clear", code=2)
    assert "will be removed" in line and "Add --yes" in line
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--verify",), "--verify is about the files on disk: give it with --disk"),
        (("--salt", "x", "--clear"), "--salt is about the files on disk"),
        (("--disk", "--verify", "--clear"), "--verify and --clear are two different things"),
        (("--disk", "--url", "http://127.0.0.1:9"), "--disk looks at files of this machine"),
        (("--disk", "--salt", "x"), "--salt belongs to --clear"),
        (("--disk", "--yes"), "--yes belongs to --clear"),
    ],
)
def test_flags_that_mean_nothing_together_are_refused(arguments: tuple[str, ...], words: str) -> None:
    assert words in refusal("cache", *arguments, code=2)


@pytest.mark.parametrize(
    ("seconds", "text"), [(5.0, "5.0 s"), (3600.0, "1 h 0 min"), (2 * DAY_S - 1, "47 h 59 min"), (3 * DAY_S, "3 days")]
)
def test_ages_are_written_for_people(seconds: float, text: str) -> None:
    assert age(seconds) == text
