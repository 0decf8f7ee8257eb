"""Drafts on simulated chips: never much slower than no drafts, and near the best fixed number, for every source.

The passes take what the device model says, up to 3 % more or less. Steps without drafts hide Python's work behind the
device's; steps that read their own samples do not. The model's own head costs its weights for each draft.
"""

import random
import statistics
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import pytest

from tests.support.device_catalogue import CHIPS, SHAPES
from tests.support.device_model import Device
from tests.support.rows import cases
from vllm_mlx.core.request import TokenSampling
from vllm_mlx.core.sequence import PromptInputs, Sequence
from vllm_mlx.core.step import BY_HEAD, StepOutput, Verified
from vllm_mlx.scheduler.depth import DepthController
from vllm_mlx.scheduler.speculation import MOST, Speculation

PASSES, FIRST = 600, 64  # passes of a run, and those that are not counted
LENGTH = 2000  # tokens of a row, for attention
BLOCK = 400  # tokens that n-grams find again
HOST_S = 0.3e-3  # of a step, outside the runner
SEEDS = (101, 102, 103)
PLACES = {"alone": (1, False), "three rows": (4, False), "a busy lane": (1, True)}  # rows, whether each step reads
MACHINES = [
    (chip, shape)
    for chip in CHIPS
    for shape in ("Qwen3 8B", "Qwen3.6 35B-A3B", "Qwen3.8 27B")
    if SHAPES[shape].weights_bytes < 0.7 * CHIPS[chip].memory_bytes
]


@dataclass(frozen=True)
class Bench:
    """A row with drafts from one source, which are right with one chance, on one device, alone or in company."""

    device: Device
    source: str
    acceptance: float
    num_rows: int
    is_busy: bool

    @property
    def is_padded(self) -> bool:
        return self.device.shape.num_recurrent > 0

    @cached_property
    def pass_s(self) -> list[float]:
        """By drafts of all rows."""
        rows = [[[LENGTH] * self.num_rows]]
        return [self.device.decode_s(rows, drafts) for drafts in range(self.num_rows * MOST + 1)]

    @cached_property
    def head_s(self) -> float:
        """A draft of the head: one layer, and the logits."""
        shape = self.device.shape
        layers = shape.shared_weights + shape.experts_touched(1) * shape.expert_weights
        weights = shape.head_weights + layers / shape.num_layers
        kernels_s = shape.num_kernels / shape.num_layers * self.device.chip.dispatch_s
        return self.device.read_s(weights * shape.bits / 8) + kernels_s

    def texts(self, rng: random.Random) -> list[list[int]]:
        """The reply of each row; with n-grams, the first row's repeats a block with errors."""
        texts = [rng.choices(range(10**5), k=PASSES * (1 + MOST)) for _ in range(self.num_rows)]
        if self.source == "ngram":
            block = texts[0][:BLOCK]
            texts[0] = [
                block[at % BLOCK] if at < BLOCK or rng.random() < self.acceptance else token
                for at, token in enumerate(texts[0])
            ]
        return texts

    def rows(self, speculation: Speculation, texts: list[list[int]], rng: random.Random) -> list[Sequence]:
        rows = []
        for seq_id, text in enumerate(texts):
            has_prediction = self.source == "prediction" and not seq_id
            guess = tuple(token if rng.random() < self.acceptance else -1 for token in text if has_prediction)
            seq = Sequence(
                seq_id=seq_id,
                prompt=PromptInputs(token_ids=tuple(text[:BLOCK] if self.source == "ngram" else text[:1])),
                sampling=TokenSampling(),
                max_tokens=10**6,
                prediction=guess,
            )
            speculation.open(seq)
            rows.append(seq)
        return rows

    def took_s(self, drafts: list[int], *, is_read: bool, is_ahead: bool) -> float:
        """The runner's time. The first step ahead waits for nothing, and one that reads waits for the one before."""
        widest = max(drafts)
        device_s = self.pass_s[widest * self.num_rows if self.is_padded else sum(drafts)]
        device_s += self.head_s * widest if self.source == "mtp" else 0.0
        python_s = self.device.python_s
        if not is_read:
            return max(device_s - HOST_S, python_s) if is_ahead else python_s
        return python_s + device_s + (max(0.0, self.pass_s[0] - python_s) if is_ahead else 0.0)

    def rate(self, seed: int, depth: DepthController) -> float:
        """Tokens a second of this model's own time, after the first passes."""
        rng = random.Random(seed)
        speculation = Speculation(
            depth, 10**6, has_head=self.source == "mtp", state_bytes=int(self.is_padded), shares_forward=True
        )
        texts = self.texts(rng)
        rows = self.rows(speculation, texts, rng)
        texts = [text[BLOCK if self.source == "ngram" else 1 :] for text in texts]
        now = own = 0.0
        num_tokens, is_ahead = 0, False
        for number in range(PASSES):
            planned, reads = speculation.plan(
                rows, now, 1 << 40, is_ahead=is_ahead, merged=(), is_alone=not self.is_busy
            )
            is_read = bool(planned) or reads or self.is_busy
            drafts = [len(planned.get(seq.seq_id, ())) for seq in rows]
            took = self.took_s(drafts, is_read=is_read, is_ahead=is_ahead) * rng.uniform(0.97, 1.03)
            verified = []
            for seq, text in zip(rows, texts, strict=True):
                right = self.right(planned.get(seq.seq_id, ()), text[seq.num_output_tokens :][: MOST + 1], rng)
                if seq.seq_id in planned:
                    verified.append(Verified(seq.seq_id, len(planned[seq.seq_id]), right))
                for token in text[seq.num_output_tokens :][: right + 1]:
                    seq.output_token_ids.append(token)
                    speculation.take(seq, token)
                num_tokens += (right + 1) * (number >= FIRST)
            speculation.learn(StepOutput(verified=tuple(verified), decode_s=took if is_read else None))
            now += took + HOST_S + (3 * self.pass_s[0] if self.is_busy else 0.0)
            own += (took + HOST_S) * (number >= FIRST)
            is_ahead = not is_read
        return num_tokens / own

    def right(self, drafts: tuple[int, ...], coming: list[int], rng: random.Random) -> int:
        """The number of drafts that are accepted."""
        for at, draft in enumerate(drafts):
            if (rng.random() >= self.acceptance) if draft == BY_HEAD else draft != coming[at]:
                return at
        return len(drafts)


def figures(bench: Bench) -> tuple[list[float], list[float]]:
    """For each seed, the tokens a second as a share of no drafts, and of the best fixed number."""
    fixed = [bench.rate(SEEDS[0], DepthController(most, fixed=True)) for most in (0, 1, 2, 4, MOST)]
    ours = [bench.rate(seed, DepthController(MOST, padded=bench.is_padded)) for seed in SEEDS]
    return [rate / fixed[0] for rate in ours], [rate / max(fixed) for rate in ours]


IN_GATE = ((("M2 Max", "Qwen3 8B"), "a busy lane"), (("M5 Max", "Qwen3.6 35B-A3B"), "alone"))


@pytest.mark.parametrize("acceptance", [0.9, 0.6, 0.2])
@pytest.mark.parametrize("source", cases(["mtp", "ngram", "prediction"], ["mtp"]))
@pytest.mark.parametrize(("machine", "place"), [
    pytest.param(*case, marks=[pytest.mark.full] * (case not in IN_GATE), id=str(case))
    for case in product(MACHINES, PLACES)
])  # fmt: skip
def test_drafts_keep_their_bounds(machine: tuple[str, str], source: str, place: str, acceptance: float) -> None:
    bench = Bench(Device(CHIPS[machine[0]], SHAPES[machine[1]]), source, acceptance, *PLACES[place])
    of_none, of_best = figures(bench)
    print(*machine, source, place, acceptance, *(f"{share:.3f}" for share in (*of_none, *of_best)), sep="|")
    assert statistics.mean(of_none) >= 0.97
    assert statistics.mean(of_best) >= 0.9


@pytest.mark.parametrize(("acceptance", "is_wrong"), [(0.01, True), (0.4, False)])
def test_a_head_that_is_wrong_from_the_start_is_one_line_in_the_log(
    acceptance: float, is_wrong: bool, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(Device(CHIPS["M2 Max"], SHAPES["Qwen3 8B"]), "mtp", acceptance, *PLACES["alone"])
    bench.rate(SEEDS[0], DepthController(MOST, fixed=True))
    assert len([line for line in caplog.messages if "MTP head" in line]) == is_wrong
