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
from vllm_mlx.disk.checkpoints import Note, write_note
from vllm_mlx.disk.cipher import Cipher
from vllm_mlx.disk.folder import Folder
from vllm_mlx.disk.journal import Journals
from vllm_mlx.disk.record import Header, Record, checkpoint_folder
from vllm_mlx.runner.checkpoint import Checkpoint

DAY_S = 86_400
TENSOR_BYTES = 4096
FOREIGN = "f" * 32 + "-text"


def demo_fingerprint() -> str:
    return Checkpoint(demo_path(), {}).fingerprint() + "-text"


def folder_at(root: Path, cipher: Cipher | None = None) -> Folder:
    return Folder(root, max_bytes=sys.maxsize, daily_bytes=sys.maxsize, floor_bytes=0, cipher=cipher)


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


def filled(root: Path, cipher: Cipher | None = None) -> dict[str, Record]:
    """Two conversations that part at token 3, one with a snapshot, and one with a salt, used 40 days ago."""
    folder = folder_at(root, cipher)
    first = add(folder, None, [11, 12, 13, 14])
    snapshot = add(folder, first, [])
    long = add(folder, first, [15, 16])
    short = add(folder, first, [21], start=3)
    salted = add(folder, None, [31, 32], salt="ann/")
    old_s = salted.used_s - 40 * DAY_S
    os.utime(folder.path_of(salted), (old_s, old_s))
    return {"first": first, "snapshot": snapshot, "long": long, "short": short, "salted": salted}


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
        assert f"conversationsarekeptin{tmp_path},upto1.0GB,notencrypted" in said
        assert run("chat", "What is 2 + 3?", "--url", address(printed), "--no-thinking").returncode == 0
        process.terminate()
        assert process.wait(60) == 0
    shown = disk(tmp_path)
    assert "demo: 1 conversation" in shown.stdout and disk(tmp_path, "--verify").returncode == 0
    assert "What is 2 + 3?" in listed(tmp_path, "--text").popitem()[1]["text"]


def test_text_is_shown_only_if_it_is_asked_for(tmp_path: Path) -> None:
    fingerprint = demo_fingerprint()
    folder = folder_at(tmp_path)
    from vllm_mlx.tokens.tokenizer import Tokenizer

    ids = list(Tokenizer.load(demo_path()).encode("Who are you?", add_special_tokens=False))
    add(folder, None, ids, fingerprint=fingerprint)
    write_note(tmp_path, Note(fingerprint=fingerprint, model="demo", path=str(demo_path())))
    assert "Who are you?" not in disk(tmp_path).stdout and "demo: 1 conversation" in disk(tmp_path).stdout
    assert "Who are you?" in disk(tmp_path, "--text").stdout
    assert [fields["text"] for fields in listed(tmp_path, "--text").values()] == ["Who are you?"]


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
CHANGES = [("--verify",), ("--prune", "1GB", "--yes"), ("--clear", "--yes"), ("--clear", "--salt", "a", "--yes"),
           ("--export", "file", "--id", "1")]  # fmt: skip


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
    for arguments in CHANGES if kind in ("missing", "of others") else CHANGES[2:3]:
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
    """Records of another key, which cannot be read, too."""
    (strangers / "usage.json").unlink()
    filled(strangers, Cipher(bytes(range(32))))
    Journals(strangers / "journals").close()
    (strangers / "journals").mkdir(exist_ok=True)
    (strangers / "journals" / "replies-a.v1.journal").write_bytes(b"kept")
    others = {name: found for name, found in everything(strangers).items() if found[0] == b"mine" or name == "work"}
    line = refusal("cache", "--disk", "--cache-dir", str(strangers), "--clear", code=2)
    assert "6 files with" in line and "Add --yes" in line
    assert json.loads(disk(strangers, "--clear", "--yes", "--json").stdout)["removed_files"] == 6
    left = everything(strangers)
    assert {name: left[name] for name in others} == others
    assert left.keys() == others.keys() | {".", "journals", "usage.json"}


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


@pytest.mark.parametrize(
    ("what", "gone"),
    [("30d", {"salted"}), ("50d", set()), ("0", {"first", "snapshot", "long", "short", "salted"}), ("1GB", set()),
     ("gone", set())],
)  # fmt: skip
def test_prune_removes_what_is_old_or_too_much(tmp_path: Path, what: str, gone: set[str]) -> None:
    records = filled(tmp_path)
    result = disk(tmp_path, "--prune", what, "--yes")
    assert result.returncode == 0 and f"{len(gone)} files were removed" in result.stdout
    assert files(tmp_path) == {record.name for name, record in records.items() if name not in gone}


def test_prune_removes_the_state_of_checkpoints_that_are_gone(tmp_path: Path) -> None:
    folder = folder_at(tmp_path)
    fingerprint = demo_fingerprint()
    kept = add(folder, None, [1, 2], fingerprint=fingerprint)
    write_note(tmp_path, Note(fingerprint=fingerprint, model="demo", path=str(demo_path())))
    for other, path in (("0" * 32, demo_path()), ("1" * 32, tmp_path / "missing")):  # Replaced, and removed.
        add(folder, None, [1, 2], fingerprint=other)
        write_note(tmp_path, Note(fingerprint=other, model="old", path=str(path)))
    assert disk(tmp_path, "--prune", "gone", "--yes").returncode == 0
    assert files(tmp_path) == {kept.name}


def test_clear_removes_all_or_one_salt(tmp_path: Path) -> None:
    records = filled(tmp_path)
    journals = Journals(tmp_path / "journals")
    replies = journals.open("replies", FOREIGN)
    replies.restore(lambda _: None)
    for name, salt in (("one", "ann/"), ("two", "ben/")):
        replies.put(name, salt, lambda name=name: name, num_bytes=3)
    journals.close()

    def remembered() -> bytes:
        return b"".join(file.read_bytes() for file in tmp_path.rglob("*.journal"))

    assert b"ann/" in remembered() and b"ben/" in remembered()
    assert disk(tmp_path, "--clear", "--salt", "ann/", "--yes").returncode == 0
    assert files(tmp_path) == {record.name for name, record in records.items() if name != "salted"}
    assert b"ann/" not in remembered() and b"ben/" in remembered()
    freed = json.loads(disk(tmp_path, "--clear", "--yes", "--json").stdout)
    assert freed["removed_files"] == 5  # the journal is one of them
    assert files(tmp_path) == set() and remembered() == b""


def test_nothing_is_removed_without_a_yes(tmp_path: Path) -> None:
    filled(tmp_path)
    before = files(tmp_path)
    for arguments in (("--clear",), ("--prune", "30d")):
        line = refusal("cache", "--disk", "--cache-dir", str(tmp_path), *arguments, code=2)
        assert "will be removed. Add --yes" in line
    assert files(tmp_path) == before


@pytest.mark.parametrize("is_encrypted", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_conversation_goes_to_another_folder(tmp_path: Path, is_encrypted: bool) -> None:
    key = tmp_path / "key"
    key.write_text("a1" * 32)
    key.chmod(0o600)
    there, back, bundle = tmp_path / "there", tmp_path / "back", tmp_path / "conversation"
    filled(there, Cipher.from_file(key) if is_encrypted else None)
    with_key = ("--cache-disk-key-file", str(key)) if is_encrypted else ()
    wanted = listed(there, *with_key)[6]["id"]
    exported = json.loads(disk(there, "--export", str(tmp_path / "2"), "--id", wanted, "--json", *with_key).stdout)
    assert exported == {
        "file": str(tmp_path / "2"), "bytes": (tmp_path / "2").stat().st_size, "tokens": 6,
        "model": "checkpoint ffffffff",
    }  # fmt: skip
    result = disk(there, "--export", str(bundle), "--id", wanted, *with_key)
    assert result.returncode == 0 and ("not encrypted" in result.stdout) == is_encrypted
    assert bundle.stat().st_mode & 0o777 == 0o600
    result = disk(back, "--import", str(bundle))
    assert result.returncode == 0 and "6 tokens were added" in result.stdout, result.stderr
    assert listed(back).keys() == {6} and listed(back)[6]["snapshots"] == 1
    assert "import it with --model" in result.stdout
    imported = json.loads(disk(back, "--import", str(bundle), "--json").stdout)
    assert imported == {"tokens": 6, "model": "checkpoint ffffffff", "files": 3, "is_served": False}
    assert disk(back, "--verify").returncode == 0
    result = disk(back, "--import", str(bundle), "--model", "demo")
    assert result.returncode == 0 and "6 tokens were added for demo" in result.stdout
    assert {file.parent.name for file in back.rglob("*.safetensors")} == {
        checkpoint_folder(fingerprint) for fingerprint in (FOREIGN, demo_fingerprint())
    }
    line = refusal(
        "cache", "--disk", "--cache-dir", str(there), "--export", str(bundle), "--id", wanted, *with_key, code=2
    )
    assert "exists already" in line


def test_what_was_not_exported_is_not_imported(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"not an export" * 1000)
    assert str(other) in refusal("cache", "--disk", "--cache-dir", str(tmp_path), "--import", str(other))
    missing = ("--import", str(tmp_path / "none"))
    assert "No such file" in refusal("cache", "--disk", "--cache-dir", str(tmp_path / "new"), *missing)
    assert {path.name for path in tmp_path.iterdir()} == {"other"}


def test_nothing_is_imported_into_a_folder_of_others(tmp_path: Path, strangers: Path) -> None:
    filled(tmp_path / "cache")
    bundle = tmp_path / "bundle"
    wanted = listed(tmp_path / "cache")[6]["id"]
    assert disk(tmp_path / "cache", "--export", str(bundle), "--id", wanted).returncode == 0
    before = everything(strangers)
    line = refusal("cache", "--disk", "--cache-dir", str(strangers), "--import", str(bundle))
    assert f"{strangers} holds other files, and the cache needs a folder of its own" in line
    assert everything(strangers) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--verify",), "--verify is about the files on disk: give it with --disk"),
        (("--salt", "x", "--clear"), "--salt is about the files on disk"),
        (("--disk", "--verify", "--clear"), "--verify and --clear are two different things"),
        (("--disk", "--url", "http://127.0.0.1:9"), "--disk looks at files of this machine"),
        (("--disk", "--salt", "x"), "--salt belongs to --clear"),
        (("--disk", "--id", "x", "--verify"), "--id belongs to --export"),
        (("--disk", "--text", "--verify"), "--text belongs to the list"),
        (("--disk", "--yes"), "--yes belongs to --clear or --prune"),
        (("--disk", "--model", "demo"), "--model belongs to --import"),
        (("--disk", "--export", "file"), "--export needs --id"),
    ],
)
def test_flags_that_mean_nothing_together_are_refused(arguments: tuple[str, ...], words: str) -> None:
    assert words in refusal("cache", *arguments, code=2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--prune", "much"), "--prune much is not understood. Write a size"),
        (("--prune", "20"), "--prune 20 lacks its unit"),
        (("--prune", "-3d"), "is not understood"),
        (("--export", "file", "--id", "0000"), "0000 is no conversation's id"),
    ],
)
def test_what_is_not_understood_is_refused_with_advice(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    filled(tmp_path)
    assert words in refusal("cache", "--disk", "--cache-dir", str(tmp_path), *arguments, code=2)


@pytest.mark.parametrize(
    ("seconds", "text"), [(5.0, "5.0 s"), (3600.0, "1 h 0 min"), (2 * DAY_S - 1, "47 h 59 min"), (3 * DAY_S, "3 days")]
)
def test_ages_are_written_for_people(seconds: float, text: str) -> None:
    assert age(seconds) == text
