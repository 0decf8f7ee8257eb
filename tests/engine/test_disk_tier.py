"""State that outlives the process: a second engine on the same folder resumes what the first one computed."""

from pathlib import Path

import pytest

from tests.support.checkpoints import ARCHITECTURES, checkpoint
from tests.support.checkpoints import NUM_TOKENS as NUM_TEXTS  # the other ids have no text
from tests.support.engine_driver import plain_loop
from tests.support.rows import cases
from tests.support.running import eventually
from vllm_mlx.core.request import SamplingParams
from vllm_mlx.disk.folder import look
from vllm_mlx.llm import LLM

from .test_disk_any_load import NUM_TOKENS, started

# Special tokens have a text, too, and so log probabilities.
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0, skip_special_tokens=False)
FIRST = [7 + (5 * place * place + 3 * place) % 180 for place in range(700)]
LONGER = [*FIRST, 11, 12, 13, 14]
FORKED = [*FIRST[:500], *range(20, 80)]


def with_text(tokens: list[int]) -> list[int]:
    """A token without a text has no log probability of its own where no text follows it."""
    return [token for token in tokens if token < NUM_TEXTS]


def asked(architecture: str, folder: Path, *prompts: list[int]) -> list[tuple[list[int], int]]:
    """Ask a process of its own. Returns each reply, and how many tokens of its prompt were cached."""
    settings = {"max_model_len": 2048, "cache_dir": str(folder), "cache_disk_bytes": 1 << 30}
    with LLM(str(checkpoint(architecture)), **settings) as llm:
        choices = [llm.generate([prompt], GREEDY)[0].outputs[0] for prompt in prompts]
    found = []
    for choice in choices:
        assert choice.logprobs is not None and choice.usage is not None
        found.append(([entry.token_id for entry in choice.logprobs], choice.usage.cached_tokens))
    return found


@pytest.mark.parametrize("architecture", cases(ARCHITECTURES, ["qwen3_5"]))
def test_a_second_process_computes_the_same_from_what_the_first_one_left(architecture: str, tmp_path: Path) -> None:
    path = checkpoint(architecture)
    assert asked(architecture, tmp_path, FIRST) == [(plain_loop(path, tuple(FIRST), NUM_TOKENS)[0], 0)]
    replies = asked(architecture, tmp_path, FORKED, LONGER)
    for prompt, (reply, num_cached) in zip((FORKED, LONGER), replies, strict=True):
        assert with_text(reply) == with_text(list(plain_loop(path, tuple(prompt), NUM_TOKENS)[0]))
        assert num_cached >= 600 or prompt is FORKED


@pytest.mark.parametrize("architecture", cases(["qwen3", "qwen3_5"], ["qwen3_5"]))
def test_files_count_as_used_when_memory_serves_their_tokens(architecture: str, tmp_path: Path) -> None:
    with started(checkpoint(architecture), tmp_path) as server:
        server.generate(tuple(FIRST))
        server.disk.write_all(lambda: 30.0)
        noted = {record.name: record.used_s for record in look(tmp_path).records}
        server.generate(tuple(LONGER))
        assert noted and server.disk.report().hits == 0, "memory had it"
        eventually(lambda: any(record.used_s > noted.get(record.name, 1e12) for record in look(tmp_path).records))
