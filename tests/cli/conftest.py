"""No setting of the developer's own machine reaches a test; one server of the demo is shared by those that ask."""

import os
from collections.abc import Iterator

import pytest

from tests.support.commands import address, served


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    for name in [name for name in os.environ if name.startswith("VLLM_MLX_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))


@pytest.fixture(scope="session")
def demo_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server with the bundled demo; its replies are known."""
    home = tmp_path_factory.mktemp("server-home")
    with served("--log-level", "warning", HOME=str(home)) as (_, printed):
        yield address(printed)
