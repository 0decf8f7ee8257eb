"""A device with the runner's behaviour and no mlx: samples lag one step, state is checked at every use."""

from vllm_mlx.core.events import TokenLogprob
from vllm_mlx.core.sequence import Sequence
from vllm_mlx.core.step import ChunkTiming, PrefillChunk, Scored, StepOutput, StepPlan, TokenOutput, forward_passes

VOCAB = 50
SCORE_S = 0.005  # to compute the log-probability of a token


def next_token(ids: list[int]) -> int:
    """The fake model: a token that depends on every id before it."""
    value = 7
    for token in ids:
        value = (value * 31 + token + 1) % 10007
    return value % VOCAB


def reply(prompt: tuple[int, ...], max_tokens: int, stops: frozenset[int]) -> list[int]:
    ids, output = list(prompt), []
    while len(output) < max_tokens:
        token = next_token(ids)
        ids.append(token)
        output.append(token)
        if token in stops:
            break
    return output


def scored(chunk: PrefillChunk) -> Scored:
    tokens = chunk.seq.tokens(chunk.start + 1, chunk.end + 1)
    return Scored(chunk.seq.seq_id, chunk.start, tuple(TokenLogprob(token, -1.0) for token in tokens))


class FakeRunner:
    def __init__(self, s_per_token: float = 0.001):
        self.held: dict[int, list[int]] = {}  # seq_id -> ids whose state is held
        self._pending: dict[int, int] = {}  # seq_id -> next token, sampled and not fed
        self._unread: list[TokenOutput] = []
        self._s_per_token = s_per_token
        self.breaks = False  # whether the next forward pass of several rows cannot run

    def decode(self, plan: StepPlan) -> StepOutput:
        for seq_id in plan.release:
            self._drop(seq_id)
        assert all(plan.decode), "a group has a row"
        planned = {seq.seq_id for group in plan.decode for seq in group}
        for seq_id in [seq_id for seq_id in self._pending if seq_id not in planned]:
            self._drop(seq_id)
        unread, self._unread = self._unread, []
        suspects: list[int] = []
        for groups in forward_passes(plan.decode, plan.isolated):
            rows = [seq for group in groups for seq in group]
            if self.breaks and len(rows) > 1:
                self.breaks = False
                suspects += [seq.seq_id for seq in rows]
                continue
            for seq in rows:
                self._unread.append(self._launch(seq))
        for seq_id in suspects:
            self._drop(seq_id)
        return StepOutput(tokens=tuple(unread), suspects=tuple(suspects))

    def prefill(self, chunks: tuple[PrefillChunk, ...]) -> StepOutput:
        for chunk in chunks:
            held = self.held.setdefault(chunk.seq.seq_id, [])
            assert len(held) == chunk.start, "a chunk must continue the state"
            held += chunk.seq.tokens(chunk.start, chunk.end)
            assert len(held) == chunk.end
        return StepOutput(
            prefilled=tuple((chunk.seq.seq_id, chunk.end) for chunk in chunks),
            scored=tuple(scored(chunk) for chunk in chunks if chunk.scores),
            chunk_timings=tuple(map(self._timing, chunks)),
        )

    def _timing(self, chunk: PrefillChunk) -> ChunkTiming:
        num_tokens = chunk.end - chunk.start
        score_s = num_tokens * SCORE_S if chunk.scores else 0.0
        return ChunkTiming(chunk.start, num_tokens, num_tokens * self._s_per_token, score_s)

    def reset(self) -> None:
        """Lose all rows, as a device does in a fault."""
        self.held.clear()
        self._pending.clear()
        self._unread.clear()

    def _launch(self, seq: Sequence) -> TokenOutput:
        held = self.held.setdefault(seq.seq_id, [])
        if seq.seq_id not in self._pending:
            self._pending[seq.seq_id] = seq.tokens(len(held), len(held) + 1)[0]
        held.append(self._pending[seq.seq_id])
        assert len(held) == seq.num_computed_tokens, "progress counts what is fed"
        self._pending[seq.seq_id] = next_token(held)
        return TokenOutput(seq.seq_id, self._pending[seq.seq_id])

    def _drop(self, seq_id: int) -> None:
        self.held.pop(seq_id, None)
        self._pending.pop(seq_id, None)
