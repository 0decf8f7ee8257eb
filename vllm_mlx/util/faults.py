"""Decides what an error says about the device, by the texts that MLX gives its errors. Pure: it knows no mlx.

MLX raises the failure of a command buffer once, as a RuntimeError, in the next call that submits work or waits. That
can be any call, and what the command buffer was to write is garbage (mlx/backend/metal/device.cpp). An allocation that
fails raises where it was asked for, and hides failures of earlier work (metal/allocator.cpp, mlx/transforms.cpp).
"""

from enum import Enum, auto

MAX_FAULTS = 3  # device faults without progress in between, after which a row fails and the engine ends


class Fault(Enum):
    """A fault of the device. It concerns all work that is not proven good yet."""

    FAILED = auto()  # a command buffer failed: a time limit of macOS, a reset, an invalid resource
    OUT_OF_MEMORY = auto()  # less work at a time may run
    PARTED = auto()  # a rank is lost, or computes something else than the others: only a new start of all ranks helps


class RanksParted(RuntimeError):
    """The ranks of a model no longer do the same. The next wait for the device may never return."""


class DeviceFault(RuntimeError):
    """The device returned a result that no model can compute."""


# Texts of MLX's errors. This server has met none of them on a Mac yet.
_FAILED_WORK = ("[METAL]", "Command buffer", "Failed to create Metal shared event")
_FAILED_ALLOCATION = ("[metal::malloc]", "[malloc] Unable to allocate", "[malloc_or_wait]")
_LOST_PEER = ("[ring]", "[jaccl]")  # raised once: to read the failed arrays after that hangs for good
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


def _holds_any(text: str, marks: tuple[str, ...]) -> bool:
    return any(mark in text for mark in marks)
