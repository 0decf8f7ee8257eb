"""The engine of tests that give only its checkpoint."""

from pathlib import Path

import pytest

from tests.support.engine_driver import Driver


@pytest.fixture(scope="module")
def driver(path: Path) -> Driver:
    """An engine with the checkpoint of the module's own fixture `path`."""
    return Driver(path)
