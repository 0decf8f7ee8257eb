"""No setting of the developer's own machine reaches a test; one server is shared by those that ask."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.running import serving
from vllm_mlx.core.config import EngineConfig


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    for name in [name for name in os.environ if name.startswith("VLLM_MLX_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))


@pytest.fixture(scope="module")  # an engine that went on would disturb tests of MLX's memory
def demo_url(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Iterator[str]:
    """Address of a server whose model is called demo. It is the bundled one for modules that say `ANSWERS = True`."""
    from vllm_mlx.engine.loading import start_engine  # here, because other tests of this folder load no model

    model = "demo" if hasattr(request.module, "ANSWERS") else str(checkpoint("qwen3"))
    config = EngineConfig(model=model, text_only=model == "demo")
    with serving(start_engine(config), served_model_names=("demo",)) as server:
        yield server.url
