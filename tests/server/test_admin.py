"""Who may manage the server: see, cancel and clear what belongs to others."""

from typing import Any

import pytest

from vllm_mlx.server.tenants import is_admin


@pytest.mark.parametrize("client", [("127.0.0.1", 1), ("127.9.9.9", 1), ("::1", 1), ("::ffff:127.0.0.1", 1), None])
def test_without_keys_clients_on_this_machine_manage_the_server(client: Any) -> None:
    assert is_admin({"type": "http", "client": client})


@pytest.mark.parametrize("client", [("192.168.1.2", 1), ("::ffff:10.0.0.1", 1), ("fe80::1%en0", 1), ("nobody", 1)])
def test_without_keys_clients_elsewhere_do_not_manage_the_server(client: Any) -> None:
    assert not is_admin({"type": "http", "client": client})


@pytest.mark.parametrize("by_key", [True, False])
def test_where_a_key_was_sent_it_decides(by_key: bool) -> None:
    assert is_admin({"type": "http", "client": ("127.0.0.1", 1), "state": {"is_admin": by_key}}) is by_key
