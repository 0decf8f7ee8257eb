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


class DeviceFault(RuntimeError):
    """The device returned a result that no model can compute."""


_FAILED_WORK = ("[METAL]", "Command buffer", "Failed to create Metal shared event")
_FAILED_ALLOCATION = ("[metal::malloc]", "[malloc] Unable to allocate", "[malloc_or_wait]")
_NO_MEMORY = ("Insufficient Memory", "00000008", "CallbackErrorOutOfMemory")


def device_fault(error: BaseException | None) -> Fault | None:
    """Return the device fault that the error reports, or None if the device is not at fault."""
    if isinstance(error, DeviceFault):
        return Fault.FAILED
    if not isinstance(error, RuntimeError):
        return None
    text = str(error)
    if _holds_any(text, _FAILED_ALLOCATION):
        return Fault.OUT_OF_MEMORY
    if not _holds_any(text, _FAILED_WORK):
        return None
    return Fault.OUT_OF_MEMORY if _holds_any(text, _NO_MEMORY) else Fault.FAILED


def _holds_any(text: str, marks: tuple[str, ...]) -> bool:
    return any(mark in text for mark in marks)
