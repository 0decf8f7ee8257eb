"""What rank 0 does in the tests of two ranks, beside the same work by one process."""

from typing import Any

from tests.support.engine_driver import Driver, RandomPrompts
from tests.support.two_ranks import RankedDriver, config_of, follow
from vllm_mlx.ranks.lockstep import Ranks


def one_request(ranks: Ranks, path: str) -> Any:
    if ranks.rank:
        return follow(ranks, path)
    driver = RankedDriver(ranks, path)
    prompt = RandomPrompts(1)(60)
    reply = driver.generate([prompt], max_tokens=12)
    driver.stop()
    return [reply, Driver(path, max_model_len=4096).generate([prompt], max_tokens=12)]
