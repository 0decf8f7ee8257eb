"""What rank 0 does in the tests of two ranks, and the same work by one process."""

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.engine_driver import GREEDY, Driver, RandomPrompts, Reply, squeezed
from tests.support.guiding import Guiding
from tests.support.two_ranks import RankedDriver, config_of, follow
from vllm_mlx.core.sequence import TokenSampling
from vllm_mlx.ranks.lockstep import Ranks

HOT = TokenSampling(temperature=1.0, top_p=0.95, repetition_penalty=1.1, num_top_logprobs=2)


def everything(ranks: Ranks, path: str) -> Any:
    """The results of `work` on two ranks and of one process, and what was left on the ranks."""
    if ranks.rank:
        return follow(ranks, path)
    driver = RankedDriver(ranks, path)
    found = work_of(driver, path)
    driver.engine.clear_cache()
    gc.collect()
    left = len(driver.engine.runner.names)
    driver.stop()
    return {"ranks": found, "one": work_of(Driver(Path(path), max_model_len=4096), path), "left": left}


def work_of(driver: Driver, path: str) -> dict[str, Any]:
    """Requests of most kinds, ids in and ids out."""
    prompt, guiding = RandomPrompts(1), Guiding(Path(path), tools="glm45")
    base, found = prompt(300), {}
    found["unlike lengths"] = driver.generate([base, prompt(40), prompt(9)], max_tokens=10)
    turn = [*base, *found["unlike lengths"][0]]
    found["hits"] = driver.generate([[*turn, *prompt(20)], base, [*base[:130], *prompt(30)]], max_tokens=8)
    found["cached"] = [driver.seqs[row].num_cached_tokens for row in (3, 4, 5)]
    rows = [driver.add(prompt(30), 10, replace(HOT, seed=seed)) for seed in (1, 2)]
    gone = driver.add(prompt(50), 200)
    stop = guiding.tokenizer.eos_token_ids
    for sampling in (GREEDY, replace(HOT, seed=3)):
        start = prompt(12)
        constraint = guiding.person(start, thinking="off")
        rows.append(driver.add(start, 60, sampling, constraint=constraint, stop_token_ids=stop))
    start = prompt(8)
    calling = replace(GREEDY, logit_bias={guiding.tokenizer.token_id("<tool_call>"): 90.0})
    names = guiding.names(start, "read", "write")  # a token that was read restricts the next one, which is drawn again
    rows.append(driver.add(start, 20, calling, constraint=names, stop_token_ids=stop))
    while len(driver.replies[gone].token_ids) < 4:
        driver.step()
    driver.engine.abort([gone])
    driver.run()
    found["aborted"] = driver.replies[gone].token_ids[:4]
    found["drawn"] = [drawn(driver.replies[row]) for row in rows]
    found["preempted"], found["preemptions"] = preempted(driver, path, [prompt(60), prompt(70), prompt(80)])
    return found


def drawn(reply: Reply) -> list[Any]:
    """Tokens and rounded log probabilities."""
    logprobs = [None if entry is None else round(entry.logprob, 3) for entry in reply.logprobs]
    return [reply.token_ids, logprobs]


def preempted(driver: Driver, path: str, prompts: list[list[int]], num: int = 50) -> tuple[list[list[int]], int]:
    """Replies of `num` tokens of rows for which memory is short, and how often one was preempted."""
    engine = driver.engine
    row = engine.facts.footprint
    lengths = [*(len(prompt) for prompt in prompts[:-1]), len(prompts[-1]) + num, num]
    rows_bytes = sum(map(row.bytes_at, lengths[:-1])) + num * row.bytes_per_token
    driver.engine = squeezed(config_of(path), engine.runner.model, engine, rows_bytes)
    driver.replies, driver.seqs = {}, {}
    replies = driver.generate(prompts, max_tokens=num)
    num_preemptions = driver.engine.scheduler.num_preemptions
    driver.engine.clear_cache()
    driver.engine = engine
    return replies, num_preemptions
