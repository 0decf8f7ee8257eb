"""Settings that contradict each other are refused, with advice."""

from typing import Any

import pytest

from vllm_mlx.core.config import EngineConfig
from vllm_mlx.core.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"cache_disk_bytes": 10**9, "prefix_cache": False}, ("--cache-disk", "--prefix-cache being off")),
        ({"cache_disk_bytes": 10**9, "repeatable": True}, ("--cache-disk", "--repeatable")),
        ({"cache_disk_bytes": -1}, ("cache_disk_bytes", "at least 0")),
        ({"cache_disk_daily_bytes": -1}, ("cache_disk_daily_bytes", "at least 0")),
    ],
)
def test_a_disk_tier_that_could_not_work_is_refused(settings: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as refused:
        EngineConfig(model="demo", **settings)
    assert all(word in refused.value.message for word in words)


@pytest.mark.parametrize(
    "settings",
    [{"prefix_cache": False}, {"repeatable": True}, {"cache_disk_bytes": 0, "repeatable": True},
     {"cache_disk_bytes": 0, "cache_dir": "folder"}],
)  # fmt: skip
def test_what_is_on_by_default_contradicts_nothing(settings: dict[str, Any]) -> None:
    EngineConfig(model="demo", **settings)
