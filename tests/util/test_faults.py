"""What an error says about the device, by the texts that MLX and macOS give it."""

import pytest

from vllm_mlx.core.errors import GenerationError
from vllm_mlx.util.faults import DeviceFault, Fault, RanksParted, device_fault
from vllm_mlx.util.fence import Fence, RowFence

FAILED = (
    "[METAL] Command buffer execution failed: Impacting Interactivity "
    "(0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity).",
    "[METAL] Command buffer execution failed: Caused GPU Timeout Error "
    "(00000002:kIOGPUCommandBufferCallbackErrorTimeout).",
    "[METAL] Command buffer execution failed: Ignored (for causing prior/excessive GPU errors) "
    "(00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored).",
    "[METAL] Command buffer execution failed: Discarded (victim of GPU error/recovery) "
    "(00000005:kIOGPUCommandBufferCallbackErrorInnocentVictim).",
    "[METAL] Command buffer execution failed: Invalid Resource "
    "(00000009:kIOGPUCommandBufferCallbackErrorInvalidResource).",
    "[METAL] Command buffer execution failed: Caused GPU Address Fault Error "
    "(0000000b:kIOGPUCommandBufferCallbackErrorPageFault).",
    "[Event::Event] Failed to create Metal shared event.",
)
OUT_OF_MEMORY = (
    "[METAL] Command buffer execution failed: Insufficient Memory "
    "(00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory).",
    "[metal::malloc] Attempting to allocate 48736917632 bytes which is greater than the maximum allowed buffer size of "
    "30150672384 bytes.",
    "[metal::malloc] Resource limit (499000) exceeded.",
    "[malloc] Unable to allocate 1073741824 bytes.",
    "[malloc_or_wait] Unable to allocate 1073741824 bytes.",
)
PARTED = (
    RuntimeError("[ring] connection to a peer was lost"),
    RuntimeError("[jaccl] Send failed with error code 12"),
    RanksParted("This rank failed: ValueError: broken"),
)
OTHERS = (
    RuntimeError("[metal::Device] Unable to load kernel steel_gemm"),
    RuntimeError("[METAL2]"),
    ValueError(FAILED[0]),
    GenerationError(FAILED[0]),
    KeyError("keys"),
)


@pytest.mark.parametrize("text", FAILED)
def test_a_command_buffer_that_failed(text: str) -> None:
    assert device_fault(RuntimeError(text)) is Fault.FAILED


@pytest.mark.parametrize("text", OUT_OF_MEMORY)
def test_a_device_without_memory(text: str) -> None:
    assert device_fault(RuntimeError(text)) is Fault.OUT_OF_MEMORY


@pytest.mark.parametrize("error", PARTED)
def test_a_lost_rank_passes_the_fences_of_rows(error: RuntimeError) -> None:
    assert device_fault(error) is Fault.PARTED
    with pytest.raises(RuntimeError), RowFence("the other rows"):
        raise error


@pytest.mark.parametrize("error", [*OTHERS, None])
def test_the_device_is_not_at_fault(error: Exception | None) -> None:
    assert device_fault(error) is None


def test_what_we_find_wrong_ourselves_is_the_devices_fault() -> None:
    assert device_fault(DeviceFault("no token id")) is Fault.FAILED


def test_a_fence_around_one_row_lets_a_fault_of_all_rows_pass() -> None:
    with RowFence("the other rows") as fence:
        raise OTHERS[0]
    assert fence.error is OTHERS[0]
    with pytest.raises(RuntimeError, match="METAL"), RowFence("the other rows"):
        raise RuntimeError(FAILED[0])
    with Fence("the engine") as outer, RowFence("the other rows"):
        raise RuntimeError(OUT_OF_MEMORY[0])
    assert device_fault(outer.error) is Fault.OUT_OF_MEMORY
