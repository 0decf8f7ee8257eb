"""A row that leaves hands its state over to the prefix cache: how much memory that takes, and what is kept."""

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from tests.support.engine_driver import Driver, RandomPrompts

WIDE = {"num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}
FEW_STATES = {"full_attention_interval": 2}  # four layers with KV
PROMPT = RandomPrompts(1)(500)
LONG = RandomPrompts(1)(1000)


class Device:
    """A device whose pool holds some rows of `num_tokens` each. It measures memory from the first token of a row on."""

    def __init__(self, path: Path, rows: float, num_tokens: int):
        self.row_bytes = Driver(path).engine.default.facts.footprint.bytes_at(num_tokens)
        mx.clear_cache()
        self._before = mx.get_active_memory()
        self.driver = Driver(path, rows_bytes=int(rows * self.row_bytes))

    def start(self, prompt: list[int], **ends: object) -> int:
        seq_id = self.driver.add(prompt, **ends)
        while not self.driver.replies[seq_id].token_ids:
            self.driver.step()
        return seq_id

    def peak_rows(self, monkeypatch: pytest.MonkeyPatch) -> float:
        """The most memory that was used at any moment until all rows have left, in rows."""
        mx.reset_peak_memory()
        with monkeypatch.context() as patch:
            patch.setattr(mx, "reset_peak_memory", lambda: None)  # the engine looks at each step alone
            self.driver.run()
        return (mx.get_peak_memory() - self._before) / self.row_bytes

    def num_cached(self, seq_id: int) -> int:
        """The tokens of a conversation that its next turn finds."""
        next_id = self.driver.add([*PROMPT, *self.driver.replies[seq_id].token_ids, 1, 2, 3], max_tokens=2)
        self.driver.run()
        return self.driver.seqs[next_id].num_cached_tokens


@pytest.mark.parametrize(
    ("name", "rows", "reason"),
    [
        ("qwen3_5", 1.1, "stop"),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                ("qwen3", 1.1, "length"),
                ("qwen3", 1.1, "stop"),
                ("qwen3", 1.3, "length"),
                ("qwen3", 1.3, "stop"),
                ("qwen3", 2.1, "length"),
                ("qwen3", 2.1, "stop"),
                ("gemma3_text", 1.1, "length"),
                ("gemma3_text", 1.1, "stop"),
                ("qwen3_5", 1.1, "length"),
            )
        ),
    ],
)
def test_any_row_that_fits_the_pool_stays_in_the_cache(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, name: str, rows: float, reason: str
) -> None:
    """It does so however the reply ends, and takes at most a quarter of the row beyond the pool."""
    path = checkpoint(name, **WIDE, **(FEW_STATES if name == "qwen3_5" else {}))
    [reply] = Driver(path).generate([PROMPT], max_tokens=30)
    num_reply = max(reply.index(token) for token in reply) + 1  # its last token is new, so it can end the reply
    stops = frozenset([reply[num_reply - 1]] if reason == "stop" else [])
    device = Device(path, rows, len(PROMPT) + num_reply)
    seq_id = device.start(PROMPT, max_tokens=99 if stops else num_reply, stop_token_ids=stops)
    peak = device.peak_rows(monkeypatch)
    found = device.driver.replies[seq_id]
    assert found.token_ids == reply[:num_reply] and found.finish_reason == reason
    assert device.num_cached(seq_id) >= len(PROMPT) + num_reply - 1
    assert peak <= rows + 0.25


def test_rows_that_leave_together_are_handed_over_one_after_the_other(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(checkpoint("qwen3", **WIDE), 2.2, len(LONG) + 8)
    seq_ids = [device.start([first, *LONG[1:]], max_tokens=200) for first in (1, 2)]
    device.driver.engine.abort(seq_ids)
    assert device.peak_rows(monkeypatch) <= 2.2 + 0.25
    cache = device.driver.engine.report().cache
    copies = 2 * device.driver.engine.default.facts.footprint.copy_bytes(len(LONG))
    assert cache is not None and cache.used_bytes >= copies, "both are kept"


@pytest.mark.parametrize("reads", [False, True], ids=["while it replies", "while it reads"])
def test_a_request_whose_client_has_left_delays_the_next_one_by_no_step(
    checkpoint: Callable[..., Path], reads: bool
) -> None:
    """There is one place. The next request has its first token after as many steps as alone."""
    path, num_steps = checkpoint("qwen3"), []
    for has_left in (False, True):
        driver = Driver(path, max_num_seqs=1, max_prefill_chunk=64)
        if has_left:
            left = driver.add([7] * (900 if reads else 50), 5000)
            for _ in range(4):
                driver.step()
            heard = len(driver.replies[left].token_ids)
            assert heard == 0 if reads else heard > 0
            driver.engine.abort([left])
        seq_id, before = driver.add(PROMPT, 5000), driver.engine.num_steps
        while not driver.replies[seq_id].token_ids:
            driver.step()
        num_steps.append(driver.engine.num_steps - before)
        assert not has_left or len(driver.replies[left].token_ids) == heard
    assert num_steps[0] == num_steps[1]
