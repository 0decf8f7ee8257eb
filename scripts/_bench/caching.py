"""Workload set `cache`: the time to the first token of a known prompt, as a share of that of a new one."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mlx_lm.utils import load

from .checkpoint import Prompts
from .client import Messages, ask
from .figures import OURS, Aim, Figure, Measure
from .servers import Rival, free_port, our_command, running

SYSTEM_PROMPT = 5000  # tokens
QUESTION = 24
REPLY = 8
CROWD = 4
_SHARE = 3.0  # % of the cold time that a known prompt may take
_CROWD_SHARE = 1.05  # of one alone


@dataclass(slots=True)
class CacheLoad:
    """One server. `play` runs all scenarios on new prompts; the figures are read from the last play."""

    port: int
    prompts: Prompts
    repeats_prompts: bool  # mlx-lm's server does not survive a prompt that it holds whole
    ttft_ms: dict[str, float] = field(default_factory=dict)

    def play(self) -> float:
        """Return the cold time to the first token, in milliseconds."""
        system = {"role": "system", "content": self.prompts.text(SYSTEM_PROMPT)}
        first = [system, self._question()]
        self.ttft_ms["cold"] = self._ttft_ms([first])
        self.ttft_ms["new question"] = self._ttft_ms([[system, self._question()]])
        turn = [*first, {"role": "assistant", "content": self.prompts.text(REPLY)}, self._question()]
        self.ttft_ms["next turn"] = self._ttft_ms([turn])
        if self.repeats_prompts:
            self.ttft_ms["identical"] = self._ttft_ms([first])
        shared = {"role": "system", "content": self.prompts.text(SYSTEM_PROMPT)}
        self.ttft_ms["crowd"] = self._ttft_ms([[shared, self._question()] for _ in range(CROWD)])
        return self.ttft_ms["cold"]

    def ms(self, scenario: str) -> Measure:
        return lambda: self.ttft_ms[scenario]

    def percent(self, scenario: str) -> Measure:
        return lambda: 100 * self.ttft_ms[scenario] / self.ttft_ms["cold"]

    def times(self, scenario: str) -> Measure:
        return lambda: self.ttft_ms[scenario] / self.ttft_ms["cold"]

    def _question(self) -> dict[str, str]:
        return {"role": "user", "content": self.prompts.text(QUESTION)}

    def _ttft_ms(self, conversations: list[Messages]) -> float:
        """Return the time of the last of all requests that are sent at once."""
        return max(1000 * reply.ttft_s for reply in ask(self.port, conversations, REPLY))


@contextlib.contextmanager
def prepared(model: Path, rival: Rival) -> Iterator[list[Figure]]:
    """Yield the figures of this set, measurable while the block runs."""
    prompts = Prompts(load(str(model))[1])
    ports = {OURS: free_port(), rival.name: free_port()}
    with (
        running(our_command(model, ports[OURS]), ports[OURS]),
        rival.running(model, ports[rival.name]),
    ):
        loads = {
            name: CacheLoad(port, prompts, name == OURS or rival.checkout is not None) for name, port in ports.items()
        }
        yield figures(loads, rival)


def figures(loads: dict[str, CacheLoad], rival: Rival) -> list[Figure]:
    """Return the figures in their order: the first one plays, the others read."""
    at_most_theirs = (rival.aim(1.0, at_least=False),)
    found = [
        Figure(
            name=f"cold TTFT, {SYSTEM_PROMPT:,} tokens",
            unit="ms",
            measures={name: load.play for name, load in loads.items()},
            aims=(rival.aim(1.05, at_least=False),),
        )
    ]
    for scenario in ("new question", "next turn"):
        found += [
            Figure(
                name=f"{scenario}, TTFT",
                unit="ms",
                measures={name: load.ms(scenario) for name, load in loads.items()},
                aims=at_most_theirs,
            ),
            Figure(
                name=f"{scenario}, of cold",
                unit="%",
                measures={name: load.percent(scenario) for name, load in loads.items()},
                aims=(Aim(bound=_SHARE, at_least=False),),
            ),
        ]
    return [
        *found,
        Figure(
            name="identical prompt, of cold",
            unit="%",
            measures={name: load.percent("identical") for name, load in loads.items() if load.repeats_prompts},
            aims=(Aim(bound=_SHARE, at_least=False),),
        ),
        Figure(
            name=f"{CROWD} at once, one new prefix",
            unit="× cold",
            measures={name: load.times("crowd") for name, load in loads.items()},
            aims=(Aim(bound=_CROWD_SHARE, at_least=False),),
        ),
    ]
