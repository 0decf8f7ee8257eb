"""What rank 0 does in the tests of two ranks, and the same work by one process."""

import gc
import hashlib
import os
import random
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from tests.support.engine_driver import GREEDY, Driver, RandomPrompts, Reply, plain_loop, squeezed
from tests.support.guiding import Guiding
from tests.support.two_ranks import RankedDriver, config_of, follow
from vllm_mlx.cache import snapshot
from vllm_mlx.core.errors import EngineDead
from vllm_mlx.core.request import TokenSampling
from vllm_mlx.core.step import StepPlan
from vllm_mlx.engine import loading
from vllm_mlx.ranks import watch
from vllm_mlx.ranks.leader import Leader
from vllm_mlx.ranks.lockstep import Ranks
from vllm_mlx.ranks.worker import Worker
from vllm_mlx.runner import ranked
from vllm_mlx.runner.ranked import Ranked
from vllm_mlx.scheduler import decode_groups

from .links import ids_that_nobody_needs, right_sums, run_shards, wrong_sums

HOT = TokenSampling(temperature=1.0, top_p=0.95, repetition_penalty=1.1, num_top_logprobs=2)


def once(
    ranks: Ranks,
    path: str,
    *,
    cut: list[str] = [],  # noqa: B006  # a JSON value
    num_plans: int = 0,
    seed: int = 0,
    failing: int | None = None,
    is_apart: bool = False,
) -> Any:
    """Do all that the tests ask of two ranks, since two ranks take long to start.

    The worker has less memory than rank 0. The rank `failing` cannot copy some state: its first captures and its first
    restore fail. Rows of the random plans run apart if they are to be.
    """
    found = {
        "right sums": right_sums(ranks),
        "wrong sums": wrong_sums(ranks),
        "ids": ids_that_nobody_needs(ranks),
        "shards": run_shards(ranks, cut),
    }
    notes = noted(ranks)
    decode_groups.READ_BYTES = 1 << 14  # as if padding of this small model cost much, so that there are several groups
    if ranks.rank == failing:
        Failing("capture", [1, 2])
        Failing("restore", [1])
    if ranks.rank:
        return follow(ranks, path, memory_budget_bytes=1 << 29)
    driver = RankedDriver(ranks, path)
    found["unlike"] = held_by_some(driver, path)
    found["memory"] = driver.engine.default.facts.memory.total_bytes
    driver.replies, driver.seqs = {}, {}
    found["replies"] = work_of(driver, path)
    found["one"] = work_of(Driver(Path(path), max_model_len=4096), path)
    driver.replies, driver.seqs = {}, {}
    driver.engine.clear_cache()
    gc.collect()
    if is_apart:
        ranks.peers[0].say({"apart": True})
        run_apart(driver.engine.runner.model)
    found |= play(driver, path, driver.engine.runner.num_plans + num_plans, random.Random(seed), most=8)
    check_rest(driver, notes)
    found["left"] = len(driver.engine.runner.log.names)
    return {**found, "beyond": max(notes.bytes_beyond_rows), "notes": all_notes(driver, notes)}


def run_apart(model: Any) -> None:
    """From now on, each row is a forward pass of its own."""
    model.can_batch, model.no_shared_forward = False, "it is said so"


def work_of(driver: Driver, path: str) -> dict[str, Any]:
    """Requests of most kinds, ids in and ids out."""
    prompt, guiding = RandomPrompts(1), Guiding(Path(path), tools="glm45")
    base, found = prompt(300), {}
    found["unlike lengths"] = driver.generate([base, prompt(40), prompt(9)], max_tokens=6, points=(120,))
    turn = [*base, *found["unlike lengths"][0]]
    found["hits"] = driver.generate([[*turn, *prompt(20)], base, [*base[:130], *prompt(30)]], max_tokens=5)
    found["cached"] = [driver.seqs[row].num_cached_tokens for row in (3, 4, 5)]
    rows = [driver.add(prompt(30), 5, replace(HOT, seed=seed)) for seed in (1, 2)]
    gone = driver.add(prompt(50), 200)
    stop = guiding.tokenizer.eos_token_ids
    for sampling in (GREEDY, replace(HOT, seed=3)):
        start = prompt(12)
        constraint = guiding.person(start, thinking="off")
        rows.append(driver.add(start, 10, sampling, constraint=constraint, stop_token_ids=stop))
    start = prompt(8)
    calling = replace(GREEDY, logit_bias={guiding.tokenizer.token_id("<tool_call>"): 90.0})
    names = guiding.names(start, "read", "write")  # a token that was read restricts the next one, which is drawn again
    rows.append(driver.add(start, 8, calling, constraint=names, stop_token_ids=stop))
    while len(driver.replies[gone].token_ids) < 4:
        driver.step()
    driver.engine.abort([gone])
    driver.run()
    scored = driver.add(prompt(300), 0, replace(GREEDY, num_top_logprobs=1), scores_prompt=True)
    driver.run()
    found["aborted"] = driver.replies[gone].token_ids[:4]
    found["drawn"] = [drawn(driver.replies[row]) for row in rows]
    found["drawn"].append([299, [token.logprob for token in driver.seqs[scored].prompt_logprobs]])
    rows = [driver.add(prompt(length), 5) for length in (40, 55)]
    while len(driver.replies[rows[0]].token_ids) < 2:
        driver.step()
    driver.engine.recover(ValueError("a step failed before its plan was sent"))
    driver.run()
    found["restarted"] = [driver.replies[row].token_ids for row in rows]
    found["preempted"], found["preemptions"] = preempted(driver, path, [prompt(60), prompt(70), prompt(80)])
    return found


def drawn(reply: Reply) -> list[Any]:
    """Tokens and log probabilities."""
    return [reply.token_ids, [None if entry is None else entry.logprob for entry in reply.logprobs]]


def preempted(driver: Driver, path: str, prompts: list[list[int]], num: int = 10) -> tuple[list[list[int]], int]:
    """Replies of `num` tokens of rows for which memory is short, and how often one was preempted."""
    engine = driver.engine
    row = engine.default.facts.footprint
    lengths = [*(len(prompt) for prompt in prompts[:-1]), len(prompts[-1]) + num, num]
    rows_bytes = sum(map(row.bytes_at, lengths[:-1])) + num * row.bytes_per_token
    driver.engine = squeezed(config_of(path), engine.runner.model, engine, rows_bytes)
    driver.replies, driver.seqs = {}, {}
    replies = driver.generate(prompts, max_tokens=num)
    num_preemptions = driver.engine.scheduler.num_preemptions
    driver.engine.clear_cache()
    driver.engine = engine
    return replies, num_preemptions


class Notes(list[Any]):
    """What a rank notes at each plan: its number, the stored names, and the collectives up to there."""

    def __init__(self) -> None:
        self.bytes_beyond_rows: list[int] = []  # of plans that only decode
        self.collectives: list[Any] = []
        for name in ("all_sum", "all_gather"):
            setattr(mx.distributed, name, partial(self._called, name, getattr(mx.distributed, name)))

    def _called(self, name: str, collective: Any, array: mx.array, **options: Any) -> mx.array:
        self.collectives.append((name, array.shape, str(array.dtype)))
        return collective(array, **options)

    def add(self, number: int, names: set[int]) -> None:
        texts = (repr(sorted(names)), repr(self.collectives))
        self.append([number, *(hashlib.sha256(text.encode()).hexdigest()[:12] for text in texts)])


def noted(ranks: Ranks) -> Notes:
    """Let the runners of this process note their plans. A worker tells its notes if it is asked."""
    notes = Notes()
    said: list[int] = []  # bytes of each plan
    say = ranks.peers[0].say

    def noting(message: dict[str, Any]) -> int:
        num_bytes = say(message)
        if "n" in message:
            said.append(num_bytes)
        return num_bytes

    ranks.peers[0].say = noting

    class NotingWorker(Worker):
        def _begin(self, plan: StepPlan) -> Any:
            notes.add(len(notes) + 1, set(self.kept))
            return super()._begin(plan)

        def follow(self, message: dict[str, Any]) -> None:
            if "notes" in message:
                ranks.peers[0].say({"notes": notes})
            elif "apart" in message:
                run_apart(self.model)
            else:
                super().follow(message)

    class NotingLeader(Leader):
        def _send(self, plan: StepPlan) -> None:
            super()._send(plan)
            notes.add(self.num_plans, self.log.names)
            if plan == StepPlan(decode=plan.decode):
                notes.bytes_beyond_rows.append(said[-1] - 20 * sum(map(len, plan.decode)))

    loading.Worker, loading.Leader = NotingWorker, NotingLeader
    gc.disable()  # so that names are dropped where the program drops them
    return notes


def check_rest(driver: RankedDriver, notes: Notes) -> None:
    driver.engine.runner.rest()
    before = len(notes)
    driver.step()
    driver.engine.runner.rest()
    assert len(notes) == before, "a plan for nothing"


def all_notes(driver: RankedDriver, notes: Notes) -> list[Any]:
    """The notes of both ranks."""
    driver.ranks.peers[0].say({"notes": True})
    return [notes, driver.ranks.peers[0].hear()["notes"]]


class Failing:
    """Stands in the place of a function of `snapshot`, some calls of which fail on this rank."""

    def __init__(self, name: str, failing: list[int]):
        self._copy, self._num_calls, self._failing = getattr(snapshot, name), 0, failing
        setattr(snapshot, name, self)

    def __call__(self, *state: Any, **options: Any) -> Any:
        self._num_calls += 1
        if self._num_calls in self._failing:
            raise ValueError("this rank alone cannot copy it")
        return self._copy(*state, **options)


def held_by_some(driver: Driver, path: str) -> dict[str, Any]:
    """Replies to four prompts of the same beginning, and how much of it each found in the cache."""
    base, prompt = RandomPrompts(4)(200), RandomPrompts(5)
    prompts = [[*base, *prompt(5)] for _ in range(4)]
    replies = [driver.generate([each], max_tokens=3, points=(200,))[0] for each in prompts]
    cached = [seq.num_cached_tokens for seq in driver.seqs.values()]
    one = Driver(Path(path), prefix_cache=False).generate(prompts, max_tokens=3)
    return {"ranks": replies, "one": one, "cached": cached}


def failing_proof(ranks: Ranks, path: str) -> Any:
    """End the load: a proof fails on rank 1 alone, while rank 0 waits for it in a collective."""

    def fail(model: Any, *_: Any) -> Any:
        raise ValueError("this rank alone cannot prove it")

    ranked.PROOF_S = 0.5
    if ranks.rank:
        Ranked.decode = fail
    return follow(ranks, path) if ranks.rank else RankedDriver(ranks, path).replies


def hanging_load(ranks: Ranks, path: str) -> Any:
    """The end of a load that hangs on rank 1 alone, in its first forward pass, while its heartbeats go on."""
    watch.LOAD_S = 3.0
    if ranks.rank == 0:
        return RankedDriver(ranks, path).replies
    Ranked.prefill = Ranked.decode = lambda *_: threading.Event().wait()
    return follow(ranks, path)


def lost_worker(ranks: Ranks, path: str, number: int) -> Any:
    """The error of rank 0's engine, whose worker is gone when plan `number` reaches it."""

    class LosingWorker(Worker):
        def follow(self, message: dict[str, Any]) -> None:
            if message["n"] == number:
                os._exit(0)
            super().follow(message)

    loading.Worker = LosingWorker
    if ranks.rank:
        return follow(ranks, path)
    driver = RankedDriver(ranks, path)
    driver.add(RandomPrompts(6)(60), 40)
    try:
        driver.run()
    except EngineDead as error:
        return error.message
    return None


def interrupted_step(ranks: Ranks, path: str) -> Any:
    """The error of a step that fails on rank 0 between its decode and its prefill."""
    if ranks.rank:
        return follow(ranks, path)
    driver = RankedDriver(ranks, path)
    driver.add(RandomPrompts(7)(60), 10)

    def fail(updates: Any) -> None:
        raise ValueError("nobody listens")

    driver.engine.listen(fail)
    try:
        driver.engine.step()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return None


def play(driver: Driver, path: str, num_plans: int, dice: random.Random, most: int = 20) -> dict[str, Any]:
    """Requests at random, for fewer than `most` tokens each.

    Returns the replies that are not those of a bare loop, and counts of what happened.
    """
    engine, prompt = driver.engine, RandomPrompts(dice.randrange(1000))
    row = engine.default.facts.footprint
    driver.engine = squeezed(config_of(path), engine.runner.model, engine, 4 * row.bytes_at(120))
    bases, gone = [prompt(90) for _ in range(3)], set()
    scheduler, tree = driver.engine.scheduler, driver.engine.cache_tree
    while engine.runner.num_plans < num_plans or driver.engine.has_work:
        roll, is_open = dice.random(), engine.runner.num_plans < num_plans
        if is_open and roll < 0.3 and scheduler.num_running < 6:
            base = dice.choice(bases)
            cut = dice.choice((30, 60, dice.randrange(1, 90)))
            driver.add([*base[:cut], *prompt(dice.randrange(1, 40))], dice.randrange(1, most), points=(cut,))
        elif roll < 0.35 and (live := [seq for seq in driver.seqs.values() if not is_over(driver, seq.seq_id)]):
            gone.add(seq_id := dice.choice(live).seq_id)
            driver.engine.abort([seq_id])
        elif roll < 0.38:
            driver.engine.clear_cache()
        elif roll < 0.42:
            tree.shrink_to(tree.used_bytes // 2)
        driver.step()
    wrong = [
        seq_id
        for seq_id, reply in driver.replies.items()
        if seq_id not in gone
        and plain_loop(Path(path), tokens_of(driver, seq_id), len(reply.token_ids))[0] != reply.token_ids
    ]
    hits = sum(seq.num_cached_tokens > 0 for seq in driver.seqs.values())
    found = {"wrong": wrong, "hits": hits, "preemptions": scheduler.num_preemptions, "requests": len(driver.seqs)}
    driver.engine.clear_cache()
    driver.engine = engine
    return found


def is_over(driver: Driver, seq_id: int) -> bool:
    return driver.replies[seq_id].finish_reason is not None


def tokens_of(driver: Driver, seq_id: int) -> tuple[int, ...]:
    return driver.seqs[seq_id].prompt.token_ids
