"""`vllm-mlx cache` over a folder of records, beside a server and without one."""

import json
import os
import random
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.disk.samples import opened
from tests.support.commands import address, call, refusal, served
from tests.support.rows import cases
from tests.support.running import eventually
from vllm_mlx.cache.node import ResumeRule
from vllm_mlx.disk.folder import Folder
from vllm_mlx.disk.kept import Journals
from vllm_mlx.disk.record import Header, Record

DAY_S = 86_400
TENSOR_BYTES = 4096
FOREIGN = "f" * 32 + "-text"


def add(folder: Folder, parent: Record | None, ids: list[int], *, start: int | None = None, **header: Any) -> Record:
    """A run of token ids, or a state if there are none."""
    fields = {"fingerprint": FOREIGN, "salt": ""} | header
    begins = 0 if parent is None else parent.header.end if start is None else start
    return folder.add(
        Header(
            kind="run" if ids else "state", parent="" if parent is None else parent.name, start=begins,
            words=b"".join(token_id.to_bytes(8, "big") for token_id in ids), layout={}, s_per_token=0.001,
            rule=ResumeRule(), **fields,
        ),
        [("keys.0", "U8", (TENSOR_BYTES,), memoryview(random.Random(len(ids)).randbytes(TENSOR_BYTES)))],
    )  # fmt: skip


def filled(root: Path) -> dict[str, Record]:
    """Two conversations of one model, one with a salt, used 40 days ago, and one of a model with a name."""
    with opened(root) as folder:
        first = add(folder, None, [11, 12, 13, 14])
        snapshot = add(folder, first, [])
        long = add(folder, first, [15, 16])
        salted = add(folder, None, [31, 32], salt="ann/")
        folder.note_use([salted], salted.used_s - 40 * DAY_S)
        folder.note_model("named-text", "my model")
        list(folder.scan())
        named = add(folder, None, [1], fingerprint="named-text")
        kept = Journals(folder.database)
        replies = kept.open("replies", FOREIGN)
        replies.restore(lambda _: None)
        for name, salt in (("one", "ann/"), ("two", "ben/")):
            replies.put(name, salt, lambda name=name: name, num_bytes=3)
        kept.close()
    return {"first": first, "snapshot": snapshot, "long": long, "salted": salted, "named": named}


def cache(root: Path, command: str, *arguments: str, **variables: str) -> Any:
    return call("cache", command, "--cache-dir", str(root), *arguments, **variables)


def listed(root: Path) -> dict[tuple[str, str], dict[str, Any]]:
    result = cache(root, "list", "--json")
    assert result.returncode == 0, result.stderr
    return {(group["model"], group["salt"]): group for group in json.loads(result.stdout)["kept"]}


def files(root: Path) -> set[str]:
    return {file.stem for file in root.rglob("*.kv")}


def damage(root: Path, record: Record) -> Path:
    path = root / "records" / f"{record.name}.kv"
    content = bytearray(path.read_bytes())
    content[-TENSOR_BYTES // 2] ^= 1
    path.write_bytes(content)
    return path


def test_what_is_kept_is_listed_by_model_and_salt(tmp_path: Path) -> None:
    filled(tmp_path)
    found = listed(tmp_path)
    foreign = f"checkpoint {FOREIGN[:8]}"
    assert found.keys() == {(foreign, ""), (foreign, "ann/"), ("my model", "")}
    group = found[foreign, ""]
    assert (group["records"], group["tokens"], group["bytes"]) == (3, 6, 3 * TENSOR_BYTES)
    shown = cache(tmp_path, "list", COLUMNS="80")
    assert "…" not in shown.stdout and "salt ann/" in shown.stdout
    assert shown.returncode == 0 and "40 days ago" in shown.stdout and "my model" in shown.stdout
    said = " ".join(shown.stdout.split())
    assert f"{tmp_path}: " in said and "in 5 records" in said


def test_beside_a_server_it_is_listed_verified_and_cleared_by_the_server(
    tmp_path: Path, checkpoint: Callable[..., Path]
) -> None:
    path = str(checkpoint("qwen3"))
    with served(path, "--cache-disk", "1GB", "--cache-dir", str(tmp_path)) as (process, printed):
        said = "".join(printed.split())  # a long path is divided between lines
        assert f"conversationsarekeptin{tmp_path},upto1.0GB" in said
        url = address(printed)
        body = {"prompt": "What is 2 + 3? " * 40, "max_tokens": 3}
        httpx.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False).raise_for_status()
        eventually(lambda: bool(listed(tmp_path)))
        [(model, salt)] = listed(tmp_path)
        assert (model, salt) == (path, "") and cache(tmp_path, "verify").returncode == 0
        line = refusal("cache", "clear", "--cache-dir", str(tmp_path), "--yes")
        assert f"process {process.pid}" in line and "--url" in line and "Choose" not in line, (
            "the server has another port than `serve` is set to"
        )
        port = url.rpartition(":")[2]
        line = refusal("cache", "clear", "--cache-dir", str(tmp_path), "--model", path, "--yes", code=2)
        assert f"process {process.pid}" in line and "Stop it first" in line
        done = cache(tmp_path, "clear", "--yes", VLLM_MLX_PORT=port)
        assert done.returncode == 0 and "freed" in done.stdout, done.stderr
        eventually(lambda: not files(tmp_path))
        assert call("cache", "memory", "--url", url).returncode == 0


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
CHANGES = [("verify",), ("clear", "--yes"), ("clear", "--salt", "a", "--yes")]


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
        line = refusal("cache", *arguments, "--cache-dir", str(root))
        assert line.startswith("vllm-mlx: Nothing is kept on disk: ") and why in line and str(root) in line
    shown = cache(root, "list")
    assert shown.returncode == 0 and why in shown.stdout and str(root) in shown.stdout
    assert listed(root) == {}
    assert everything(tmp_path) == before


def test_looking_changes_nothing(tmp_path: Path) -> None:
    """Not even what a server would remove: damaged records, and ones whose beginning is gone."""
    root = tmp_path / "cache"
    records = filled(root)
    (root / "records" / f"{records['first'].name}.kv").unlink()
    (root / "records" / f"{1:016x}.kv").write_bytes(b"half")
    before = everything(tmp_path)
    shown = cache(root, "list")
    assert shown.returncode == 0 and "1 records are damaged: `vllm-mlx cache verify` names them." in shown.stdout
    assert "will be removed" in refusal("cache", "clear", "--cache-dir", str(root), code=2)
    assert everything(tmp_path) == before


def test_clearing_removes_all_that_is_the_caches_and_nothing_else(tmp_path: Path, strangers: Path) -> None:
    others = {name: found for name, found in everything(strangers).items() if found[0] == b"mine" or name == "work"}
    filled(strangers)
    assert json.loads(cache(strangers, "clear", "--yes", "--json").stdout)["removed_records"] == 5
    left = everything(strangers)
    assert {name: left[name] for name in others} == others
    assert left.keys() == others.keys() | {".", "records", "index.sqlite", "owner.lock"}


def test_a_folder_through_a_link_is_cleared(tmp_path: Path) -> None:
    filled(tmp_path / "cache")
    (tmp_path / "link").symlink_to(tmp_path / "cache")
    assert cache(tmp_path / "link", "clear", "--yes").returncode == 0
    assert files(tmp_path / "cache") == set() and (tmp_path / "link").is_symlink()


def test_a_damaged_row_is_found_and_named(tmp_path: Path) -> None:
    records = filled(tmp_path)
    with closing(sqlite3.connect(tmp_path / "index.sqlite")) as connection, connection:
        connection.execute("UPDATE record SET words = x'00' WHERE id = ?", (int(records["salted"].name, 16),))
    bad = cache(tmp_path, "verify", "--json")
    assert bad.returncode == 1
    [fault] = json.loads(bad.stdout)["damaged"]
    assert fault["fault"] == "its row is damaged" and records["salted"].name in fault["file"]
    assert cache(tmp_path, "verify").returncode == 0 and records["salted"].name not in files(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")
def test_a_folder_without_rights_is_one_line(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    filled(root)
    root.chmod(0)
    try:
        for arguments in (("list",), *CHANGES):
            assert "Permission denied" in refusal("cache", *arguments, "--cache-dir", str(root))
    finally:
        root.chmod(0o700)


def test_verify_finds_a_damaged_byte_and_removes_its_record(tmp_path: Path) -> None:
    records = filled(tmp_path)
    good = cache(tmp_path, "verify")
    assert (good.returncode, "Every byte is as it was written." in good.stdout) == (0, True)
    path = damage(tmp_path, records["long"])
    bad = cache(tmp_path, "verify")
    assert bad.returncode == 1 and f"{path} was damaged and is removed" in "".join(bad.stdout.splitlines())
    assert files(tmp_path) == {record.name for name, record in records.items() if name != "long"}


def test_verify_beside_an_owner_only_names_damage(tmp_path: Path) -> None:
    records = filled(tmp_path)
    path = damage(tmp_path, records["long"])
    with opened(tmp_path):
        bad = cache(tmp_path, "verify")
    assert bad.returncode == 1 and f"{path} is damaged" in "".join(bad.stdout.splitlines()) and path.exists()


def remembered(root: Path) -> bytes:
    return b"".join(file.read_bytes() for file in root.glob("index.sqlite*"))


def test_clear_removes_all_or_one_salt_and_leaves_no_trace(tmp_path: Path) -> None:
    records = filled(tmp_path)
    assert b"ann/" in remembered(tmp_path) and b"ben/" in remembered(tmp_path)
    assert cache(tmp_path, "clear", "--salt", "ann/", "--yes").returncode == 0
    assert files(tmp_path) == {record.name for name, record in records.items() if name != "salted"}
    assert b"ann/" not in remembered(tmp_path) and b"ben/" in remembered(tmp_path)
    freed = json.loads(cache(tmp_path, "clear", "--yes", "--json").stdout)
    assert freed == {"removed_records": 4, "freed_bytes": 4 * TENSOR_BYTES}
    assert files(tmp_path) == set() and b"ben/" not in remembered(tmp_path)
    assert records["first"].header.words not in remembered(tmp_path)


def test_clear_removes_one_model(tmp_path: Path) -> None:
    records = filled(tmp_path)
    assert cache(tmp_path, "clear", "--model", "my model", "--yes").returncode == 0
    assert files(tmp_path) == {record.name for name, record in records.items() if name != "named"}


def test_nothing_is_removed_without_a_yes(tmp_path: Path) -> None:
    filled(tmp_path)
    before = files(tmp_path)
    line = refusal("cache", "clear", "--cache-dir", str(tmp_path), code=2)
    assert "will be removed" in line and "Add --yes" in line
    assert files(tmp_path) == before
    assert "leave them out" in refusal("cache", "clear", "--cache-dir", str(tmp_path), "--salt", "", code=2)
