"""Proves that sums over all ranks are right, and measures how long they take. It knows no plan.

A sum over the ranks is a collective: all ranks call these functions at the same time, with the same arguments.
"""

import time
from statistics import median

import mlx.core as mx

from ..core.errors import ModelLoadError
from ..runner.checkpoint import Checkpoint
from ..runner.model_types import text_config
from .figures import Link
from .lockstep import Ranks

# No two Macs have run these sums.
_MOST = 8  # numbers to this are summed exactly in 16 bits by as many as 16 ranks
_DTYPES = (mx.bfloat16, mx.float16, mx.float32)
_WIDTH = 4096  # of hidden states, where config.json does not say it
_NUM_SMALL = 32  # sums in a row, as in the forward pass of a token
_NUM_RUNS = 5


def check_link(ranks: Ranks, checkpoint: Checkpoint, chunk: int) -> Link:
    """Prove sums as large as the model's, and record their times. Raises ModelLoadError."""
    width = int(text_config(checkpoint.config).get("hidden_size") or _WIDTH)
    prove_sums(ranks, width, chunk)
    ranks.link = measure_link(ranks, width, chunk)
    return ranks.link


def prove_sums(ranks: Ranks, width: int, chunk: int, *, seed: int = 0) -> None:
    """Compare successive sums of different shapes with those that each rank computes alone. Raises ModelLoadError.

    `width` is that of the hidden states, and `chunk` the most tokens of a forward pass.
    """
    shapes = [(chunk, width), (1, width), (chunk, width), (max(1, chunk // 3), width), (3, width), (chunk, width)]

    def part(rank: int, place: int) -> mx.array:
        key = mx.random.key(seed + rank * len(shapes) + place)
        return mx.random.randint(-_MOST, _MOST + 1, shapes[place], key=key).astype(_DTYPES[place % len(_DTYPES)])

    sums = [mx.distributed.all_sum(part(ranks.rank, place), group=ranks.group) for place in range(len(shapes))]
    mx.eval(sums)
    wrong = []
    for place, (found, (num, _)) in enumerate(zip(sums, shapes, strict=True)):
        expected = sum((part(rank, place) for rank in range(1, ranks.size)), part(0, place))
        if not mx.array_equal(found, expected).item():
            wrong.append(f"{num} x {width}")
    for rank, told in enumerate(ranks.exchange("wrong sums", wrong)):
        if told:
            raise ModelLoadError(
                f"The link between the Macs sums wrongly: rank {rank} got wrong numbers for {', '.join(told)}. Restart "
                "all Macs, try another cable or port, or leave out RDMA; install the newest macOS and mlx on all Macs."
            )


def measure_link(ranks: Ranks, width: int, chunk: int) -> Link:
    """Measure sums as long as those of a token and of a chunk, the device's work between them included."""
    small, large = mx.zeros((1, width), mx.bfloat16), mx.zeros((chunk, width), mx.bfloat16)
    sum_s = median(_time(ranks, small, _NUM_SMALL) for _ in range(_NUM_RUNS))
    chunk_s = median(_time(ranks, large, 1) for _ in range(_NUM_RUNS))
    sent_bytes = large.nbytes * 2 * (ranks.size - 1) / ranks.size  # by each rank of a ring
    return Link(sum_s, sent_bytes / chunk_s)


def _time(ranks: Ranks, values: mx.array, num_sums: int) -> float:
    """Return the seconds that a sum takes. All ranks begin together."""
    mx.eval(values, mx.distributed.all_sum(mx.ones(1), group=ranks.group))
    start = time.perf_counter()
    for _ in range(num_sums):
        values = mx.distributed.all_sum(values * 0.5 + 1, group=ranks.group)
    mx.eval(values)
    return (time.perf_counter() - start) / num_sums
