"""A server whose port is open answers, also while it waits for its workers and while it loads."""

from collections.abc import Callable
from pathlib import Path

import httpx

from tests.support.rank_processes import macs
from tests.support.running import eventually


def test_health_says_503_until_the_worker_has_come_and_all_have_loaded(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    with macs(tmp_path, checkpoint("qwen3")) as both, httpx.Client(base_url=both.url, trust_env=False) as client:
        server = both.start_server()
        server.wait_for("0 of 1 workers joined")
        health = client.get("/health")
        assert health.status_code == 503 and health.json()["status"] == "loading"
        assert client.post("/v1/messages", json={}).json()["type"] == "error"
        both.start_worker()
        seen: set[int] = set()
        eventually(lambda: 200 in seen or seen.add(health_of(client)))  # type: ignore[func-returns-value]
        assert seen <= {200, 503}
        assert client.get("/v1/models").status_code == 200


def health_of(client: httpx.Client) -> int:
    """The status of /health. A connection in the moment in which the models are ready may break: 503 too."""
    try:
        return client.get("/health").status_code
    except httpx.TransportError:
        return 503
