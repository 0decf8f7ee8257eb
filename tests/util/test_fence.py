"""A fence keeps errors inside, names what it protects, and lets interrupts pass."""

import gc
import logging
import weakref
from collections.abc import Iterator

import pytest

from vllm_mlx.util.fence import Fence


def test_an_error_stays_inside_and_is_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR), Fence("the other rows") as fence:
        raise ValueError("broken")
    assert isinstance(fence.error, ValueError)
    assert "the other rows" in caplog.text and "broken" in caplog.text


def test_a_block_that_succeeds_leaves_no_error() -> None:
    with Fence("the other rows") as fence:
        result = 1
    assert fence.error is None and result == 1


def test_the_log_can_be_left_to_the_caller(caplog: pytest.LogCaptureFixture) -> None:
    with Fence("the other rows", is_logged=False) as fence:
        raise ValueError
    assert fence.error is not None and not caplog.records


class Work:
    def fail(self) -> None:
        raise ValueError


@pytest.fixture
def collector_off() -> Iterator[None]:
    gc.disable()
    logging.disable()  # a record that a test captures keeps the frames
    yield
    logging.disable(logging.NOTSET)
    gc.enable()


@pytest.mark.usefixtures("collector_off")
def test_a_failed_block_keeps_nothing_alive() -> None:
    def run(work: Work) -> Fence:
        with Fence("the other rows") as fence:
            work.fail()
        return fence

    work = Work()
    kept = weakref.ref(work)
    fence = run(work)
    del work
    assert fence.error is not None and kept() is None


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_ends_the_process_passes(error: type[BaseException]) -> None:
    with pytest.raises(error), Fence("the other rows"):
        raise error
