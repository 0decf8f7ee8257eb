"""What the terminal shows once the server is ready: facts, the address, and a request to paste. Starts nothing."""

import ipaddress
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .. import __version__
from ..core.config import ModelInfo
from .terminal import readable


@dataclass(frozen=True, slots=True, kw_only=True)
class Banner:
    info: ModelInfo
    loaded: Mapping[str, Any]  # the model's facts as /v1/status has them
    text_only: bool
    budget_bytes: int
    load_s: float
    names: tuple[str, ...]
    api_keys: tuple[str, ...]
    url: str  # without a path
    host: str  # listened on

    def print_to(self, console: Console) -> None:
        console.print(f"\n[bold]vllm-mlx {__version__}[/bold] is ready, {self.load_s:.1f} s after loading began\n")
        facts = Table.grid(padding=(0, 2))
        for name, fact in self.facts():
            facts.add_row(Text(f"  {name}", "dim"), Text(fact))
        console.print(facts)
        # No wrapping: a line break inside a word would spoil what is pasted.
        request = self.curl(show_key=console.is_terminal)
        console.print(f"\nTry it:\n\n{request}\n\nCtrl-C stops the server.\n", markup=False, soft_wrap=True)

    def facts(self) -> list[tuple[str, str]]:
        info = self.info
        rows = [
            ("Model", ", ".join(self.names)),
            ("Architecture", f"{info.architecture}, {readable(info.weights_bytes)} of weights{self._taken()}"),
            ("Layers", layers(self.loaded)),
            ("Formats", formats(self.loaded)),
            ("Context", f"{info.max_model_len:,} tokens"),
            ("Memory", f"at most {readable(self.budget_bytes)}, weights included"),
            ("URL", f"{self.url}/v1" + ("" if is_local(self.host) else f", open to the network on {self.host}")),
            ("Page", f"{self.url}/ in a browser: what it does, and a chat"),
        ]
        if info.model not in self.names:
            rows.insert(1, ("From", info.model))
        return [*rows, *(("Off", what) for what in self.missing())]

    def _taken(self) -> str:
        if not self.info.takes_images:
            return ""
        return ", takes images" if self.loaded["no_videos"] else ", takes images and videos"

    def missing(self) -> list[str]:
        """What a client may look for and not find, and why."""
        wanted = "as it was started with --text-only" if self.text_only else "the checkpoint has no vision tower"
        checks = [
            (self.info.takes_images, f"images and videos: {wanted}"),
            (not self.info.takes_images or not self.loaded["no_videos"], f"videos: {self.loaded['no_videos']}"),
            (self.loaded["prefix_cache"], "prefix cache: as it was started with --no-prefix-cache"),
            (self.loaded["reasoning_parser"], "reasoning apart from text: the chat template shows no format of it"),
            (self.loaded["tool_call_parser"], "tool calls: the chat template shows no format of them"),
        ]
        return [text for is_on, text in checks if not is_on]

    def curl(self, *, show_key: bool) -> str:
        """A command a shell takes as it is. `show_key` false: the key is left to a variable, since logs are kept."""
        body = {"model": self.names[0], "messages": [{"role": "user", "content": "Who are you?"}]}
        lines = [f"curl {self.url}/v1/chat/completions", "-H 'Content-Type: application/json'"]
        if self.api_keys:
            header = shlex.quote(f"Authorization: Bearer {self.api_keys[0]}")
            lines.append(f"-H {header}" if show_key else '-H "Authorization: Bearer $API_KEY"')
        lines.append(f"-d {shlex.quote(json.dumps(body, ensure_ascii=False))}")
        return " \\\n  ".join(lines)


def layers(loaded: Mapping[str, Any]) -> str:
    """Kinds of state, and where a prompt that was seen before is resumed."""
    windows = [f"windows of {window:,}" for window in loaded["sliding_windows"]]
    if loaded["keeps_recurrent_state"]:
        return ", ".join(["recurrent state beside attention", *windows]) + ": resumes where a copy was taken"
    if windows:
        return f"attention, {', '.join(windows)}: resumes where its window is held"
    return "attention: resumes at any token"


def formats(loaded: Mapping[str, Any]) -> str:
    return f"reasoning {loaded['reasoning_parser'] or 'none'}, tool calls {loaded['tool_call_parser'] or 'none'}"


def local_url(host: str, port: int) -> str:
    """An address that a client on this machine can use."""
    address = _address(host)
    if address is None:
        return f"http://{host}:{port}"
    if address.is_unspecified:
        return f"http://127.0.0.1:{port}" if address.version == 4 else f"http://[::1]:{port}"
    return f"http://{address}:{port}" if address.version == 4 else f"http://[{address}]:{port}"


def is_local(host: str) -> bool:
    address = _address(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
