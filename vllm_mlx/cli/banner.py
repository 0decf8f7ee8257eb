"""What the terminal shows once the server is ready: facts, the address, and a request to paste. Starts nothing."""

import ipaddress
import json
import shlex
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .. import __version__
from ..core.config import ModelInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Banner:
    info: ModelInfo
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
            ("Architecture", f"{info.architecture}, {readable(info.weights_bytes)} of weights"),
            ("Context", f"{info.max_model_len:,} tokens"),
            ("Memory", f"at most {readable(self.budget_bytes)}, weights included"),
            ("URL", f"{self.url}/v1" + ("" if is_local(self.host) else f", open to the network on {self.host}")),
        ]
        if info.model not in self.names:
            rows.insert(1, ("From", info.model))
        return rows

    def curl(self, *, show_key: bool) -> str:
        """A command a shell takes as it is. `show_key` false: the key is left to a variable, since logs are kept."""
        body = {"model": self.names[0], "messages": [{"role": "user", "content": "Who are you?"}]}
        lines = [f"curl {self.url}/v1/chat/completions", "-H 'Content-Type: application/json'"]
        if self.api_keys:
            header = shlex.quote(f"Authorization: Bearer {self.api_keys[0]}")
            lines.append(f"-H {header}" if show_key else '-H "Authorization: Bearer $API_KEY"')
        lines.append(f"-d {shlex.quote(json.dumps(body, ensure_ascii=False))}")
        return " \\\n  ".join(lines)


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


def readable(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
