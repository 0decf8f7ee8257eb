"""Grammars that are slow to follow: a reply ends when its own grammar takes too long, by a clock of the test."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest

from vllm_mlx.core.errors import GenerationError, GrammarLimit
from vllm_mlx.core.request import Choice, Guide, JsonSchema, Regex, TokenSampling
from vllm_mlx.core.sequence import Constraint, PromptInputs, Sequence
from vllm_mlx.core.step import TokenOutput
from vllm_mlx.guidance.grammars import guide_grammar
from vllm_mlx.runner.masks import Masks
from vllm_mlx.runner.row_constraint import START_S, TOKEN_S

from .random_sampler import sampler
from .scripted import Scripted, request

PARAM = "structured_outputs.grammar"
LETTERS = "start: (A | B)*\nA: /[a-m]/\nB: /[n-z]/"
CROWDED = "start: /[a-z]{99}/ (" + " | ".join(f'"a{number:04}"' for number in range(2500)) + ")"


class Clock:
    """Each look at it is `tick_s` later than the last."""

    def __init__(self, tick_s: float):
        self.tick_s = tick_s
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += self.tick_s
        return self.now_s


def sequence(grammar: str, written: str = "") -> Sequence:
    one = sampler()
    matcher = one.compiler.compile(json.dumps({"grammars": [{"lark_grammar": grammar}]}), PARAM)
    return Sequence(
        seq_id=7,
        prompt=PromptInputs(token_ids=(1,)),
        sampling=TokenSampling(),
        max_tokens=9999,
        stop_token_ids=one.tokenizer.eos_token_ids,
        constraint=Constraint(matcher=matcher, param=PARAM, mask_words=one.compiler.mask_words),
        output_token_ids=one.tokenizer.encode(written, add_special_tokens=False),
    )


def steps_until_failure(masks: Masks, seq: Sequence, most: int) -> tuple[int, GenerationError | None]:
    masks.start(seq)
    draw = random.Random(3)
    for step in range(most):
        words = masks.words([seq])
        if failed := masks.take_failed():
            [(seq_id, error)] = failed
            assert seq_id == seq.seq_id and not masks.has_any([seq])
            return step, error
        assert words is not None
        allowed = np.flatnonzero(np.unpackbits(words[0].view(np.uint8), bitorder="little"))
        token = draw.choice([int(each) for each in allowed if int(each) not in seq.stop_token_ids])
        masks.feed([TokenOutput(seq.seq_id, token)])
    return most, None


def test_a_grammar_that_takes_its_time_ends_its_own_row() -> None:
    tick_s = 0.05
    num_steps, error = steps_until_failure(Masks(Clock(tick_s)), sequence(LETTERS), 200)
    assert isinstance(error, GrammarLimit) and error.param == PARAM and PARAM in error.message
    assert num_steps == pytest.approx(START_S / (2 * tick_s - TOKEN_S), abs=2)


def test_a_grammar_in_time_goes_on() -> None:
    assert steps_until_failure(Masks(Clock(TOKEN_S / 3)), sequence(LETTERS), 400) == (400, None)


def test_one_slow_mask_is_forgiven() -> None:
    clock = Clock(START_S * 0.9)
    masks, seq = Masks(clock), sequence(LETTERS)
    masks.start(seq)
    masks.words([seq])
    clock.tick_s = TOKEN_S / 3
    masks.feed(
        [TokenOutput(seq.seq_id, token) for token in sampler().tokenizer.encode("abcxyz", add_special_tokens=False)]
    )
    assert masks.take_failed() == []


def test_a_row_that_begins_again_pays_for_what_it_takes_in() -> None:
    masks, seq = Masks(Clock(0.5)), sequence(LETTERS, written="the quick brown fox".replace(" ", ""))
    masks.start(seq)
    [(seq_id, error)] = masks.take_failed()
    assert seq_id == seq.seq_id and isinstance(error, GrammarLimit)


def test_a_grammar_of_too_many_items_meets_a_limit_by_count() -> None:
    num_steps, error = steps_until_failure(Masks(Clock(0)), sequence(CROWDED), 120)
    assert isinstance(error, GrammarLimit) and num_steps <= 101


def test_a_token_that_no_mask_allowed_is_not_the_clients_fault() -> None:
    masks, seq = Masks(Clock(0)), sequence(LETTERS)
    masks.start(seq)
    masks.feed([TokenOutput(seq.seq_id, token) for token in sampler().tokenizer.encode("7", add_special_tokens=False)])
    masks.words([seq])
    [(_, error)] = masks.take_failed()
    assert not isinstance(error, GrammarLimit)


@pytest.mark.parametrize("num", [450, 30])
def test_schemas_of_many_optional_properties_are_within_the_limits(num: int) -> None:
    schema = {"type": "object", "properties": {f"option_{n}": {"type": "string"} for n in range(num)}}
    one = sampler()
    grammar = guide_grammar(Guide(form=JsonSchema(schema)), one.writer())
    matcher = one.compiler.compile(grammar, "x").deep_copy()
    for token in one.tokenizer.encode('{"option_2":"', add_special_tokens=False):
        matcher.compute_bitmask()
        assert matcher.consume_token(token), matcher.get_error()
    assert not matcher.is_error()


@pytest.mark.parametrize("tick_s", [0.5, 0])
def test_a_grammar_that_met_a_limit_of_time_is_refused_from_then_on(tick_s: float) -> None:
    scripted = Scripted(sampler(), "hermes")
    asked = request((), sampling={"guide": Guide(form=Regex("[a-z]*"))})
    first = scripted.constraint(asked)
    assert first is not None
    _, error = steps_until_failure(Masks(Clock(tick_s)), replace(sequence(LETTERS), constraint=first), 30)
    assert isinstance(error, GrammarLimit) == bool(tick_s)
    if tick_s:
        with pytest.raises(GrammarLimit, match="too slow"):
            scripted.constraint(asked)
    else:
        again = scripted.constraint(asked)
        assert again is not None and again.matcher is first.matcher


def test_as_many_choices_as_are_allowed_are_within_the_limits() -> None:
    one = sampler()
    options = tuple(f"{number:04} is a number" for number in range(4096))
    matcher = one.compiler.compile(guide_grammar(Guide(form=Choice(options)), one.writer()), "x").deep_copy()
    for token in one.tokenizer.encode(options[1234], add_special_tokens=False):
        matcher.compute_bitmask()
        assert matcher.consume_token(token), matcher.get_error()
    assert matcher.is_accepting()
