"""Looks at this machine: Python, MLX's device, memory, Hugging Face's cache, the port. Loads no model."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from ...core.errors import ConfigError, VLLMMLXError
from ..banner import local_url, readable
from ..models.cached import cache_folder
from ..remote import Remote
from ..settings import Settings
from .check import Check

_OLDEST = (3, 11)
_PORT_ANSWER_S = 3.0  # a program that holds a port may answer nothing
_LITTLE_DISK = 20_000_000_000  # bytes: a model of eight billion weights in four bits, twice


def check_python() -> Check:
    version = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.version_info < _OLDEST:
        return Check("Python", "bad", f"{version}: it has to be 3.11 or newer")
    if sys.platform == "darwin" and platform.machine() != "arm64":
        return Check("Python", "bad", f"{version}: it runs translated, for Intel; install one for Apple silicon")
    return Check("Python", "good", version)


def check_device() -> Check:
    try:
        import mlx.core as mx

        is_metal = mx.metal.is_available()
        value = mx.sum(mx.ones((64, 64)) @ mx.ones((64, 64))).item()
    except (ImportError, OSError, RuntimeError) as error:
        return Check("MLX", "bad", f"it does not work: {error}")
    if value != 64**3:
        return Check("MLX", "bad", f"a product of two matrices is wrong: {value} in place of {64**3}")
    version = getattr(mx, "__version__", "?")
    if is_metal:
        return Check("MLX", "good", f"{version}, Metal on {mx.device_info().get('device_name', 'this GPU')}")
    if sys.platform == "darwin":
        return Check("MLX", "bad", f"{version} finds no Metal: is this a virtual machine, or macOS too old?")
    return Check("MLX", "warning", f"{version} on the CPU: for trying and testing, many times slower than Metal")


def check_memory(settings: Settings) -> Check:
    """What the server may take, against what there is."""
    from ...runner.device import device_memory

    device = device_memory()
    asked = settings.memory_budget
    budget = device.default_budget_bytes if asked is None else asked.to_bytes(device.total_bytes)
    text = f"{readable(device.total_bytes)}, of which the server takes {readable(budget)} at most"
    limit = device.recommended_bytes
    if limit is not None:
        text += f"; Metal keeps up to {readable(limit)} wired{_wired_setting()}"
        if budget > limit:
            return Check("Memory", "warning", f"{text}: more than that is slow. Lower --memory-budget")
    if budget > device.total_bytes:
        return Check("Memory", "bad", f"{text}: there is not so much. Lower --memory-budget")
    return Check("Memory", "good", text)


def _wired_setting() -> str:
    """What its user set of macOS's limit, if anything."""
    try:
        result = subprocess.run(
            ["/usr/sbin/sysctl", "-n", "iogpu.wired_limit_mb"], capture_output=True, text=True, timeout=5, check=True
        )
        megabytes = int(result.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return ""
    return f" (iogpu.wired_limit_mb is {megabytes})" if megabytes else " (macOS's own limit)"


def check_downloads() -> Check:
    folder = cache_folder()
    standing = next(each for each in (folder, *folder.parents) if each.exists())
    free = shutil.disk_usage(standing).free
    text = f"{folder}, {readable(free)} free"
    if not _is_writable(folder if folder.exists() else standing):
        return Check("Downloads", "bad", f"{text}: it cannot be written to. Set HF_HOME to a folder that can")
    if free < _LITTLE_DISK:
        return Check("Downloads", "warning", f"{text}: little for a checkpoint. HF_HOME may name another disk")
    return Check("Downloads", "good", text)


def _is_writable(folder: Path) -> bool:
    return os.access(folder, os.W_OK | os.X_OK)


def check_port(settings: Settings) -> Check:
    """Free, or held by a server of ours."""
    if settings.port == 0:
        return Check("Port", "good", "any free one, as it is set to 0")
    from ...server.run import listen

    try:
        listen(settings.host, settings.port).close()
    except ConfigError as error:
        url = local_url(settings.host, settings.port)
        key = next(iter(settings.api_keys), None)
        try:
            model = Remote(url, key, answer_s=_PORT_ANSWER_S).model().name
        except VLLMMLXError:
            return Check("Port", "bad", error.message.rstrip("."))
        return Check("Port", "good", f"a server is there already: {url} serves {model}")
    return Check("Port", "good", f"{settings.port} on {settings.host} is free")
