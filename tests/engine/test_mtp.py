"""An MTP head drafts: replies stay the same, and the head's state is state of the row like that of any other layer."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.support.checkpoints import checkpoint
from tests.support.engine_driver import GREEDY, Driver, RandomPrompts
from tests.support.failing_device import num_pending
from vllm_mlx.cache import layers
from vllm_mlx.core.request import TokenSampling
from vllm_mlx.core.sequence import PromptInputs, Sequence
from vllm_mlx.runner.batch import Batch
from vllm_mlx.runner.mtp import HeadedModel

from .test_disk_any_load import started
from .test_speculation import LENGTHS, NUM_TOKENS, SETTINGS, logprobs
from .vision_harness import VisionModel

FAMILIES = ("vision:qwen3_5", "vision:qwen3_5_moe")
PROMPTS = [RandomPrompts(5 + length)(length) for length in LENGTHS]


def headed(architecture: str) -> Path:
    return checkpoint(architecture, mtp=True)


def model_of(driver: Driver) -> HeadedModel:
    model = driver.engine.runner.model
    assert isinstance(model, HeadedModel) and driver.engine.default.facts.no_drafts is None
    return model


def replies(driver: Driver, indices: Any) -> list[Any]:
    ids = [driver.add(PROMPTS[index], NUM_TOKENS, SETTINGS[index]) for index in indices]
    driver.run()
    assert [driver.replies[seq_id].error for seq_id in ids] == [None] * len(ids)
    return [driver.replies[seq_id] for seq_id in ids]


@pytest.mark.parametrize(
    ("family", "num_rows"),
    [
        (FAMILIES[1], 4),
        *(
            pytest.param(family, num_rows, marks=pytest.mark.full)
            for family, num_rows in zip((FAMILIES[0], *FAMILIES * 2), (1, 4, 1, 8, 8), strict=True)
        ),
    ],
)
def test_replies_with_the_head_equal_those_without(family: str, num_rows: int) -> None:
    plain = Driver(headed(family), num_draft_tokens=0, prefix_cache=False)
    driver = Driver(headed(family), num_draft_tokens=3, prefix_cache=False)
    for first in range(0, len(PROMPTS), num_rows):
        indices = range(first, first + num_rows)
        expected = [replies(plain, [index])[0] for index in indices]
        found = replies(driver, indices)
        assert [reply.token_ids for reply in found] == [reply.token_ids for reply in expected]
        assert [logprobs(reply) for reply in found] == [logprobs(reply) for reply in expected]
    speculation = driver.engine.scheduler.speculation
    assert 0.1 < speculation.num_accepted["mtp"] / speculation.num_drafted["mtp"] < 1
    assert driver.engine.scheduler.num_restarts == 0


@pytest.mark.full
def test_a_head_may_have_several_layers() -> None:
    path = checkpoint(FAMILIES[0], mtp=True, mtp_num_hidden_layers=2)
    expected = Driver(path, num_draft_tokens=0).generate(PROMPTS[:3], max_tokens=12)
    driver = Driver(path, num_draft_tokens=3)
    assert driver.generate(PROMPTS[:3], max_tokens=12) == expected
    assert model_of(driver).num_head_layers == 2
    assert driver.engine.scheduler.speculation.num_accepted["mtp"] > 0


def test_drawn_drafts_share_the_noise_of_the_reply() -> None:
    """With noise of their own, a tenth of them would be right: so much of a distribution lies on one token here."""
    driver = Driver(headed(FAMILIES[0]), num_draft_tokens=1, prefix_cache=False)
    for seed in range(2):
        driver.generate([PROMPTS[0]], max_tokens=30, sampling=TokenSampling(temperature=1, seed=seed))
    speculation = driver.engine.scheduler.speculation
    assert speculation.num_accepted["mtp"] > 0.5 * speculation.num_drafted["mtp"]


def test_replies_about_images_are_the_same_with_the_head() -> None:
    model = VisionModel(headed(FAMILIES[0]))
    asked = [([f"{number}: What is in this image? ", number],) for number in range(2)]
    prompts = [model.prompt(*turns) for turns in asked]
    plain = [model.driver(num_draft_tokens=0).generate([prompt], max_tokens=12)[0] for prompt in prompts]
    driver = model.driver(num_draft_tokens=3)
    assert driver.generate(prompts, max_tokens=12) == plain
    assert driver.engine.scheduler.speculation.num_accepted["mtp"] > 0


@pytest.mark.parametrize("is_prediction_drawn", [True, False])
def test_the_head_may_draft_for_rows_of_one_kind_alone(is_prediction_drawn: bool) -> None:
    """A greedy row beside drawn ones, and a drawn row beside greedy ones: the others have a prediction."""
    hot = TokenSampling(temperature=1, seed=5)
    settings = (GREEDY, hot) if is_prediction_drawn else (hot, GREEDY)
    plain = Driver(headed(FAMILIES[0]), num_draft_tokens=0, prefix_cache=False)
    expected = [
        plain.generate([prompt], max_tokens=20, sampling=sampling)[0]
        for prompt, sampling in zip(PROMPTS, settings, strict=False)
    ]
    driver = Driver(headed(FAMILIES[0]), num_draft_tokens=3, prefix_cache=False)
    ids = [driver.add(PROMPTS[0], 20, settings[0])]
    ids.append(driver.add(PROMPTS[1], 20, settings[1], prediction=tuple(expected[1])))
    driver.run()
    assert [driver.replies[seq_id].token_ids for seq_id in ids] == expected
    accepted = driver.engine.scheduler.speculation.num_accepted
    assert accepted["prediction"] > 0 and accepted["mtp"] > 0
    assert driver.engine.scheduler.num_restarts == 0


def cold(model: HeadedModel, seq: Sequence, length: int, chunk: int = 10**6) -> Batch:
    """A row that reads a text anew, and is to feed its next token."""
    caches = model.new_caches()
    for low in range(0, length, chunk):
        model.prefill(seq, low, min(low + chunk, length), caches)
        mx.eval(layers.state_arrays(caches))
    return Batch.of_row(model, seq, caches, length)


def held(batch: Batch, seq: Sequence, length: int) -> list[mx.array]:
    view = batch.view(seq.seq_id, length)
    return layers.arrays([view.attention, view.recurrent])


def assert_same_state(found: list[mx.array], expected: list[mx.array]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert mx.abs(one - other).max().item() <= 1e-4 * max(1.0, mx.abs(other).max().item())


def test_an_undrafted_row_feeds_the_head_and_leaves_no_operation_behind() -> None:
    model = model_of(Driver(headed(FAMILIES[0]), num_draft_tokens=1))
    seq = Sequence(seq_id=0, prompt=PromptInputs(token_ids=tuple(PROMPTS[0])), sampling=GREEDY, max_tokens=200)
    row = cold(model, seq, 39, chunk=16)
    pending = []
    for _ in range(100):
        [token] = row.launch().read()
        seq.output_token_ids.append(token.token_id)
        pending.append(num_pending(layers.state_arrays(row.leaves)))
    assert pending[40] == pending[99]
    assert_same_state(held(row, seq, seq.prefill_end), held(cold(model, seq, seq.prefill_end), seq, seq.prefill_end))


@dataclass
class Counts:
    """The tokens that a model and its head have computed, and those of them that were guesses."""

    model: int = 0
    head: int = 0
    guesses: int = 0
    is_on: bool = True

    def watch(self, model: HeadedModel, patch: pytest.MonkeyPatch) -> None:
        module, head = model.weights
        self._count(module.language_model.model.layers[0], "input_layernorm", "model")
        self._count(head, "fc", "head")
        guess = model.guess

        def guessing(seqs: Any, *inputs: Any) -> Any:
            self.guesses += len(seqs)
            return guess(seqs, *inputs)

        patch.setattr(model, "guess", guessing)

    def _count(self, module: Any, name: str, kind: str) -> None:
        layer = getattr(module, name)

        def counting(x: mx.array) -> mx.array:
            setattr(self, kind, getattr(self, kind) + self.is_on * x.shape[0] * x.shape[1])
            return layer(x)

        setattr(module, name, counting)


def test_the_head_computes_what_the_model_computes_in_a_long_conversation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four turns beside another tenant's, with preemption, eviction to disk and a restart."""
    path, prompts, counts = headed(FAMILIES[0]), RandomPrompts(9), Counts()
    room = Driver(path).engine.default.facts.footprint
    plain = Driver(path, num_draft_tokens=0, prefix_cache=False)
    text: list[int] = []
    num_preempted = num_from_disk = 0
    for half in range(2):
        driver = Driver(path, rows_bytes=int(2.1 * room.bytes_at(257)), num_draft_tokens=3)
        counts.is_on = True
        counts.watch(model_of(driver), monkeypatch)
        with started(path, tmp_path, driver=driver) as server:
            for _ in range(2):
                text += prompts(25)
                others = [driver.add(prompts(200), 40, tenant="ann")]
                asked = driver.add(text, 16, tenant="ann")
                while driver.seqs[asked].num_output_tokens < 4:
                    server.step()
                others.append(driver.add(prompts(200), 20, tenant="ben"))
                server.run()
                reply = driver.replies[asked].token_ids
                assert [reply] == plain.generate([text], max_tokens=16)
                assert all(driver.replies[other].error is None for other in others)
                num_from_disk += half * (driver.seqs[asked].receipt.tier == "disk")
                num_preempted += driver.seqs[asked].num_preemptions
                text += reply
            seq = driver.seqs[driver.add([*text, 7], 40)]
            while seq.num_output_tokens < 9:
                server.step()
            [batch] = [batch for batch in driver.engine.runner.batches if seq.seq_id in batch.seq_ids]
            warm, length = held(batch, seq, seq.prefill_end), seq.prefill_end
            server.run()
        counts.is_on = False
        assert_same_state(warm, held(cold(model_of(driver), seq, length), seq, length))
    assert num_preempted and num_from_disk
    assert counts.head - counts.guesses == counts.model
    assert counts.guesses > 0
