"""The checks of the prefix cache on disk: each begins with an empty folder, and removes it at its end."""

import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from scripts.served import Server, serving
from tests.support.commands import COMMAND

from .machine import IS_MAC, cached_file_bytes, output_of
from .progress import Outcome, Result, verdict

_SETTLED_S = 120.0  # the longest wait for state that is still to be written


@dataclass(frozen=True, slots=True)
class DiskChecks:
    model: str
    session: int  # tokens of a conversation
    reply: int
    log: Path

    def restart(self) -> Result:
        """Check that a session resumes from disk after a restart, with the same reply, past the system's file cache."""
        with _folder() as folder:
            with self._server(folder) as server:
                prompt = server.prompt(self.session)
                server.complete(prompt, 1)
                _settle(server)
                server.stop()
            cached = cached_file_bytes()
            with self._server(folder) as server:
                stream = server.stream(prompt, 1)
                read = self._counts(server)
                grown = None if cached is None else (cached_file_bytes() or 0) - cached
                reply = server.complete(prompt, self.reply)["choices"][0]["text"]
        with serving(self.log, self.model, "--cache-disk", "0") as server:
            computed = server.complete(prompt, self.reply)["choices"][0]["text"]
        first_s, num_bytes = stream.moments[0] - stream.sent_s if stream.moments else 0.0, read["bytes_read"]
        likeness = "the same reply" if reply == computed else "another reply"
        speed = num_bytes / 1e9 / max(first_s, 1e-9)
        text = f"{num_bytes / 1e9:.2f} GB read, first token after {first_s:.2f} s ({speed:.1f} GB/s); {likeness}"
        if grown is not None:
            text += f"; cached files grew by {grown / 1e9:+.2f} GB"
        return verdict(reply == computed and (read["hits"] >= 1 or not IS_MAC), f"{text}.")

    def kill(self) -> Result:
        """Check that a killed server's records are whole, and that the next server resumes a long prompt from them."""
        with _folder() as folder:
            with self._server(folder) as server:
                prompt = server.prompt(self.session)
                threading.Thread(target=_until_killed, args=(server, prompt), daemon=True).start()
                deadline = time.monotonic() + _SETTLED_S
                while not self._counts(server)["num_records"] and time.monotonic() < deadline:
                    time.sleep(0.05)
                server.process.kill()
                server.process.wait()
            command = [*COMMAND, "cache", "verify", "--cache-dir", str(folder)]
            verified = subprocess.run(command, capture_output=True, text=True, check=False)
            with self._server(folder) as server:
                answer = server.complete(prompt, 1)
        cached = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        text = f"{cached} of {self.session} tokens were kept; `cache verify` ended with {verified.returncode}."
        return verdict(verified.returncode == 0, text)

    def writes(self) -> Result:
        """Measure a reply alone, and one beside the writing of a long conversation."""
        with _folder() as folder, self._server(folder) as server:
            server.complete(server.prompt(64), self.reply)
            alone = server.stream(server.prompt(64), self.reply).tokens_per_s
            server.complete(server.prompt(self.session), 1)
            beside = server.stream(server.prompt(64), self.reply).tokens_per_s
        text = (
            f"{alone:.1f} tokens/s alone, {beside:.1f} while {self.session} tokens are written: {beside / alone:.2f}."
        )
        return verdict(beside >= 0.97 * alone, text) if IS_MAC else Result(Outcome.FIGURE, text)

    def apart(self) -> Result:
        """Check that Time Machine and Spotlight leave the folder out."""
        with _folder() as folder, self._server(folder) as server:
            server.complete(server.prompt(self.session), 1)
            _settle(server)
            excluded = output_of("tmutil", "isexcluded", str(folder))
            found = output_of("mdfind", "-onlyin", str(folder), "-count", "kMDItemFSSize > 0").strip()
        if not IS_MAC:
            return Result(Outcome.FIGURE, "This machine has neither Time Machine nor Spotlight.")
        text = f"Time Machine: {excluded.split()[0] if excluded else '?'}; files that Spotlight finds: {found or '?'}."
        return verdict("[Excluded]" in excluded and found == "0", text)

    def _server(self, folder: Path) -> AbstractContextManager[Server]:
        return serving(self.log, self.model, "--cache-dir", str(folder), "--cache-disk", "20GB")

    @staticmethod
    def _counts(server: Server) -> dict[str, Any]:
        return dict(server.status()["cache"]["disk"])


@contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="mac-check-", dir=Path.home()))  # Spotlight does not look at /tmp
    try:
        yield folder / "cache"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _settle(server: Server) -> None:
    """Wait until all is written, because a server that stops may not have the time."""
    deadline = time.monotonic() + _SETTLED_S
    while time.monotonic() < deadline:
        disk = server.status()["cache"]["disk"]
        if disk["num_records"] and not disk["num_waiting_bytes"]:
            return
        time.sleep(0.2)


def _until_killed(server: Server, prompt: list[int]) -> None:
    with suppress(httpx.HTTPError):
        server.complete(prompt, 1)
