"""Workload set `cache`: the time to the first token of a known prompt, as a share of that of a new one."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mlx_lm.utils import load

from .checkpoint import Prompts
from .client import Messages, ask
from .figures import Figure, Played, at_most, read_off
from .servers import Rival, both_running

SYSTEM_PROMPT = 5000  # tokens
QUESTION = 24
REPLY = 8
CROWD = 4
_SHARE = at_most(3.0)  # % of the cold time that a known prompt may take
_CROWD_SHARE = at_most(1.05)  # of one alone
_SCENARIOS = ("new question", "next turn")
_CROWD = f"{CROWD} at once, one new prefix"


@dataclass(slots=True)
class CacheLoad(Played):
    """One server. `play` runs all scenarios on new prompts."""

    port: int
    prompts: Prompts
    repeats_prompts: bool  # mlx-lm's server does not survive a prompt that it holds whole

    def play(self) -> float:
        """Return the cold time to the first token, in milliseconds."""
        system = {"role": "system", "content": self.prompts.text(SYSTEM_PROMPT)}
        first = [system, self._question()]
        cold = self._ttft_ms([first])
        new_question = self._ttft_ms([[system, self._question()]])
        turn = [*first, {"role": "assistant", "content": self.prompts.text(REPLY)}, self._question()]
        for scenario, ms in zip(_SCENARIOS, (new_question, self._ttft_ms([turn])), strict=True):
            self.values |= {f"{scenario}, TTFT": ms, f"{scenario}, of cold": 100 * ms / cold}
        if self.repeats_prompts:
            self.values["identical prompt, of cold"] = 100 * self._ttft_ms([first]) / cold
        shared = {"role": "system", "content": self.prompts.text(SYSTEM_PROMPT)}
        self.values[_CROWD] = self._ttft_ms([[shared, self._question()] for _ in range(CROWD)]) / cold
        return cold

    def _question(self) -> dict[str, str]:
        return {"role": "user", "content": self.prompts.text(QUESTION)}

    def _ttft_ms(self, conversations: list[Messages]) -> float:
        """Return the time of the last of all requests that are sent together."""
        return max(1000 * reply.ttft_s for reply in ask(self.port, conversations, REPLY))


@contextlib.contextmanager
def prepared(model: Path, rival: Rival) -> Iterator[list[Figure]]:
    """Yield the figures of this set, measurable while the block runs."""
    prompts = Prompts(load(str(model))[1])
    with both_running(model, rival) as ports:
        repeats = {name: name != rival.name or rival.checkout is not None for name in ports}
        yield figures({name: CacheLoad(port, prompts, repeats[name]) for name, port in ports.items()}, rival)


def figures(loads: dict[str, CacheLoad], rival: Rival) -> list[Figure]:
    """Return the figures in their order: the first one plays, the others read."""
    plays = {name: load.play for name, load in loads.items()}
    found = [Figure(f"cold TTFT, {SYSTEM_PROMPT:,} tokens", "ms", plays, (rival.aim(1.05, at_least=False),))]
    for scenario in _SCENARIOS:
        found.append(read_off(f"{scenario}, TTFT", "ms", loads, rival.aim(1.0, at_least=False)))
        found.append(read_off(f"{scenario}, of cold", "%", loads, _SHARE))
    repeating = {name: load for name, load in loads.items() if load.repeats_prompts}
    found.append(read_off("identical prompt, of cold", "%", repeating, _SHARE))
    return [*found, read_off(_CROWD, "× cold", loads, _CROWD_SHARE)]
