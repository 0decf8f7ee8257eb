"""Computes how fast several Macs run one model, beside one Mac: the table of docs/scaling.md, and what it assumes.

A token of one reply takes `1 / rate` on one Mac. On N Macs, `FIXED` of that time stays, the rest is divided by N, and
the token waits for two sums over all Macs in each layer. `FIXED` was fitted to three published measurements over RDMA
with fast synchronisation; tests/project/test_several_macs.py holds the formula to them.
"""

from dataclasses import dataclass

FIXED = 0.3  # share of a token's time that more Macs do not shorten
HAND_OVER_MS = 0.175  # between GPU and CPU, there and back: 0.15 to 0.2 ms on an M3 Max
FAST_HAND_OVER_MS = 0.0175  # with MLX_METAL_FAST_SYNCH=1: 0.015 to 0.02 ms
SOCKETS_MS = 0.2  # of a sum over TCP without any network: 0.17 to 0.27 ms were measured on loopback
BYTES = 2  # of a number in a hidden state
BANDWIDTH = 819e9  # bytes a second that an M3 Ultra reads from its memory
LAYER_MS = 0.24  # of a layer beside that reading: what both published rates of one Mac have left


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    num_layers: int
    width: int
    rate: float  # tokens a second on one Mac
    is_published: bool = False  # or computed from the bytes that a token reads

    @property
    def token_ms(self) -> float:
        return 1000 / self.rate


@dataclass(frozen=True, slots=True)
class Link:
    name: str
    fixed_ms: float  # of a sum, whatever its size
    hop_ms: float  # from one Mac to the next
    bytes_per_ms: float

    def sum_ms(self, width: int, num_macs: int) -> float:
        """Compute the time of a sum: a ring sends `2 (N - 1)` times a part of the hidden state."""
        hops = 2 * (num_macs - 1)
        return self.fixed_ms + hops * (self.hop_ms + width * BYTES / num_macs / self.bytes_per_ms)


def computed(name: str, num_layers: int, width: int, read_bytes: float) -> Model:
    """Make a model without a published rate: `read_bytes` are the weights that a token reads."""
    return Model(name, num_layers, width, 1000 / (read_bytes / BANDWIDTH * 1000 + LAYER_MS * num_layers))


MODELS = (
    computed("Qwen3 8B, 4 bits", 36, 4096, 4.6e9),
    Model("gpt-oss 120B", 36, 2880, 80.0, is_published=True),
    computed("Qwen3 32B, 8 bits", 64, 5120, 34.8e9),
    computed("Llama 3.3 70B, 8 bits", 80, 8192, 75e9),
    computed("DeepSeek V3, 4 bits", 61, 7168, 20.8e9),
    Model("Qwen3 235B-A22B", 94, 4096, 19.5, is_published=True),
)
FAST = Link("RDMA, fast synchronisation", FAST_HAND_OVER_MS, 0.005, 5e6)
LINKS = (
    FAST,
    Link("RDMA", HAND_OVER_MS, 0.005, 5e6),
    Link("10 GbE", HAND_OVER_MS + SOCKETS_MS, 0.05, 1.25e6),
    Link("1 GbE", HAND_OVER_MS + SOCKETS_MS, 0.15, 0.125e6),
)


def rate(model: Model, link: Link, num_macs: int) -> float:
    """Return tokens a second of one reply."""
    shared_ms = model.token_ms * (FIXED + (1 - FIXED) / num_macs)
    return 1000 / (shared_ms + 2 * model.num_layers * link.sum_ms(model.width, num_macs))


def rows(num_macs: int = 2) -> list[list[str]]:
    """Return a row for each model: what it does on one Mac, and over each link; bold where several Macs are faster."""
    found = []
    for model in MODELS:
        rates = [rate(model, link, num_macs) for link in LINKS]
        own = f"{model.rate:.1f}" + (" (published)" if model.is_published else "")
        found.append([model.name, own, *(f"**{one:.1f}**" if one > model.rate else f"{one:.1f}" for one in rates)])
    return found
