"""What the gate demands of an attack. Its bounds on time are so wide that only blocks of seconds exceed them."""

from contextlib import ExitStack

from tests.support.checkpoints import checkpoint

from .driver import Attack, Driver, Observation, ServerLost
from .judge import MB, Limits, absolute_faults
from .target import ATTACKER, target
from .values import dumps
from .wire import Shot, request

MOST_LOOP_S = 2.0  # the longest `/health`
MOST_GAP_S = 4.0  # between two tokens of somebody else's stream
MOST_PEAK_BYTES = 256 * MB
REPEATS = 3
PATIENCE_S = 20.0
WARM_UP = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4})


class Gate:
    """Owns the server of a test module, and starts another one where an attack has ended the last."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._driver: Driver | None = None

    def close(self) -> None:
        self._stack.close()
        self._driver = None

    @property
    def driver(self) -> Driver:
        if self._driver is None:
            self._driver = Driver(
                self._stack.enter_context(target(str(checkpoint("vision:qwen3_vl")))), patience_s=PATIENCE_S
            )
            self._stack.callback(self._driver.close)
            self._driver.observe(attack(*WARM_UP))
        return self._driver

    def faults(self, attack: Attack) -> list[str]:
        """What may come from a busy machine is observed again."""
        try:
            faults = _faults(self.driver, attack)
        except ServerLost as error:
            faults = [f"the server was lost: {error}"]
        if faults:
            self.close()
        return faults


def _faults(driver: Driver, attack: Attack) -> list[str]:
    found = driver.observe(attack)
    if faults := [str(fault) for fault in absolute_faults(attack, found)]:
        return faults
    suspects = _suspects(found, attack)
    for _ in range(REPEATS - 1):
        if not suspects:
            break
        again = _suspects(driver.observe(attack), attack)
        suspects = {name: min(value, again[name]) for name, value in suspects.items() if name in again}
    return [f"{name}: {value:.3g}" for name, value in suspects.items()]


def _suspects(found: Observation, attack: Attack) -> dict[str, float]:
    kept_bytes, peak_bytes = found.after_bytes - found.before_bytes, found.peak_bytes - found.before_bytes
    measures = {
        "seconds of the event loop": (found.loop_delay_s, MOST_LOOP_S),
        "seconds between tokens of another stream": (found.gap_s, MOST_GAP_S),
        "bytes kept": (kept_bytes, Limits().kept_bytes),
        "bytes at the peak": (peak_bytes, MOST_PEAK_BYTES + Limits().peak_factor * attack.num_bytes),
    }
    return {name: value for name, (value, most) in measures.items() if value > most}


def attack(path: str, body: object, *, num: int = 1, leaves: bool = False) -> Attack:
    """`num` connections with one whole request each."""
    shot = Shot((request(path, dumps(body), ATTACKER),), num_answers=0 if leaves else 1)
    return Attack(path, path, (shot,) * num, answer_s=PATIENCE_S)
