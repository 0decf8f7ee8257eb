"""Fixtures every test may use."""

import gc
import os
import signal
import sys

# No test may reach the network, nor wait for it to be missing.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# mlx reads it once. With TF32, products of fp32 matrices on newer Macs have 10 bits, and a row alone has all 23.
os.environ.setdefault("MLX_ENABLE_TF32", "0")
# On a CPU, mlx starts a C++ compiler for each function that it compiles, which takes as long as a hundred short tests.
if sys.platform != "darwin" and "VLLM_MLX_ACCELERATOR" not in os.environ:
    os.environ.setdefault("MLX_DISABLE_COMPILE", "1")
# Servers that tests start keep nothing in the user's own folder. A test that keeps something says where.
os.environ.setdefault("VLLM_MLX_CACHE_DISK", "0")

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.support.drawing import LONG

from .support.progress import Progress

# A shell that starts the tests in the background, or `nohup`, makes them ignore signals, and every server they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Tests measure behaviour, never time: the machine may be busy.
_PHASES = [phase for phase in Phase if phase is not Phase.explain]  # its tracing can make CPython 3.11 spin for ever
settings.register_profile("untimed", deadline=None, phases=_PHASES, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(LONG, settings.get_profile("untimed"), max_examples=1000)
settings.load_profile("untimed")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Progress(config))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: many tests wait for other processes."""
    return (os.cpu_count() or 1) + 1


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    """What is imported and collected stays until the end, so that to look through it for garbage is lost time."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.freeze()  # Python's own end would look through everything several times


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`checkpoint("qwen3")` is the folder of a tiny random checkpoint, made once per run, whichever worker needs it."""
    from tests.support.checkpoints import (
        CheckpointStore,  # here, because the tests of pure packages must not import mlx
    )

    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own  # A worker's folder lies in the run's own.
    return CheckpointStore(shared / "checkpoints")
