"""The checks of a Mac: each tries one thing that Linux cannot show, and returns its result.

The experiment `Wiring` decides whether weights may be wired: does macOS panic under the load that is reported to do it?
Two streams of prompts never repeat, and the prefix cache is so small that each prompt evicts another: buffers come and
go all the time. One arm wires nothing, the other one the weights. Both must live.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx

from scripts.served import BenchmarkError, Fields, Server, serving
from tests.support.commands import COMMAND
from vllm_mlx.core.memory import SHORTEST_CHUNK

from .progress import (
    IS_MAC,
    PACKAGES,
    Check,
    Outcome,
    Result,
    footprint,
    output_of,
    sysctl,
    verdict,
    version_of,
    virtual_memory,
)

_SETTLED_S = 120.0  # the longest wait for state that is still to be written


@dataclass(frozen=True, slots=True)
class DiskChecks:
    model: str
    session: int  # tokens of a conversation
    reply: int
    log: Path

    def restart(self) -> Result:
        """Check that a session resumes from disk after a restart, with the same reply, past the system's file cache."""
        with _new_folder() as folder:
            with self._caching_server(folder) as server:
                prompt = server.prompt(self.session)
                server.complete(prompt, 1)
                _settle(server)
                server.stop()
            before = virtual_memory()
            with self._caching_server(folder) as server:
                stream = server.stream(prompt, 1)
                read = self._counts(server)
                after = virtual_memory()
                reply = server.complete(prompt, self.reply)["choices"][0]["text"]
        with serving(self.log, self.model, "--cache-disk", "0") as server:
            computed = server.complete(prompt, self.reply)["choices"][0]["text"]
        first_s, num_bytes = stream.ttft_s if stream.deltas else 0.0, read["bytes_read"]
        likeness = "the same reply" if reply == computed else "another reply"
        speed = num_bytes / 1e9 / max(first_s, 1e-9)
        text = f"{num_bytes / 1e9:.2f} GB read, first token after {first_s:.2f} s ({speed:.1f} GB/s); {likeness}"
        if before is not None and after is not None:
            text += f"; cached files grew by {(after.cached_bytes - before.cached_bytes) / 1e9:+.2f} GB"
        return verdict(reply == computed and (read["hits"] >= 1 or not IS_MAC), f"{text}.")

    def kill(self) -> Result:
        """Check that a killed server's records are whole, and that the next server resumes a long prompt from them."""
        with _new_folder() as folder:
            with self._caching_server(folder) as server:
                prompt = server.prompt(self.session)
                threading.Thread(target=_until_killed, args=(server, prompt), daemon=True).start()
                deadline = time.monotonic() + _SETTLED_S
                while not self._counts(server)["num_records"] and time.monotonic() < deadline:
                    time.sleep(0.05)
                server.kill()
            command = [*COMMAND, "cache", "verify", "--cache-dir", str(folder)]
            verified = subprocess.run(command, capture_output=True, text=True, check=False)
            with self._caching_server(folder) as server:
                answer = server.complete(prompt, 1)
        cached = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        text = f"{cached} of {self.session} tokens were kept; `cache verify` ended with {verified.returncode}."
        return verdict(verified.returncode == 0, text)

    def writes(self) -> Result:
        """Measure a reply alone, and one beside the writing of a long conversation."""
        with _new_folder() as folder, self._caching_server(folder) as server:
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
        with _new_folder() as folder, self._caching_server(folder) as server:
            server.complete(server.prompt(self.session), 1)
            _settle(server)
            excluded = output_of("tmutil", "isexcluded", str(folder))
            found = output_of("mdfind", "-onlyin", str(folder), "-count", "kMDItemFSSize > 0").strip()
        if not IS_MAC:
            return Result(Outcome.FIGURE, "This machine has neither Time Machine nor Spotlight.")
        text = f"Time Machine: {excluded.split()[0] if excluded else '?'}; files that Spotlight finds: {found or '?'}."
        return verdict("[Excluded]" in excluded and found == "0", text)

    def _caching_server(self, folder: Path) -> AbstractContextManager[Server]:
        return serving(self.log, self.model, "--cache-dir", str(folder), "--cache-disk", "20GB")

    @staticmethod
    def _counts(server: Server) -> dict[str, Any]:
        return dict(server.status()["cache"]["disk"])


@contextmanager
def _new_folder() -> Iterator[Path]:
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


_LEAST_CACHE = 10**6  # bytes; a flag with fewer is refused
ARMS = ("none", "weights")
WARNING = (
    "This may restart the Mac: a kernel panic is what the experiment looks for. Save your work and close other "
    "programs. After a restart, run the same command again: it goes on, and the report says in which arm it was."
)
_STREAMS = 2
_WIRED_REPLY = 64  # tokens


@dataclass(slots=True)
class _Seen:
    num_replies: int = 0
    errors: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    model: str
    log: Path
    minutes: float  # of an arm
    prompt_tokens: int = 12_000

    def checks(self) -> list[Check]:
        return [
            Check(
                f"wired-{arm}",
                f"{_STREAMS} streams, tiny cache, --wired {arm}.",
                self.minutes + 1,
                partial(self._loaded, arm),
                is_risky=True,
            )
            for arm in ARMS
        ]

    def _loaded(self, arm: str) -> Result:
        with serving(self.log, self.model) as server:
            facts = server.status()["model_facts"]
        prompt_bytes = facts["fixed_bytes_per_row"] + facts["bytes_per_token"] * self.prompt_tokens
        flags = ("--wired", arm, "--cache-memory", str(max(_LEAST_CACHE, int(1.5 * prompt_bytes))))
        log_start = self.log.stat().st_size
        seen, before = _Seen(), virtual_memory()
        with serving(self.log, self.model, *flags) as server, ThreadPoolExecutor(_STREAMS) as pool:
            until_s = time.monotonic() + 60 * self.minutes
            for _ in range(_STREAMS):
                pool.submit(self._ask_until, server, until_s, seen)
            pool.shutdown()
            after, status = virtual_memory(), server.status()
        evictions = status["shrinking"]["cache_evictions"]
        text = f"{self.minutes:g} min, {seen.num_replies} replies, {evictions} evictions"
        if before is not None and after is not None:
            text += f", {(after.wired_bytes - before.wired_bytes) / 1e9:+.2f} GB wired"
        text += f"; errors: {seen.errors[:3]}." if seen.errors else "; no error."
        if unwired := re.search(r"The weights are not wired: (.*)", self.log.read_text(encoding="utf-8")[log_start:]):
            return Result(Outcome.SKIPPED, f"{text} Nothing was wired: {unwired[1]}.")
        return verdict(seen.num_replies > 0 and not seen.errors, text)

    def _ask_until(self, server: Server, until_s: float, seen: _Seen) -> None:
        while time.monotonic() < until_s and len(seen.errors) < 10:
            try:
                stream = server.stream(server.prompt(self.prompt_tokens), _WIRED_REPLY)
            except (BenchmarkError, OSError) as error:
                seen.errors.append(f"{type(error).__name__}: {error}")
                continue
            if stream.deltas:
                seen.num_replies += 1
            else:
                seen.errors.append("a reply without a token")


ROOT = Path(__file__).parents[2]
_CACHED_BYTES = 2 << 30  # freed buffers that MLX may keep beside the budget
_PYTEST = (sys.executable, "-m", "pytest", "-n", "auto", "--maxprocesses", "4", "--dist", "loadfile")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Lengths in tokens, unless they say otherwise."""

    reply: int = 300
    many_clients: int = 16  # requests
    client_prompt: int = 4_000
    long_prompt: int = 130_000
    stalling_prompt: int = 20_000
    stalled_reply: int = 2_000
    repeats: int = 5  # requests
    mixed: tuple[int, ...] = (60_000, 20_000, 8_000, 2_000)
    steps: int = 20_000
    stop_s: float = 20.0  # seconds
    rests_s: tuple[float, ...] = (0, 3, 30)  # seconds
    session: int = 30_000  # of a conversation that is kept on disk


SMALL = Sizes(
    reply=40,
    many_clients=3,
    client_prompt=200,
    long_prompt=1_500,
    stalling_prompt=800,
    stalled_reply=120,
    repeats=3,
    mixed=(600, 200, 80, 20),
    steps=60,
    stop_s=1.0,
    rests_s=(0, 0.5),
    session=1_500,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MacChecks:
    model: str
    vision_model: str
    bf16_model: str
    sizes: Sizes
    log: Path

    def all(self) -> list[Check]:
        guided = ("tests/engine/test_guided.py", "tests/engine/test_budgets.py", "tests/server/test_guided_replies.py")
        videos = ("tests/media/test_video.py", "tests/media/test_video_frames.py", "tests/server/test_videos_real.py")
        widths = "tests/engine/test_metal_widths.py"
        disk = DiskChecks(self.model, self.sizes.session, self.sizes.reply, self.log)
        return [
            Check("setup", "The scripts installed MLX for Metal, with macOS's bash, and the GPU is used.", 1, _setup),
            Check("widths", "Kernels of real models reply right in bf16 and 4 bits.", 3, _tests(widths, "-m", "")),
            Check("shapes", "Metal's own checks find no fault in a kernel's access.", 3, _shapes(widths), True),
            Check("guided", "Masks of llguidance's Metal kernel hold a reply to its schema.", 3, _tests(*guided)),
            Check("videos", "PyAV's wheel reads and writes videos.", 1, _tests(*videos)),
            Check("speed", "One stream is at least 0.9 times as fast as mlx-lm.", 3, self.speed, True),
            Check("bf16", "Unquantised weights reply, alone and four at once.", 2, self.bf16),
            Check("repeats", "Equal requests: all replies equal with --repeatable?", 3, self.repeats),
            Check("budget", "The memory budget is 0.9 of what Metal recommends.", 1, self.budget, True),
            Check("refusal", "Too little memory is refused in one line.", 1, self.refusal),
            Check("memory", "Many clients at once stay within the budget.", 5, self.memory),
            Check("long-prompt", "A long prompt fits the planned memory; no watchdog ends it.", 10, self.long_prompt),
            Check("stalls", "A reply keeps coming while a long prompt is read.", 5, self.stalls),
            Check("mixed", "Replies of mixed lengths together are 1.5 times as fast as one.", 8, self.mixed),
            Check("buffers", "Long decoding of two rows leaves no buffers behind.", 10, self.buffers),
            Check("stopped", "A process that was stopped and continued goes on with its reply.", 2, self.stopped),
            Check("rest", "First tokens after a rest, with weights that are wired and not.", 5, self.rest),
            Check(
                "disk-restart",
                "A session resumes from disk: same reply, speed, no copy in file caches.",
                4,
                disk.restart,
            ),
            Check("disk-kill", "What a killed server has kept is whole, and is used.", 3, disk.kill),
            Check("disk-writes", "Writing to disk does not slow down a reply.", 3, disk.writes),
            Check("disk-apart", "Time Machine and Spotlight leave the cache out.", 2, disk.apart),
            Check("command-buffers", "Speed with command buffers of other sizes.", 4, self.command_buffers, True),
            Check("forcing", "Long prompts with and without forced attention (heads of 256).", 6, self.forcing, True),
            Check("end", "SIGTERM during a reply ends the process and frees its memory.", 2, self.end),
            Check("tests", "All tests of the gate pass.", 20, _tests()),
        ]

    def speed(self) -> Result:
        text = "Count to one hundred."
        with self._server() as server:
            server.complete(text, 8)
            ours = server.stream(text, self.sizes.reply).tokens_per_s
        command = [sys.executable, "-m", "mlx_lm", "generate", "--model", self.model, "--prompt", text]
        printed = _run(*command, "--max-tokens", str(self.sizes.reply)).stdout
        found = re.search(r"Generation: .*?([\d.]+) tokens-per-sec", printed)
        if found is None:
            return Result(Outcome.FAIL, f"{ours:.1f} tokens/s; mlx-lm printed no speed.")
        theirs = float(found[1])
        return verdict(ours >= 0.9 * theirs, f"{ours:.1f} tokens/s, mlx-lm {theirs:.1f}: {ours / theirs:.2f} times.")

    def bf16(self) -> Result:
        with self._server(model=self.bf16_model) as server:
            alone = server.complete("The capital of France is", 20)["choices"][0]["text"]
            prompts = [server.prompt(50 + 30 * number) for number in range(4)]
            lengths = [len(stream.deltas) for stream in server.streams(prompts, self.sizes.reply)]
        return verdict(bool(alone.strip()) and all(lengths), f"Alone: {alone!r}. Four at once: all replied.")

    def repeats(self) -> Result:
        with self._server() as server:
            prompt = server.prompt(self.sizes.client_prompt)
            usual = [self._reply(server, prompt) for _ in range(self.sizes.repeats)]
        with self._server("--repeatable") as server:
            alone = [self._reply(server, prompt) for _ in range(self.sizes.repeats)]
            with ThreadPoolExecutor() as pool:
                others = [pool.submit(server.stream, server.prompt(700), self.sizes.reply) for _ in range(3)]
                beside = self._reply(server, prompt)
                for other in others:
                    other.result()
        num_equal = sum(reply == usual[0] for reply in usual)
        is_right = all(reply == alone[0] for reply in (*alone, beside))
        text = f"Without the flag {num_equal} of {len(usual)} equal; with it {'all' if is_right else 'NOT all'}."
        return verdict(is_right, text)

    def _reply(self, server: Server, prompt: list[int]) -> object:
        choice = server.complete(prompt, self.sizes.reply, logprobs=1)["choices"][0]
        return choice["text"], choice["logprobs"]["token_logprobs"]

    def budget(self) -> Result:
        recommended = int(mx.device_info()["max_recommended_working_set_size"])
        with self._server() as server:
            total = int(server.status()["memory"]["total_bytes"])
        text = f"{total / 1e9:.2f} GB of {recommended / 1e9:.2f} GB recommended."
        return verdict(abs(total - 0.9 * recommended) < 1e7, text)

    def refusal(self) -> Result:
        result = _run(*COMMAND, "serve", self.model, "--port", "0", "--memory-budget", "2MB")
        lines = [line for line in result.stderr.splitlines() if "Too little memory" in line]
        return verdict(result.returncode == 1 and len(lines) == 1, f"Exit code {result.returncode}: {lines[:1]}")

    def memory(self) -> Result:
        with self._server() as server:
            tight = self._tight_budget(server.status())
        flags = ("--max-num-seqs", str(self.sizes.many_clients), "--memory-budget", str(tight))
        with self._server(*flags) as server:
            prompts = [server.prompt(self.sizes.client_prompt) for _ in range(self.sizes.many_clients)]
            server.streams(prompts, self.sizes.reply)
            status, process = server.status(), footprint(server.process.pid)
        total = int(status["memory"]["total_bytes"])
        peak = process.peak_bytes if process else int(1e9 * status["metal"]["peak_memory_gb"])
        text = f"Peak {peak / 1e9:.2f} GB, budget {total / 1e9:.2f} GB. {_pressure(status)}"
        return verdict(peak <= total + _CACHED_BYTES, text)

    def _tight_budget(self, status: Fields) -> int:
        """Return bytes in which about half of the clients' rows fit."""
        memory, row_tokens = status["memory"], self.sizes.client_prompt + self.sizes.reply
        rows_bytes = int(status["model_facts"]["bytes_per_token"]) * row_tokens * self.sizes.many_clients // 2
        needed = 1.1 * (int(memory["weights_bytes"]) + int(memory["transient_bytes"]) + rows_bytes)
        return min(int(needed), int(memory["total_bytes"]))

    def long_prompt(self) -> Result:
        with self._server() as server:
            longest = int(server.status()["model_facts"]["max_model_len"]) - 2 * self.sizes.reply
            num_tokens = min(self.sizes.long_prompt, longest)
            stream = server.stream(server.prompt(num_tokens), self.sizes.reply)
            status = server.status()
        first_s = stream.ttft_s
        peak, limit = status["metal"]["peak_memory_gb"], status["metal"]["limit_memory_gb"]
        is_planned = not status["shrinking"]["shorter_chunks"] and not status["memory"]["lacking_bytes"]
        text = f"{num_tokens} tokens, first token after {first_s:.1f} s; peak {peak} GB of {limit} GB. "
        return verdict(peak <= limit and is_planned, text + _pressure(status))

    def stalls(self) -> Result:
        with self._server() as server:
            server.complete(server.prompt(self.sizes.stalling_prompt // 4), 4)  # kernels compile here
            with ThreadPoolExecutor() as pool:
                reply = pool.submit(server.stream, server.prompt(50), self.sizes.stalled_reply)
                time.sleep(1)
                prompt = pool.submit(server.stream, server.prompt(self.sizes.stalling_prompt), 4)
                first_s = prompt.result().ttft_s
                gap_s = reply.result().worst_gap_s()
            shortest_s = SHORTEST_CHUNK / server.status()["model_facts"]["prefill_tokens_per_s_at_load"]
        most_s = 3 * max(0.2, shortest_s)
        text = f"Longest gap {1000 * gap_s:.0f} ms (at most {1000 * most_s:.0f}); first token after {first_s:.1f} s."
        return demanded(gap_s < most_s, text)

    def mixed(self) -> Result:
        with self._server() as server:
            prompts = [server.prompt(length) for length in self._fitting_lengths(server.status())]
            for prompt in prompts:
                server.complete(prompt, 1)  # the prefix cache holds it, so the rest is decoding
            one = server.stream(prompts[-1], self.sizes.reply).tokens_per_s
            all_of_them = sum(stream.tokens_per_s for stream in server.streams(prompts, self.sizes.reply))
        rows = f"{len(prompts)} rows of {', '.join(str(len(prompt)) for prompt in prompts)} tokens"
        text = f"One row {one:.1f} tokens/s, {rows} {all_of_them:.1f}: {all_of_them / one:.2f} times."
        return demanded(all_of_them > 1.5 * one, text)

    def _fitting_lengths(self, status: Fields) -> list[int]:
        """Return the mixed lengths, shortened alike so that rows and cached prompts fit side by side."""
        facts, lengths = status["model_facts"], self.sizes.mixed
        all_bytes = 2 * sum(lengths) * int(facts["bytes_per_token"])
        longest = int(facts["max_model_len"]) - 2 * self.sizes.reply
        share = min(1.0, 0.8 * int(status["memory"]["free_bytes"]) / all_bytes, longest / max(lengths))
        return [max(1, int(share * length)) for length in lengths]

    def buffers(self) -> Result:
        with self._server(model=self.vision_model) as server:
            server.streams([server.prompt(40), server.prompt(60)], 32)
            before = footprint(server.process.pid)
            server.streams([server.prompt(40), server.prompt(60)], self.sizes.steps)
            after = footprint(server.process.pid)
        if before is None or after is None or before.num_regions is None or after.num_regions is None:
            return Result(Outcome.SKIPPED, f"{self.sizes.steps} steps ran; this machine has no `footprint`.")
        text = f"{before.num_regions} regions before {self.sizes.steps} steps, {after.num_regions} after."
        return verdict(after.num_regions < before.num_regions + 5_000, text)

    def stopped(self) -> Result:
        with self._server() as server, ThreadPoolExecutor() as pool:
            reply = pool.submit(server.stream, server.prompt(100), self.sizes.stalled_reply)
            time.sleep(1)
            server.process.send_signal(signal.SIGSTOP)
            time.sleep(self.sizes.stop_s)
            server.process.send_signal(signal.SIGCONT)
            num_parts = len(reply.result().deltas)
            errors = server.status()["last_errors"]
        return verdict(num_parts > 0 and not errors, f"{num_parts} parts of the reply came; errors: {len(errors)}.")

    def rest(self) -> Result:
        """Measure whether macOS takes unwired weights out of the GPU's reach. Each rest is tried three times."""
        found = []
        for wired in ("none", "weights"):
            with self._server("--wired", wired) as server:
                server.complete(server.prompt(32), 8)
                waits = [
                    f"{rest_s:g} s {1000 * self._first_token_s(server, rest_s):.0f} ms" for rest_s in self.sizes.rests_s
                ]
            found.append(f"--wired {wired}: " + ", ".join(waits))
        return Result(Outcome.FIGURE, "; ".join(found) + ".")

    def _first_token_s(self, server: Server, rest_s: float) -> float:
        """Return the median of three first tokens of a short prompt, each after a rest."""
        waits = []
        for _ in range(3):
            time.sleep(rest_s)
            waits.append(server.stream(server.prompt(32), 8).ttft_s)
        return sorted(waits)[1]

    def command_buffers(self) -> Result:
        """Measure decoding and its peak of memory with MLX's limit of a command buffer and with a higher one."""
        found = []
        for size in ("", "200"):
            variables = {"MLX_MAX_MB_PER_BUFFER": size} if size else {}
            with serving(self.log, self.model, variables=variables) as server:
                server.complete(server.prompt(self.sizes.client_prompt), 8)
                speed = server.stream(server.prompt(32), self.sizes.reply).tokens_per_s
                peak = server.status()["metal"]["peak_memory_gb"]
            found.append(f"{size or 'default'}: {speed:.1f} tokens/s, peak {peak} GB")
        return Result(Outcome.FIGURE, "MLX_MAX_MB_PER_BUFFER " + "; ".join(found) + ".")

    def forcing(self) -> Result:
        """Measure a prompt with the attention kernel that saves memory, and with MLX's choice. `--model` decides.

        Only widths of 192 and 256 differ: Qwen3.5, Qwen3.6 and Gemma 3 have them.
        """
        found = []
        for name, flag in (("forced", "1"), ("MLX's choice", "0")):
            with serving(self.log, self.model, variables={"VLLM_MLX_FORCE_ATTENTION": flag}) as server:
                num_tokens = min(self.sizes.session, int(server.status()["model_facts"]["max_model_len"]) - 8)
                stream = server.stream(server.prompt(num_tokens), 2)
                peak = server.status()["metal"]["peak_memory_gb"]
            speed = num_tokens / stream.ttft_s
            found.append(f"{name}: {speed:.0f} tokens/s, peak {peak} GB")
        return Result(Outcome.FIGURE, f"{num_tokens} tokens of a prompt. " + "; ".join(found) + ".")

    def end(self) -> Result:
        before = virtual_memory()
        with self._server("--drain-s", "2") as server, ThreadPoolExecutor() as pool:
            pool.submit(server.stream, server.prompt(100), self.sizes.stalled_reply)
            time.sleep(2)
            code = server.stop()
        time.sleep(3)
        after = virtual_memory()
        if before is None or after is None:
            return verdict(code == 0, f"Exit code {code}; this machine has no `vm_stat`.")
        kept = after.wired_bytes - before.wired_bytes
        return verdict(code == 0 and kept < 1 << 30, f"Exit code {code}; {kept / 1e9:+.2f} GB wired since the start.")

    def _server(self, *flags: str, model: str = "") -> AbstractContextManager[Server]:
        return serving(self.log, model or self.model, *flags)


def demanded(is_right: bool, text: str) -> Result:
    """Judge a speed on a Mac only. Elsewhere it is a figure."""
    return verdict(is_right, text) if IS_MAC else Result(Outcome.FIGURE, text)


def _setup() -> Result:
    versions = {name: version_of(name) for name in (*PACKAGES, "mlx-cpu")}
    text = f"{mx.default_device()}, " + ", ".join(f"{name} {number}" for name, number in versions.items() if number)
    if not IS_MAC:
        return Result(Outcome.FIGURE, f"{text}; this is not a Mac.")
    code = _run("/bin/bash", str(ROOT / "scripts/serve"), "--help").returncode
    is_right = mx.default_device() == mx.gpu and not versions["mlx-cpu"] and code == 0
    return verdict(is_right, f"{text}; scripts/serve --help in /bin/bash: exit code {code}.")


def _tests(*arguments: str, **variables: str) -> Callable[[], Result]:
    def run() -> Result:
        result = _run(*_PYTEST, *arguments, **variables)
        lines = result.stdout.splitlines()
        failed = [line.removeprefix("FAILED ").partition(" - ")[0] for line in lines if line.startswith("FAILED ")]
        summary = next((line for line in reversed(lines) if re.search(r"\d (passed|failed|error)", line)), "no summary")
        names = ", ".join(dict.fromkeys(failed[:20]))
        return verdict(result.returncode == 0, summary.strip("= ") + (f". Failed: {names}" if names else "."))

    return run


def _shapes(file: str) -> Callable[[], Result]:
    return _tests(file, "-k", "qwen3 or nemotron", MTL_DEBUG_LAYER="1", METAL_DEVICE_WRAPPER_TYPE="1")


def _run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def _pressure(status: Fields) -> str:
    pressure = sysctl("kern.memorystatus_vm_pressure_level")
    counts = ", ".join(f"{name} {count}" for name, count in status["shrinking"].items() if count)
    return f"Under pressure: {counts or 'nothing'}." + (f" Pressure level {pressure}." if pressure else "")
