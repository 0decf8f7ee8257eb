"""State that outlives the process: a second engine on the same folder resumes what the first one computed."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.checkpoints import ARCHITECTURES, checkpoint
from tests.support.rows import cases
from tests.support.running import eventually
from vllm_mlx.core.request import SamplingParams
from vllm_mlx.disk.folder import look
from vllm_mlx.engine.monitoring.schema import DiskStatus
from vllm_mlx.llm import LLM

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)
FIRST = [7 + (5 * place * place + 3 * place) % 180 for place in range(700)]
LONGER = [*FIRST, 11, 12, 13, 14]
FORKED = [*FIRST[:500], *range(20, 80)]
SAME = FIRST


@contextmanager
def opened(architecture: str, folder: Path | None, **settings: object) -> Iterator[LLM]:
    disk = {"cache_disk_bytes": 0} if folder is None else {"cache_dir": str(folder), "cache_disk_bytes": 1 << 30}
    with LLM(str(checkpoint(architecture)), max_model_len=2048, **disk, **settings) as llm:
        yield llm


def tokens_of(llm: LLM, prompt: Sequence[int]) -> list[int]:
    [output] = llm.generate([list(prompt)], GREEDY)
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None
    return [entry.token_id for entry in logprobs]


def disk_of(llm: LLM) -> DiskStatus:
    status = asyncio.run_coroutine_threadsafe(llm._engine.status(), llm._loop).result()
    disk = status["cache"]["disk"]
    assert disk is not None
    return disk


@pytest.mark.parametrize("architecture", cases(ARCHITECTURES, ["gpt_oss", "qwen3_5"]))
def test_a_second_process_computes_the_same_from_what_the_first_one_left(architecture: str, tmp_path: Path) -> None:
    prompts = {"same": SAME, "longer": LONGER, "forked": FORKED}
    with opened(architecture, None, prefix_cache=False) as llm:
        expected = {name: tokens_of(llm, prompt) for name, prompt in prompts.items()}
    with opened(architecture, tmp_path) as llm:
        assert tokens_of(llm, FIRST) == expected["same"]
    for name, prompt in prompts.items():
        with opened(architecture, tmp_path) as llm:
            assert tokens_of(llm, prompt) == expected[name], name
            disk = disk_of(llm)
        assert disk["off_reason"] is None
        assert disk["hits"] == 1 or (name == "forked" and disk["hits"] == 0), (name, disk)
        if name != "forked":
            assert disk["tokens_read"] >= 600


@pytest.mark.parametrize("architecture", cases(["qwen3", "qwen3_5"], ["qwen3_5"]))
def test_files_count_as_used_when_memory_serves_their_tokens(architecture: str, tmp_path: Path) -> None:
    with opened(architecture, tmp_path) as llm:
        tokens_of(llm, FIRST)
        eventually(lambda: disk_of(llm)["num_records"] > 0 and disk_of(llm)["num_waiting_bytes"] == 0)
        noted = {record.name: record.used_s for record in look(tmp_path).records}
        tokens_of(llm, LONGER)
        assert disk_of(llm)["hits"] == 0, "memory had it"
        eventually(lambda: any(record.used_s > noted.get(record.name, 1e12) for record in look(tmp_path).records))
