"""Workload set `lengths`: rows of unequal lengths beside each other, where reading the weights takes most of a step.

The prompts are read once, piece by piece, and found in the prefix caches from then on, so that a run measures decoding.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mlx_lm.utils import load

from .client import BenchmarkError, Reply, ask
from .figures import OURS, Aim, Figure
from .prompts import Prompts
from .servers import Rival, free_port, our_command, running
from .serving import tokens_per_s

LENGTHS = (2000, 10_000)
NUM_DECODED = 32
_PIECE = 2000  # tokens that are read in one request
_MIN_CACHED_SHARE = 0.9
_SPEEDUP = 1.3


@dataclass(frozen=True, slots=True)
class LengthsLoad:
    port: int
    texts: dict[int, str]  # by length

    def warm(self) -> None:
        """Let the server read the prompts. It answers often enough that no read takes too long."""
        for length, text in self.texts.items():
            words = text.split()
            for end in range(_PIECE, length, _PIECE):
                ask(self.port, [" ".join(words[:end])], 1)
            ask(self.port, [text], 1)

    def decode_rate(self, *lengths: int) -> float:
        """Tokens/s of streams after prompts of these lengths, from the last one's first token on."""
        replies = ask(self.port, [self.texts[length] for length in lengths], NUM_DECODED)
        for length, reply in zip(lengths, replies, strict=True):
            _check_cached(reply, length)
        return tokens_per_s(replies)


def _check_cached(reply: Reply, length: int) -> None:
    details = (reply.usage or {}).get("prompt_tokens_details") or {}
    if details.get("cached_tokens", 0) < _MIN_CACHED_SHARE * length:
        raise BenchmarkError(f"A prompt of {length} tokens was not found in a prefix cache: {reply.usage}")


@contextlib.contextmanager
def prepared(model: Path, rival: Rival) -> Iterator[list[Figure]]:
    """The figures of this set, measurable during the block."""
    prompts = Prompts(load(str(model))[1])
    texts = {length: prompts.text(length) for length in LENGTHS}
    ports = {OURS: free_port(), rival.name: free_port()}
    with (
        running(our_command(model, ports[OURS]), ports[OURS]),
        rival.running(model, ports[rival.name]),
    ):
        loads = {name: LengthsLoad(port, texts) for name, port in ports.items()}
        for one in loads.values():
            one.warm()
        yield _figures(loads, rival)


def _figures(loads: dict[str, LengthsLoad], rival: Rival) -> list[Figure]:
    together = Figure(
        name="decode, " + " and ".join(f"{length:,}" for length in LENGTHS) + " tokens",
        unit="tokens/s",
        measures={name: partial(load.decode_rate, *LENGTHS) for name, load in loads.items()},
        aims=(Aim(bound=_SPEEDUP, at_least=True, against=rival.name),),
    )
    alone = (
        Figure(
            name=f"decode, {length:,} tokens alone",
            unit="tokens/s",
            measures={name: partial(load.decode_rate, length) for name, load in loads.items()},
            aims=(rival.aim(1.0, at_least=True),),
        )
        for length in LENGTHS
    )
    return [together, *alone]
