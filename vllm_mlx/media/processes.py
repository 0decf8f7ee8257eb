"""Files of strangers are read in processes of their own, which can be ended. The server's side of them."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from ..core.errors import Overloaded
from ..core.fair_queue import FairQueue
from ..core.tasks import Deadline, python_process
from .own_process import END, FRAME, REFUSED

MAX_MEMORY_BYTES = 1 << 30  # limit of one process
TOO_MUCH = -1000  # what was sent exceeds its limit; beside the exit statuses of processes
_PROCESSES = 3  # at the same time
_PER_TENANT = 2  # so that other tenants need not wait for its files
_RETRY_S = 5.0
_END_S = 1.0  # time for a process to end after its last frame
_KILLED = (-signal.SIGKILL, -signal.SIGTERM)  # exit statuses of a process that the system or a user ended

Frame = tuple[bytes, bytes]  # its kind, its content


@dataclass
class ReadingFailed(Exception):
    """A process did not read its file to the end."""

    status: int  # its exit status, `TOO_MUCH`, or 0 for a file that it refused
    reason: str = ""  # why it refused the file


class Processes:
    """Used on one event loop. Tenants and their requests take turns."""

    def __init__(self) -> None:
        self._places = FairQueue(_PROCESSES, per_key=_PER_TENANT)

    async def read(
        self, module: str, settings: Any, data: bytes, max_bytes: int, deadline: Deadline, tenant: str
    ) -> list[Frame]:
        """Start `module` with `settings` on the file, and return what it sends, of `max_bytes` at most.

        Raises ReadingFailed, Overloaded if it was not the file's fault, and what the deadline raises.
        """
        async with self._places.hold(tenant, deadline):
            deadline.check()
            async with _process(module, settings) as process:
                feeding = asyncio.create_task(_feed(process, data))
                try:
                    return await _frames(process, max_bytes)
                finally:
                    feeding.cancel()
                    await asyncio.gather(feeding, return_exceptions=True)


async def _frames(process: asyncio.subprocess.Process, max_bytes: int) -> list[Frame]:
    assert process.stdout is not None
    frames: list[Frame] = []
    try:
        while True:
            kind, length = FRAME.unpack(await process.stdout.readexactly(FRAME.size))
            max_bytes -= length
            if max_bytes < 0:
                raise ReadingFailed(TOO_MUCH)
            payload = await process.stdout.readexactly(length)
            if kind == END:
                return frames
            if kind == REFUSED:
                raise ReadingFailed(0, payload.decode())
            frames.append((kind, payload))
    except asyncio.IncompleteReadError:
        status = await process.wait()
    if status in _KILLED:
        message = "The process that read a file of this request was killed. Send the request again."
        raise Overloaded(message, retry_after_s=_RETRY_S)
    raise ReadingFailed(status)


@asynccontextmanager
async def _process(module: str, settings: Any) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start a process, which ends with the block. It inherits no environment, and no file that Python opened."""
    command, environment = python_process(module)
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            json.dumps(settings),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=environment,
            close_fds=False,  # otherwise it would be forked, which takes long in a process as large as this one
        )
    except OSError as error:
        raise Overloaded(f"No process could be started to read a file: {error}.", retry_after_s=_RETRY_S) from error
    is_done = False
    try:
        yield process
        is_done = True
    finally:
        if not is_done and process.returncode is None:
            process.kill()
        await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Wait for a process that has sent its last frame, and kill it if it does not end."""
    try:
        async with asyncio.timeout(_END_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


async def _feed(process: asyncio.subprocess.Process, data: bytes) -> None:
    """Write the file to the process, which may end before it has read everything."""
    assert process.stdin is not None
    try:
        process.stdin.write(data)
        await process.stdin.drain()
        process.stdin.close()
    except (BrokenPipeError, ConnectionResetError):
        pass
