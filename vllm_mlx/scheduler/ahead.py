"""Beginnings of next prompts, which are computed while nothing else runs. A request takes the next step."""

from dataclasses import dataclass, replace
from typing import Literal, get_args

from ..cache.index import common_tokens, pack
from ..core.sequence import PromptInputs, Sequence

MAX_CHUNK_S = 0.05  # a request that comes waits for one chunk
_MOST = 16  # beginnings that are remembered
Fate = Literal["computed", "used", "wasted"]  # all tokens; those that are used; those that never can be


@dataclass(eq=False, slots=True)
class Beginning:
    """The beginning of one conversation's next prompt."""

    seq: Sequence  # a copy runs at each start
    key: bytes
    replaced_key: bytes  # of the last prompt with its reply
    num_stored: int  # tokens that both keys share
    position: int  # up to which it is computed
    num_computed: int = 0  # tokens that were computed for it

    def cut(self, end: int) -> None:
        """End it at this position at the latest."""
        prompt = self.seq.prompt
        media = tuple(item for item in prompt.media if item.end <= end)
        self.seq.prompt = replace(prompt, token_ids=prompt.token_ids[: end + 1], media=media)


class Ahead:
    """Owns the beginnings of one model's conversations, one of each, and counts their use."""

    def __init__(self) -> None:
        self._beginnings: dict[int, Beginning] = {}  # by the seq_id of those that compute them, the newest last
        self.running: Sequence | None = None
        self.tokens: dict[Fate, int] = dict.fromkeys(get_args(Fate), 0)

    def add(self, ended: Sequence, following: PromptInputs) -> None:
        """Take the beginning of the prompt that follows a reply. It replaces that of the same conversation."""
        seq = Sequence(
            seq_id=~ended.seq_id,
            prompt=following,
            sampling=ended.sampling,
            max_tokens=0,
            cache_salt=ended.cache_salt,
            tenant=ended.tenant,
            model=ended.model,
        )
        key, replaced_key = pack(seq.key()), pack(ended.key())
        num_stored = common_tokens(key, replaced_key)
        for other in [each for each in self._beginnings.values() if _common(each, seq, key) >= each.num_stored]:
            self.forget(other)
        for other in list(self._beginnings.values())[: 1 - _MOST]:
            self.forget(other)
        self._beginnings[seq.seq_id] = Beginning(seq, key, replaced_key, num_stored, num_stored)

    @property
    def next(self) -> Beginning | None:
        """Return the newest beginning that is not computed completely, unless one is being computed."""
        waiting = (each for each in reversed(self._beginnings.values()) if each.position < each.seq.prefill_end)
        return None if self.running is not None else next(waiting, None)

    def start(self, beginning: Beginning) -> Sequence:
        """Return a sequence that computes the beginning."""
        self.running = replace(beginning.seq)
        return self.running

    def clear(self, salts: str) -> None:
        """Forget the beginnings of salts that begin with `salts`."""
        for each in [each for each in self._beginnings.values() if each.seq.cache_salt.startswith(salts)]:
            self.forget(each)

    def wants(self, seq: Sequence) -> bool:
        """Return whether the beginning that a sequence computes is still remembered."""
        return seq.seq_id in self._beginnings

    def stop(self, seq: Sequence) -> Beginning | None:
        """Note that a sequence has ended. Returns its beginning, unless that is not wanted any more."""
        self.running = None
        num_computed = max(0, seq.num_computed_tokens - seq.num_cached_tokens)
        self.tokens["computed"] += num_computed
        if (beginning := self._beginnings.get(seq.seq_id)) is None:
            self.tokens["wasted"] += num_computed
            return None
        beginning.num_computed += num_computed
        beginning.position = max(beginning.position, seq.num_computed_tokens)
        return beginning

    def use(self, seq: Sequence, key: bytes) -> int:
        """Return the cached tokens of a request's prompt that were computed ahead, by its packed `key`.

        Its conversation continues.
        """
        num_used = 0
        for each in list(self._beginnings.values()):
            if (common := _common(each, seq, key)) > each.num_stored:
                used = max(0, min(common, each.position, seq.num_cached_tokens) - each.num_stored)
                num_used = max(num_used, used)
                self.forget(each, used)
        return num_used

    def forget(self, beginning: Beginning, num_used: int = 0) -> None:
        """Forget a beginning of which `num_used` tokens were of use."""
        del self._beginnings[beginning.seq.seq_id]
        num_used = min(num_used, beginning.num_computed)
        self.tokens["used"] += num_used
        self.tokens["wasted"] += beginning.num_computed - num_used


def _common(beginning: Beginning, seq: Sequence, key: bytes) -> int:
    """Return the tokens that a prompt shares with a beginning; -1 for another salt."""
    return common_tokens(beginning.key, key) if beginning.seq.cache_salt == seq.cache_salt else -1
