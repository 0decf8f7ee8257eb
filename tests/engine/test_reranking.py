"""A causal reranker: the scores of a forward pass of each complete prompt, and no token of their beginning twice."""

import asyncio
import random
from array import array
from contextlib import contextmanager
from itertools import accumulate

import pytest

from tests.support.checkpoints import checkpoint
from tests.support.engine_driver import GREEDY, Driver
from tests.support.rerankers import reference_ids, reference_score, reranker
from vllm_mlx.core.catalogue import Catalogue, Entry
from vllm_mlx.core.config import EngineConfig, ModelConfig
from vllm_mlx.core.encoding import EncoderFacts
from vllm_mlx.core.errors import Cancelled, GenerationError, InvalidParameter
from vllm_mlx.core.events import Failed, Finished, Vectors
from vllm_mlx.core.request import ROW_IDS, Request, TextInputs, TokenSampling
from vllm_mlx.core.sequence import PromptInputs, Sequence, TokenizedTexts
from vllm_mlx.core.step import StepOutput
from vllm_mlx.engine.loading import start_engine
from vllm_mlx.formats.tokenizer import Tokenizer
from vllm_mlx.util.faults import DeviceFault

from .test_several_models import Serving, prompt_of

YES, NO = 7, 11
BEGINNING, ANSWER = 60, [3, 4, 5]


def texts(num: int, seed: int = 0, longest: int = 30) -> list[list[int]]:
    """The beginning of all prompts, and the rest of each."""
    draw = random.Random(seed)
    return [
        [draw.randrange(900) for _ in range(BEGINNING)],
        *([draw.randrange(900) for _ in range(draw.randint(1, longest))] + ANSWER for _ in range(num)),
    ]


class Reranker(Driver):
    """A driver that counts the tokens of all chunks and decode steps."""

    def __init__(self, path, **settings):
        super().__init__(path, encoder=EncoderFacts(task="rerank", max_tokens=1, is_causal=True), **settings)
        self.news, self.num_computed, self.most_rows = {}, 0, 0
        runner, prefill, decode = self.engine.runner, self.engine.runner.prefill, self.engine.runner.decode

        def counted_prefill(chunks):
            self.num_computed += sum(chunk.end - chunk.start for chunk in chunks)
            return prefill(chunks)

        def counted_decode(plan):
            num_rows = sum(map(len, plan.decode))
            self.num_computed, self.most_rows = self.num_computed + num_rows, max(self.most_rows, num_rows)
            return decode(plan)

        runner.prefill, runner.decode = counted_prefill, counted_decode

    def deliver(self, updates):
        for update in updates:
            self.news.setdefault(update.seq_id, []).append(update)

    def send(self, parts: list[list[int]], number: int = 0, **fields) -> None:
        ids = array("I", [each for part in parts for each in part])
        tokenized = TokenizedTexts(ids=ids, ends=tuple(accumulate(map(len, parts))), answer_ids=(YES, NO))
        prompt = PromptInputs(token_ids=(), texts=tokenized)
        sampling = TokenSampling(temperature=0)
        seq = Sequence(seq_id=number * ROW_IDS, prompt=prompt, sampling=sampling, max_tokens=0, **fields)
        self.engine.add([seq])

    def scores(self, parts: list[list[int]], number: int = 0) -> list[float]:
        self.send(parts, number)
        self.run()
        return self.found(number)

    def found(self, number: int = 0) -> list[float]:
        *_, last = self.news[number * ROW_IDS]
        assert last.finish_reason is not None and last.error is None and last.num_encoded == len(last.vectors)
        return list(last.vectors)


def expected(path, parts):
    beginning, *rest = parts
    return [reference_score(path, [*beginning, *document], YES, NO) for document in rest]


@pytest.fixture(scope="module", params=["qwen3", "qwen3_5", "gemma3_text"])
def path(request):
    return checkpoint(request.param)


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_num_seqs": 1}, {"max_prefill_chunk": 16}, {"prefix_cache": False}, {"repeatable": True}],
    ids=str,
)
def test_scores_are_those_of_complete_prompts(path, settings):
    asked = texts(9)
    assert Reranker(path, **settings).scores(asked) == pytest.approx(expected(path, asked), abs=1e-4)


def test_many_documents_come_in_the_order_of_the_reference_and_their_beginning_is_computed_once():
    path, asked = checkpoint("qwen3"), texts(60)
    driver = Reranker(path, max_num_seqs=16)
    found, wanted = driver.scores(asked), expected(path, asked)
    assert found == pytest.approx(wanted, abs=1e-4)
    order = sorted(range(60), key=lambda at: -wanted[at])
    assert sorted(range(60), key=lambda at: -found[at]) == order
    assert driver.num_computed == sum(map(len, asked))
    assert driver.news[0][-1].num_computed_tokens == sum(map(len, asked))
    assert 1 < driver.most_rows <= 16


def test_the_cache_keeps_the_beginning_alone_and_the_next_request_resumes_there(path):
    driver = Reranker(path)
    asked, other = texts(12), texts(3, seed=1)
    driver.scores(asked)
    assert driver.num_computed == sum(map(len, asked))
    (entry,) = driver.engine.cache_entries()
    assert entry.end == BEGINNING

    again = [asked[0], *other[1:]]
    found = driver.scores(again, 1)
    assert found == pytest.approx(expected(path, again), abs=1e-4)
    assert driver.news[ROW_IDS][0].receipt.cached_tokens == BEGINNING
    assert driver.num_computed == sum(map(len, asked)) + sum(map(len, other[1:]))

    assert driver.scores(other, 2) == pytest.approx(expected(path, other), abs=1e-4)
    assert len(driver.engine.cache_entries()) == 2


@pytest.mark.parametrize("snapshot_every", [0, 16])
def test_one_document_leaves_the_beginning_too(path, snapshot_every):
    driver = Reranker(path, snapshot_every=snapshot_every, max_prefill_chunk=32)
    beginning, first, second = texts(2)
    driver.scores([beginning, first])
    entries = driver.engine.cache_entries()
    assert max(entry.end for entry in entries) == BEGINNING
    assert sum(entry.state_bytes > 0 for entry in entries) <= 1
    assert driver.scores([beginning, second], 1) == pytest.approx(expected(path, [beginning, second]), abs=1e-4)
    assert driver.news[ROW_IDS][0].receipt.cached_tokens == BEGINNING


def test_no_state_of_a_later_position_is_stored_as_that_of_the_beginning():
    driver = Reranker(checkpoint("qwen3_5"))
    cache = driver.engine.scheduler.prefix_cache
    seq = Sequence(seq_id=0, prompt=PromptInputs(token_ids=(*range(90),)), sampling=GREEDY, max_tokens=1, max_stored=60)
    cache.open(seq)
    assert cache.plan_capture(seq, 80) is None
    assert cache.plan_capture(seq, 60).end == 60


def test_documents_that_begin_alike_wait_for_no_state_that_is_not_kept(path):
    beginning, *rest = texts(6)
    alike = [beginning, *([*range(100, 180), *document] for document in rest)]
    driver = Reranker(path)
    assert driver.scores(alike) == pytest.approx(expected(path, alike), abs=1e-4)
    assert driver.most_rows > 1
    assert driver.num_computed == sum(map(len, alike))


def test_a_small_request_ends_first_though_a_large_one_came_before():
    path, large, small = checkpoint("qwen3"), texts(30, longest=200), texts(1, seed=1)
    driver = Reranker(path, max_num_seqs=4, max_prefill_chunk=16)
    driver.send(large, 0, tenant="large")
    while driver.engine.scheduler.num_running < 4:
        driver.step()
    driver.send(small, 1, tenant="small")
    while ROW_IDS not in driver.news or driver.news[ROW_IDS][-1].finish_reason is None:
        driver.step()
        assert len(driver.engine.scheduler.waiting) <= 4  # the other documents take no place
    assert driver.news[0][-1].finish_reason is None
    assert driver.engine.scheduler.num_preemptions  # of a row of the large one
    driver.run()
    assert driver.found(0) == pytest.approx(expected(path, large), abs=1e-4)
    assert driver.found(1) == pytest.approx(expected(path, small), abs=1e-4)


def test_a_cancelled_request_leaves_nothing(path):
    driver = Reranker(path, max_num_seqs=4, max_prefill_chunk=16)
    driver.send(texts(40, longest=300), 0)
    driver.send(texts(2, seed=1), 1)
    while driver.engine.scheduler.num_running < 4:
        driver.step()
    driver.engine.abort([0])
    before = driver.num_computed
    driver.run()
    assert driver.num_computed - before <= sum(map(len, texts(2, seed=1)))
    assert not driver.engine.num_rows and not driver.engine.scheduler.waiting
    assert all(update.finish_reason is None for update in driver.news[0])
    assert driver.found(1) == pytest.approx(expected(path, texts(2, seed=1)), abs=1e-4)


def test_a_row_that_fails_ends_its_request_alone(path):
    driver = Reranker(path, max_num_seqs=4)
    driver.send(texts(40), 0)
    driver.send(texts(5, seed=1), 1)
    driver.step()
    failed = StepOutput(failed=((3, GenerationError("no memory")), (4, GenerationError("no memory"))))
    (news,) = driver.engine.scheduler.update(failed)
    assert (news.seq_id, str(news.error), news.finish_reason) == (0, "no memory", None)
    driver.run()
    assert driver.num_computed < sum(map(len, texts(40)))
    assert driver.found(1) == pytest.approx(expected(path, texts(5, seed=1)), abs=1e-4)


def test_a_fault_of_the_device_costs_no_score(path):
    driver = Reranker(path, max_num_seqs=4)
    driver.send(texts(9), 0)
    for _ in range(3):
        driver.step()
    driver.engine.recover(DeviceFault("[METAL] Command buffer execution failed"), driver.deliver)
    driver.run()
    assert driver.found() == pytest.approx(expected(path, texts(9)), abs=1e-4)


# Requests, from texts to scores

QUERIES = ("What is a fox?", "Where is Paris?")
DOCUMENTS = tuple(f"Paragraph {number}: " + "the quick brown fox " * (number % 7) for number in range(8))


class Served(Serving):
    """Serves a chat model and a causal reranker."""

    async def rerank(self, *documents: str, query: str = QUERIES[0], name: str = "r", **asked) -> tuple:
        """Return the scores, and the usage."""
        inputs = TextInputs(texts=documents, query=query, **asked)
        found = []
        async with await self.client.submit(Request(request_id=name, texts=inputs, model=1)) as generation:
            async for _, event in generation:
                if isinstance(event, Failed):
                    raise event.error
                found.append(event)
        *_, vectors, finished = found
        assert isinstance(vectors, Vectors) and isinstance(finished, Finished)
        return [float(score) for score in vectors.vectors], finished.usage

    async def until_idle(self) -> None:
        while await self.client.ask(lambda engine: engine.num_rows):
            await asyncio.sleep(0.01)


@contextmanager
def serving(folder, max_model_len=None, **settings):
    config = EngineConfig(model=str(checkpoint("qwen3")), **({"memory_budget_bytes": 4 << 30} | settings))
    judge = ModelConfig(model=str(folder), task="rerank", max_model_len=max_model_len)
    models = Catalogue((Entry(config=ModelConfig(model=config.model), name="chat"), Entry(config=judge, name="judge")))
    with asyncio.Runner() as runner:
        served = Served(start_engine(config, None, models))
        try:
            yield served, runner
        finally:
            runner.run(served.client.shutdown(0))


@pytest.fixture(scope="module", params=["qwen3", "qwen3_5"])
def folder(request, tmp_path_factory):
    return reranker(tmp_path_factory.mktemp("rerankers") / request.param, request.param)


def reference(folder, query, documents):
    tokenizer = Tokenizer.load(folder)
    yes, no = (tokenizer.token_id(word) for word in ("yes", "no"))
    return [reference_score(folder, reference_ids(folder, query, text), yes, no) for text in documents]


def test_requests_beside_a_chat_get_the_scores_of_the_documented_prompts(folder):
    with serving(folder, max_num_seqs=8) as (served, runner):
        alone, _ = runner.run(served.ask(0, prompt_of(1)))
        (scores, usage), again, other, chat = runner.run(
            gathered(
                served.rerank(*DOCUMENTS),
                served.rerank(*DOCUMENTS[:5], query=QUERIES[1]),
                served.rerank(*DOCUMENTS[5:6]),
                served.ask(0, prompt_of(1)),
            )
        )
        assert chat[0] == alone
        assert scores == pytest.approx(reference(folder, QUERIES[0], DOCUMENTS), abs=1e-4)
        assert again[0] == pytest.approx(reference(folder, QUERIES[1], DOCUMENTS[:5]), abs=1e-4)
        assert other[0] == pytest.approx(scores[5:6], abs=1e-4)
        lengths = [len(reference_ids(folder, QUERIES[0], text)) for text in DOCUMENTS]
        first, second = (reference_ids(folder, QUERIES[0], text) for text in ("x", "1"))
        shared = next(at for at, (one, other) in enumerate(zip(first, second, strict=False)) if one != other)
        assert usage.prompt_tokens == sum(lengths) - (len(lengths) - 1) * shared
        assert usage.completion_tokens == 0
        status = runner.run(served.client.status())
        assert status["outcomes"]["stop"] == 3 and not status["requests"]


async def gathered(*asked):
    return await asyncio.gather(*asked)


def test_one_request_is_one_row_of_the_status_and_leaves_nothing_when_it_is_cancelled(folder):
    with serving(folder, max_num_seqs=4) as (served, runner):

        async def run():
            task = asyncio.create_task(served.rerank(*DOCUMENTS * 100, name="large"))
            while not (rows := (await served.client.status())["requests"]) or rows[0]["phase"] != "prefill":
                await asyncio.sleep(0.001)
            assert [row["request_id"] for row in rows] == ["large"]
            assert served.client.cancel("large")
            with pytest.raises(Cancelled):
                await task
            await served.until_idle()
            left = asyncio.create_task(served.rerank(*DOCUMENTS * 100))
            while not await served.client.ask(lambda engine: engine.num_rows):
                await asyncio.sleep(0.001)
            left.cancel()
            await asyncio.wait([left])
            await served.until_idle()
            scores, _ = await served.rerank(*DOCUMENTS[:3])
            assert not served.client.generations
            return scores, await served.client.ask(lambda engine: len(engine.models[1].scheduler.waiting))

        scores, num_waiting = runner.run(run())
        assert scores == pytest.approx(reference(folder, QUERIES[0], DOCUMENTS[:3]), abs=1e-4)
        assert num_waiting == 0


def test_a_document_that_exceeds_the_context_is_refused_before_anything_runs(folder):
    with serving(folder, max_model_len=300) as (served, runner):
        with pytest.raises(InvalidParameter, match=r"documents\[1\].* at most 300"):
            runner.run(served.rerank("a", "fox " * 400))
        scores, _ = runner.run(served.rerank("a", "fox " * 400, truncate=True))
        assert len(scores) == 2
        served.client.fronts[1].processor.limit_to(200)  # a first load finds less memory
        with pytest.raises(InvalidParameter, match=r"documents\[1\].* at most 200"):
            runner.run(served.rerank("a", "fox " * 200))
