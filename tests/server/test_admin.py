"""Who may manage the server: see, cancel and clear what belongs to others."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.running import Running, eventually, named, serving
from vllm_mlx.server.config import ServerConfig
from vllm_mlx.server.guards import is_admin
from vllm_mlx.util.tenants import APIKey

from .fakes import FakeEngine


@pytest.mark.parametrize("client", [("127.0.0.1", 1), ("127.9.9.9", 1), ("::1", 1), ("::ffff:127.0.0.1", 1), None])
def test_without_keys_clients_on_this_machine_manage_the_server(client: Any) -> None:
    assert is_admin({"type": "http", "client": client})


@pytest.mark.parametrize("client", [("192.168.1.2", 1), ("::ffff:10.0.0.1", 1), ("fe80::1%en0", 1), ("nobody", 1)])
def test_without_keys_clients_elsewhere_do_not_manage_the_server(client: Any) -> None:
    assert not is_admin({"type": "http", "client": client})


@pytest.mark.parametrize("by_key", [True, False])
def test_where_a_key_was_sent_it_decides(by_key: bool) -> None:
    assert is_admin({"type": "http", "client": ("127.0.0.1", 1), "state": {"is_admin": by_key}}) is by_key


class ManagedEngine(FakeEngine):
    """Remembers what it was asked to clear and cancel."""

    def __init__(self) -> None:
        super().__init__()
        self.cleared: list[str] = []

    async def clear_cache(self, *, salts: str) -> int:
        self.cleared.append(salts)
        return 1

    def cancel(self, request_id: str, *, salts: str) -> bool:
        return any(request.cache_salt.startswith(salts) for request in self.requests)


ANN, BEN = APIKey("ann", "a-secret"), APIKey("ben", "b-secret")
ROOT = APIKey("root", "r-secret", is_admin=True)
CHAT: Any = {"messages": [{"role": "user", "content": "hi"}]}


def asked(server: Running, key: APIKey | None, method: str, path: str, **options: Any) -> int:
    headers = options.pop("headers", {}) | ({} if key is None else {"x-api-key": key.secret})
    with server.http(headers=headers) as client:
        return client.request(method, path, **options).status_code


@pytest.fixture
def keyed() -> Iterator[Running]:
    with serving(ManagedEngine(), api_keys=(ANN, BEN, ROOT)) as running:
        yield running


def test_an_admin_key_clears_everything_and_another_its_own(keyed: Running) -> None:
    for key in (ANN, BEN, ROOT):
        assert asked(keyed, key, "DELETE", "/v1/cache") == 200
    first, second, everything = keyed.engine.cleared
    assert everything == "" and first and second and first != second


def test_an_admin_key_cancels_what_belongs_to_others(keyed: Running) -> None:
    assert asked(keyed, ANN, "POST", "/v1/chat/completions", json=CHAT) == 200
    path = "/v1/requests/any/cancel"
    assert [asked(keyed, key, "POST", path) for key in (ANN, BEN, ROOT, None)] == [200, 404, 200, 401]


def test_one_ordinary_key_beside_an_admin_key_manages_its_own_alone() -> None:
    with serving(ManagedEngine(), api_keys=(ANN, ROOT)) as server:
        assert asked(server, ANN, "DELETE", "/v1/cache") == 200
        assert server.engine.cleared[-1] != ""


def test_the_only_key_manages_everything() -> None:
    with serving(ManagedEngine(), api_keys=(ANN,)) as server:
        assert asked(server, ANN, "DELETE", "/v1/cache") == 200
        assert server.engine.cleared == [""]


def test_with_admin_keys_alone_anybody_may_chat_and_nobody_else_manage() -> None:
    with serving(ManagedEngine(), api_keys=(ROOT,)) as server:
        for key in (None, APIKey("x", "not-needed")):
            assert asked(server, key, "POST", "/v1/chat/completions", json=CHAT) == 200
            assert asked(server, key, "DELETE", "/v1/cache") == 403
            assert asked(server, key, "POST", "/v1/requests/any/cancel") == 403
        assert server.engine.cleared == []
        assert asked(server, ROOT, "DELETE", "/v1/cache") == 200


@pytest.mark.parametrize(("address", "status"), [("192.168.1.9", 403), ("127.0.0.1", 200)])
def test_without_keys_the_network_manages_nothing(address: str, status: int) -> None:
    """A proxy on this machine says for whom it asks."""
    with serving(ManagedEngine()) as server:
        headers = {"x-forwarded-for": address}
        assert asked(server, None, "DELETE", "/v1/cache", headers=headers) == status
        assert asked(server, None, "POST", "/v1/requests/any/cancel", headers=headers) in (status, 404)
        assert asked(server, None, "POST", "/v1/chat/completions", json=CHAT, headers=headers) == 200


def test_the_log_names_the_key_and_never_holds_it(keyed: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for key in (ANN, ROOT):
        asked(keyed, key, "POST", "/v1/chat/completions", json=CHAT)
    asked(keyed, None, "POST", "/v1/chat/completions", json=CHAT)
    eventually(lambda: caplog.text.count("path=/v1/chat/completions") == 3)
    assert caplog.text.count("key=ann") == caplog.text.count("key=root") == 1 == caplog.text.count("status=401")
    asked(keyed, APIKey("x", "secret-not"), "GET", "/v1/models")
    assert "secret" not in caplog.text
    assert "secret" not in repr(ServerConfig(models=named("tiny"), api_keys=(ANN, ROOT)))
