"""Decodes a few tokens after load, so that no request waits until Metal has compiled a kernel. It knows no request.

A device compiles a kernel when it is first used. The rows here sample in every way that replies do, and one is masked.
"""

from ..core.sequence import Constraint, PromptInputs, ReasoningRule, Sequence, Tag, TokenSampling
from ..core.step import PrefillChunk, StepPlan
from .device import DeviceWatch, device_memory
from .model import Model
from .runner import Runner

_LENGTHS = (8, 40)  # unlike, as those of requests
_NUM_STEPS = 3
_SAMPLINGS = (  # pairs of rows that decode together
    (
        TokenSampling(temperature=0.0, num_top_logprobs=1, logit_bias={0: 1.0}),
        TokenSampling(temperature=0.7, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.1),
    ),
    (TokenSampling(temperature=1.0), TokenSampling(temperature=1.0)),
)


class _NoTags:
    leftover: tuple[int, ...] = ()

    def feed(self, token_id: int) -> Tag | None:
        return None


def warm_up(model: Model) -> None:
    """Prefill two rows, decode them in two groups and then in one if the model can; once for each way to draw."""
    runner = Runner(model, DeviceWatch(device_memory().total_bytes))
    for samplings in _SAMPLINGS:
        seqs = tuple(_row(model, length, sampling) for length, sampling in zip(_LENGTHS, samplings, strict=True))
        runner.prefill(PrefillChunk(seq, 0, seq.prefill_end) for seq in seqs)
        for seq in seqs:
            seq.num_computed_tokens = seq.prefill_end
        isolated = frozenset(seq.seq_id for seq in seqs if model.no_shared_forward is not None)
        for step in range(_NUM_STEPS):
            for seq in seqs:
                seq.num_computed_tokens += 1
            is_group = model.can_batch and step > 0
            runner.decode(StepPlan(decode=(seqs,) if is_group else tuple((seq,) for seq in seqs), isolated=isolated))
        runner.reset()


def _row(model: Model, length: int, sampling: TokenSampling) -> Sequence:
    return Sequence(
        seq_id=-length,
        prompt=PromptInputs(token_ids=(0,) * length),
        sampling=sampling,
        max_tokens=_NUM_STEPS,
        min_tokens=1,
        stop_token_ids=frozenset({1}),
        constraint=_masked(model.vocab_size) if sampling.top_p < 1 else None,
    )


def _masked(vocab_size: int) -> Constraint:
    """The end of a reasoning whose budget is spent: a mask that allows one token."""
    rule = ReasoningRule(new_watch=_NoTags, starts=(), end=(0,) * _NUM_STEPS, is_open=True, may_open=False, budget=0)
    return Constraint(mask_words=-(-vocab_size // 32), reasoning=rule)
