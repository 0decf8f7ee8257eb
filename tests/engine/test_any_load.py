"""Any load of two tenants on a real engine with too little memory: conversations that branch, go on, break off."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.checkpoints import ARCHITECTURES, OWN_STATE
from tests.support.drawing import examples
from tests.support.engine_driver import Driver, plain_loop
from tests.support.integrity import check_integrity
from tests.support.rows import cases, row
from vllm_mlx.core.events import FinishReason

from .faults import SEAMS, Faults, faults

USUAL = ("qwen3", "gpt_oss", "nemotron_h", "qwen3_5")  # dense, sliding windows, Mamba, gated delta
LONGEST = 80  # tokens of a reply


@dataclass(frozen=True)
class PlannedRequest:
    """A prompt that keeps `kept` tokens of an earlier request's conversation and adds `added` of its own."""

    earlier: int
    kept: int
    added: int
    first: int  # the first of the added tokens; the others follow from it
    max_tokens: int
    point: bool  # whether the place where it leaves the earlier one is planned for
    tenant: str
    steps: int  # before the next request
    leaves: bool  # after those steps
    fault: tuple[str, int, bool] | None  # a seam, calls of it that go well first, whether the work is done and lost
    right: int  # every so many tokens of its prediction one is wrong; 0: it has no prediction


VISITS = st.lists(
    st.builds(
        PlannedRequest,
        earlier=st.integers(0, 9),
        kept=st.one_of(st.just(0), st.just(10_000), st.integers(1, 900)),
        added=st.one_of(st.integers(1, 60), st.integers(300, 500)),
        first=st.integers(0, 499),
        max_tokens=st.one_of(st.integers(1, 20), st.integers(40, LONGEST)),
        point=st.booleans(),
        tenant=st.sampled_from(["ann", "ben"]),
        steps=st.one_of(st.integers(0, 5), st.integers(30, 150)),
        leaves=st.booleans(),
        fault=st.one_of(st.none(), st.tuples(st.sampled_from(sorted(SEAMS)), st.integers(0, 40), st.booleans())),
        right=st.sampled_from([0, 3, 10, LONGEST]),
    ),
    min_size=2,
    max_size=10,
)


PREDICTED = PlannedRequest(0, 0, 30, 3, 20, False, "ann", 0, False, None, LONGEST)


@lru_cache(maxsize=200)
def expected(path: Path, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    return list(plain_loop(path, prompt, num_tokens)[0])


def conversation(driver: Driver, planned_request: PlannedRequest) -> tuple[int, ...]:
    """The prompt of an earlier request and its reply so far."""
    if not driver.seqs:
        return ()
    seq_id = planned_request.earlier % len(driver.seqs)
    return (*driver.seqs[seq_id].prompt.token_ids, *driver.replies[seq_id].token_ids)


def run_request(path: Path, driver: Driver, planned_request: PlannedRequest, planned: Faults) -> None:
    kept = conversation(driver, planned_request)[: planned_request.kept]
    added = tuple((planned_request.first + 7 * place) % 500 for place in range(planned_request.added))
    points = (len(kept),) if planned_request.point and kept else ()
    fields = {"points": points, "tenant": planned_request.tenant}
    if driver.engine.scheduler.speculation is not None and (right := planned_request.right):
        reply = expected(path, (*kept, *added), planned_request.max_tokens)
        fields["prediction"] = tuple(
            token if place % right else (token + 1) % 500 for place, token in enumerate(reply, start=1)
        )
    seq_id = driver.add((*kept, *added), planned_request.max_tokens, **fields)
    if planned_request.fault is not None:
        seam, after, done_first = planned_request.fault
        planned.plan(seam, after=after, done_first=done_first)
    for _ in range(planned_request.steps):
        driver.step()
    if planned_request.leaves:
        driver.engine.keep(driver.seqs[seq_id], len(kept) + planned_request.added + planned_request.first % 3)
        driver.engine.abort([seq_id])


def check_any_load(path: Path, num_draft_tokens: int = 0) -> None:
    room = Driver(path).engine.default.facts.footprint
    accepted: Counter[str] = Counter()

    @settings(max_examples=examples(2))
    @given(VISITS, st.integers(2, 5))
    @example([PREDICTED], 2)  # others may predict nothing
    def check(planned_requests: list[PlannedRequest], num_rows: int) -> None:
        driver = Driver(path, rows_bytes=num_rows * room.bytes_at(513), num_draft_tokens=num_draft_tokens)
        with faults() as planned:
            for planned_request in planned_requests:
                run_request(path, driver, planned_request, planned)
            driver.may_restart |= any(request.fault is not None for request in planned_requests)
            driver.run()
        for seq_id, reply in driver.replies.items():
            seq = driver.seqs[seq_id]
            assert reply.error is None or planned.num_struck
            assert reply.token_ids == expected(path, seq.prompt.token_ids, len(reply.token_ids))
            if reply.finish_reason is not None:
                assert reply.finish_reason is FinishReason.LENGTH and len(reply.token_ids) == seq.max_tokens
        assert driver.engine.num_rows == 0
        check_integrity(driver.engine.cache_tree)
        if driver.engine.scheduler.speculation is not None:
            accepted.update(driver.engine.scheduler.speculation.num_accepted)

    check()
    assert bool(accepted["prediction"]) is bool(num_draft_tokens)


@row("S1-4")
@pytest.mark.parametrize("name", cases(USUAL, ["qwen3_5"]))
def test_every_reply_is_the_plain_loops(checkpoint: Callable[..., Path], name: str) -> None:
    check_any_load(checkpoint(name))


@pytest.mark.parametrize("name", cases(["qwen3", "gpt_oss", "vision:qwen3_5"], ["gpt_oss"]))
def test_and_with_drafts(checkpoint: Callable[..., Path], name: str) -> None:
    check_any_load(checkpoint(name), num_draft_tokens=4)


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in (*ARCHITECTURES, *OWN_STATE) if name not in USUAL])
def test_of_every_architecture(checkpoint: Callable[..., Path], name: str) -> None:
    check_any_load(checkpoint(name))
