"""Classifies the device fault that an error reports, by the texts of MLX's errors. Pure: it knows no mlx.

MLX raises the failure of a command buffer once, as a RuntimeError, in the next call that submits work or waits. That
can be any call, and the output of the command buffer is garbage (mlx/backend/metal/device.cpp). An allocation that
fails raises where it was asked for, and hides failures of earlier work (metal/allocator.cpp, mlx/transforms.cpp).
"""

import logging
from enum import Enum, auto

from ..core.errors import EngineDead, first_line

logger = logging.getLogger(__name__)

MAX_FAULTS = 3  # device faults without progress in between, after which a row fails and the engine ends


class Fault(Enum):
    """A fault of the device. It concerns all work that is not proven good yet."""

    FAILED = auto()  # a command buffer failed: a time limit of macOS, a reset, an invalid resource
    OUT_OF_MEMORY = auto()  # less work at a time may run
    PARTED = auto()  # a rank is lost, or computes other results: only a new start of all ranks helps


class RanksParted(RuntimeError):
    """The ranks of a model no longer do the same. The next wait for the device may never return."""


class DeviceFault(RuntimeError):
    """The device returned a result that no model can compute."""


# Texts of MLX's errors. This server has met none of them on a Mac yet.
_FAILED_WORK = ("[METAL]", "Command buffer", "Failed to create Metal shared event")
_FAILED_ALLOCATION = ("[metal::malloc]", "[malloc] Unable to allocate", "[malloc_or_wait]")
_LOST_PEER = ("[ring]", "[jaccl]")  # raised once: reading the failed arrays after that never returns
_NO_MEMORY = ("Insufficient Memory", "00000008", "CallbackErrorOutOfMemory")


def device_fault(error: BaseException | None) -> Fault | None:
    """Return the device fault that the error reports, or None if the device is not at fault."""
    if isinstance(error, DeviceFault):
        return Fault.FAILED
    if not isinstance(error, RuntimeError):
        return None
    text = str(error)
    if isinstance(error, RanksParted) or _holds_any(text, _LOST_PEER):
        return Fault.PARTED
    if _holds_any(text, _FAILED_ALLOCATION):
        return Fault.OUT_OF_MEMORY
    if not _holds_any(text, _FAILED_WORK):
        return None
    return Fault.OUT_OF_MEMORY if _holds_any(text, _NO_MEMORY) else Fault.FAILED


class FaultCount:
    """Counts device faults since the last good step, and ends the engine where only a new process helps."""

    def __init__(self) -> None:
        self.num = 0
        self._end: EngineDead | None = None  # the reason why no step can follow

    def check_alive(self) -> None:
        """Raise EngineDead if an earlier call has raised it, even if its caller caught it."""
        if self._end is not None:
            raise self._end

    def refuse_parted(self, fault: Fault | None, error: Exception) -> None:
        """Raise EngineDead if the ranks have parted: a wait for the device may then hang."""
        if fault is Fault.PARTED:
            self._end = EngineDead(f"Only a restart of all ranks of the model helps: {first_line(error, 300)}")
            raise self._end

    def count(self, fault: Fault | None, error: Exception) -> None:
        """Count a fault. Raises EngineDead after `MAX_FAULTS`."""
        if fault is not None:
            self.num += 1
            logger.error("Device fault %d since the last good step: %s", self.num, error)
        if self.num >= MAX_FAULTS:
            self._end = EngineDead(
                f"The GPU failed {self.num} times in a row, so that only a restart of the server helps: "
                f"{first_line(error, 300)}"
            )
            raise self._end


def _holds_any(text: str, marks: tuple[str, ...]) -> bool:
    return any(mark in text for mark in marks)
