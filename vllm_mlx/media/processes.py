"""Starts the processes that open PDFs, videos and large images, and collects their results. The server's side."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np

from ..core.errors import InvalidImage, Overloaded, setting
from ..util.fair_queue import FairQueue
from ..util.tasks import Deadline, python_process
from . import worker
from .decode import ImageFile
from .worker import END, FRAME, REFUSED, SIZE, TOO_LARGE, TOO_SLOW, ImageTask, Task

MAX_MEMORY_BYTES = 1 << 30
LARGE_PIXELS = 1 << 24  # larger images are decoded in a process
_BYTES_PER_PIXEL = 24  # limit for Pillow's decoders and the pixels, in addition to 256 MB for everything else
TOO_MUCH = -1000  # a status in addition to the exit statuses of processes: the process sent too much
_PROCESSES = 3  # at the same time
_PER_TENANT = 2  # so that other tenants need not wait for its files
_RETRY_S = 5.0
_END_S = 1.0  # time for a process to end after its last frame
_KILLED = (-signal.SIGKILL, -signal.SIGTERM)  # exit statuses of a process that the system or a user ended

Frame = tuple[bytes, bytes]  # its kind, its content


@dataclass
class ReadingFailed(Exception):
    """Raised if a process did not read its file to the end."""

    status: int  # its exit status, `TOO_MUCH`, or 0 for a file that it refused
    reason: str = ""  # why it refused the file


class Processes:
    """Runs worker processes, on one event loop. Tenants and their requests take turns."""

    def __init__(self, max_memory_bytes: int = MAX_MEMORY_BYTES) -> None:
        """`max_memory_bytes`: the limit of a process that reads a document or a video."""
        self.max_memory_bytes = max_memory_bytes
        self._places = FairQueue(_PROCESSES, per_key=_PER_TENANT)

    async def read(self, task: Task, data: bytes, max_bytes: int, deadline: Deadline, tenant: str) -> list[Frame]:
        """Start a process that does the task, and return its result, of `max_bytes` at most.

        Raises ReadingFailed, Overloaded if it was not the file's fault, and the deadline's error.
        """
        async with self._places.hold(tenant, deadline):
            deadline.check()
            async with _process(task) as process:
                feeding = asyncio.create_task(_feed(process, data))
                try:
                    return await _frames(process, max_bytes)
                finally:
                    feeding.cancel()
                    await asyncio.gather(feeding, return_exceptions=True)

    async def pixels(self, file: ImageFile, max_s: float, deadline: Deadline, tenant: str) -> np.ndarray:
        """Return the pixels of an image. Raises InvalidImage, Overloaded, and the deadline's error."""
        max_memory_bytes = (256 << 20) + _BYTES_PER_PIXEL * file.num_pixels
        task = ImageTask(max_s=max_s, max_memory_bytes=max_memory_bytes, max_pixels=file.num_pixels)
        try:
            [(_, sent)] = await self.read(task, file.data, SIZE.size + 3 * file.num_pixels, deadline, tenant)
        except ReadingFailed as error:
            raise undecodable(error, max_s, "Send a smaller one.") from error
        return sent_pixels(sent)


def sent_pixels(sent: bytes) -> np.ndarray:
    """Return the image of a `PIXELS` frame: (height, width, 3), uint8."""
    width, height = SIZE.unpack_from(sent)
    return np.frombuffer(sent, np.uint8, offset=SIZE.size).reshape(height, width, 3)


def undecodable(error: ReadingFailed, max_decode_s: float, advice: str) -> InvalidImage:
    """Return the refusal of an image or a video. `advice`: a sentence with a remedy."""
    if error.status == TOO_SLOW:
        return too_slow(max_decode_s, advice)
    if error.status == TOO_LARGE:
        return InvalidImage(f"it takes too much memory to decode. {advice}")
    return InvalidImage(error.reason or "it is broken: it cannot be decoded.")


def too_slow(max_decode_s: float, advice: str) -> InvalidImage:
    return InvalidImage(
        f"it takes longer than {max_decode_s:g} seconds to decode ({setting('max_decode_s')}). {advice}"
    )


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
async def _process(task: Task) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start a process that ends with the block. It inherits neither environment variables nor files of Python."""
    command, environment = python_process(worker.__name__)
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            task.argument,
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
