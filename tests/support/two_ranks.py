"""Two ranks of one model on this machine, each a process of its own, which run a function of a test together."""

import importlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import mlx.core as mx

from vllm_mlx.core.config import EngineConfig
from vllm_mlx.core.errors import ConfigError
from vllm_mlx.engine.lane import Source
from vllm_mlx.engine.loading import load_engines, work
from vllm_mlx.ranks import watch as watching
from vllm_mlx.ranks.channel import Door, join
from vllm_mlx.ranks.lockstep import Ranks
from vllm_mlx.ranks.shards import shard_of
from vllm_mlx.ranks.watch import Watch
from vllm_mlx.runner.checkpoint import Checkpoint, find_checkpoint
from vllm_mlx.util.faults import Fault, device_fault

from .engine_driver import Driver

HOST = "127.0.0.1"
SECRET = b"a secret of this test's own"
LIMIT_S = 240.0  # of a test, however busy the machine is
_JOIN_S = 60.0
_LAST_S = 3.0


def free_ports(num: int) -> list[int]:
    """Return free ports that the system hands out to no connection by itself."""
    found: list[int] = []
    while len(found) < num:
        port = random.randrange(12000, 20000)  # the data channel of a command takes one above them
        with socket.socket() as sock:
            if port not in found and sock.connect_ex((HOST, port)) != 0:
                found.append(port)
    return found


def together(function: str, *, limit_s: float = LIMIT_S, **arguments: Any) -> tuple[Any, list[int], str]:
    """Call `module:function(ranks, **arguments)` on both ranks.

    Returns the result of rank 0, which is JSON, the exit codes of both, and what they printed.
    """
    control, *data = free_ports(3)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "hosts.json").write_text(json.dumps([[f"{HOST}:{port}"] for port in data]))
        log = stack.enter_context((folder / "log").open("w+"))
        processes = []
        for rank in range(2):
            spec = json.dumps([function, arguments, rank, control, str(folder)])
            command = [sys.executable, "-m", "tests.support.two_ranks", spec]
            process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
            stack.callback(_end, process)
            processes.append(process)
        try:
            codes = [process.wait(limit_s) for process in processes]
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"no end after {limit_s} s:\n{(folder / 'log').read_text()}") from error
        text, result = (folder / "log").read_text(), folder / "result.json"
        return json.loads(result.read_text()) if result.exists() else None, codes, text


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main(spec: str) -> None:
    function, arguments, rank, control, folder = json.loads(spec)
    module, name = function.split(":")
    os.environ |= {"MLX_RANK": str(rank), "MLX_HOSTFILE": f"{folder}/hosts.json"}
    peer = join(HOST, control, SECRET, _JOIN_S) if rank else Door(HOST, control, SECRET).accept(_JOIN_S)
    watching.SILENCE_S = watching.LOADING_SILENCE_S = LIMIT_S  # no test of these two is about silence
    watch = Watch(rank, {1 - rank: peer}, _ended)
    ranks = Ranks(watch, 2, {})
    ranks.group = mx.distributed.init(strict=True, backend="ring")
    try:
        result = getattr(importlib.import_module(module), name)(ranks, **arguments)
    except Exception as error:
        traceback.print_exc()
        if device_fault(error) is Fault.PARTED:
            time.sleep(2 * _LAST_S)  # the watch ends the process if it knows why
        watch.leave(error)
        _leave(error)
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(result))
    watch.leave()
    _leave(None)


def _ended(error: Exception | None) -> None:
    time.sleep(_LAST_S)  # the main thread ends the process sooner, unless it waits for the peer
    _leave(error)


def _leave(error: Exception | None) -> None:
    """End at once: MLX may wait at its own end for a peer that has left."""
    print(error or "", flush=True)
    os._exit(0 if error is None else 1 if isinstance(error, ConfigError) else 75)


def config_of(path: str, **settings: Any) -> EngineConfig:
    usual = {"max_model_len": 4096, "memory_budget_bytes": 2 << 30, "tensor_parallel_size": 2}
    return EngineConfig(model=path, **{**usual, **settings})


def follow(ranks: Ranks, path: str, **settings: Any) -> None:
    """A worker, until rank 0 stops."""
    work(config_of(path, **settings), _cut(ranks, path), ranks)


def _cut(ranks: Ranks, path: str) -> Checkpoint:
    """Find the checkpoint, and note what this rank takes of it."""
    checkpoint = find_checkpoint(path)
    ranks.shard = shard_of(checkpoint, ranks.size)
    return checkpoint


class RankedDriver(Driver):
    """A driver of rank 0's engine."""

    def __init__(self, ranks: Ranks, path: str, **settings: Any):
        config = config_of(path, **settings)
        self.ranks = ranks
        self.engine = load_engines([Source(name="m", config=config, checkpoint=_cut(ranks, path))], ranks=ranks)
        self.replies, self.seqs = {}, {}


if __name__ == "__main__":
    main(sys.argv[1])
