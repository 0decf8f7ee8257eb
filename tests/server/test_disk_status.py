"""What a server says of its cache on disk, beside what the folder holds: before and after a restart."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.figures import declared
from tests.support.running import eventually, serving
from vllm_mlx.cache.stats import DiskReport
from vllm_mlx.cli.status import disk_line
from vllm_mlx.core.config import EngineConfig
from vllm_mlx.disk.folder import look
from vllm_mlx.engine.loading import open_disk, start_engine

from .watched import engine_served

QUESTION = {"messages": [{"role": "user", "content": "Count to 9. " * 200}], "max_tokens": 3, "temperature": 0}

DISK_METRICS = {
    "works", "bytes", "limit_bytes", "records", "waiting_bytes", "written_today_bytes", "daily_limit_bytes",
    "hits_total", "tokens_read_total", "bytes_read_total", "reads_not_made_total", "reads_not_used_total",
    "damaged_files_total",
}  # fmt: skip


@contextmanager
def served(checkpoint: Path, folder: Path, **settings: Any) -> Iterator[httpx.Client]:
    disk = {"cache_disk_bytes": 10**9, "cache_dir": str(folder)}
    with engine_served(checkpoint, **disk, **settings) as running, running.http() as client:
        yield client


def status(client: httpx.Client) -> dict[str, Any]:
    return client.get("/v1/status").json()


def files(folder: Path) -> list[Path]:
    return list(folder.rglob("*.kv"))


def metrics(client: httpx.Client) -> dict[str, float]:
    """The samples by name and tier."""
    families = text_string_to_metric_families(client.get("/metrics").text)
    return {
        f"{sample.name} {sample.labels.get('tier', '')}".strip(): sample.value
        for family in families
        for sample in family.samples
    }


def test_what_is_kept_is_reported_read_after_a_restart_and_cleared(checkpoint: Any, tmp_path: Path) -> None:
    path, folder = checkpoint("qwen3"), tmp_path / "kept"
    with served(path, folder) as client:
        assert status(client)["cache"]["disk"]["num_records"] == 0
        first = client.post("/v1/chat/completions", json=QUESTION).json()
    held = files(folder)
    assert list(look(folder).models.values()) == [str(path)]
    assert held, "a clean stop writes what is not on disk yet"

    with served(path, folder) as client:
        eventually(lambda: status(client)["cache"]["disk"]["num_records"] == len(held))
        disk = status(client)["cache"]["disk"]
        assert (disk["folder"], disk["max_bytes"], disk["off_reason"]) == (str(folder), 10**9, None)
        assert disk["used_bytes"] >= sum(file.stat().st_size for file in held)
        assert disk["hits"] == 0
        tree = client.get("/v1/cache").json()
        assert tree["data"] == [] and max(entry["end"] for entry in tree["disk"]) >= first["usage"]["prompt_tokens"] - 8
        assert all(entry["age_s"] < 600 for entry in tree["disk"])

        again = client.post("/v1/chat/completions", json=QUESTION)
        cached = again.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert again.json()["choices"] == first["choices"] and cached > 1000
        assert f"tier=disk; disk={cached}" in again.headers["x-cache-receipt"]
        eventually(lambda: status(client)["last_replies"])
        now = status(client)
        assert (now["last_replies"][0]["tier"], now["last_replies"][0]["disk_tokens"]) == ("disk", cached)
        assert now["cache"]["hits_by_tier"] == {"memory": 0, "disk": 1} and now["total_disk_tokens"] == cached
        assert (now["cache"]["disk"]["hits"], now["cache"]["disk"]["tokens_read"]) == (1, cached)
        assert 0 < now["cache"]["disk"]["bytes_read"] <= disk["used_bytes"]
        figures = metrics(client)
        assert all(figures[name] == number for (name,), number in declared(DiskReport, status(client)["cache"]["disk"]))
        assert {name.removeprefix("vllm_mlx_disk_") for name in figures if "_disk_" in name} == DISK_METRICS
        assert figures["vllm_mlx_cached_tokens_total disk"] == figures["vllm_mlx_disk_tokens_read_total"] == cached
        assert figures["vllm_mlx_cache_hits_total disk"] == figures["vllm_mlx_disk_works"] == 1

        client.delete("/v1/cache", params={"salt": "of others"}).raise_for_status()
        third = client.post("/v1/chat/completions", json=QUESTION)
        assert "tier=memory" in third.headers["x-cache-receipt"]
        client.delete("/v1/cache").raise_for_status()
        eventually(lambda: not files(folder))


@pytest.mark.parametrize("settings", [{}, {"cache_disk_bytes": 0}])
def test_a_server_that_keeps_nothing_says_so(checkpoint: Any, settings: dict[str, Any]) -> None:
    config = EngineConfig(model=str(checkpoint("qwen3")), memory_budget_bytes=2 << 30, **settings)
    disk = open_disk(config) if settings else None
    with serving(start_engine(config, disk)) as running, running.http() as client:
        assert status(client)["cache"]["disk"] is None
        assert client.get("/v1/cache").json()["disk"] == []
        assert not [name for name in metrics(client) if "disk_works" in name]


def test_a_folder_that_cannot_be_used_is_named_with_the_reason(checkpoint: Any, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.write_text("a file of somebody")
    with served(checkpoint("qwen3"), folder) as client:
        client.post("/v1/chat/completions", json=QUESTION).raise_for_status()
        disk = status(client)["cache"]["disk"]
        assert disk_line(disk).startswith(
            f"off: {folder} is not a folder, or a file stands in its path. Choose a folder"
        )
        assert metrics(client)["vllm_mlx_disk_works"] == 0
        assert client.get("/v1/cache").json()["disk"] == []
    assert folder.read_text() == "a file of somebody"
