"""Who decides what a request left out."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.rows import row
from vllm_mlx.core.config import SamplingDefaults
from vllm_mlx.core.errors import InvalidParameter
from vllm_mlx.core.request import ResolvedSampling, SamplingParams, TokenSampling, checkpoint_defaults, resolve_sampling
from vllm_mlx.formats.tokenizer import read_json


def resolve(params: SamplingParams = SamplingParams(), **options: Any) -> ResolvedSampling:  # noqa: B008
    return resolve_sampling(
        params, **{"num_prompt_tokens": 10, "max_model_len": 100, "vocab_size": 50, "eos_token_ids": [2], **options}
    )


def test_last_resort() -> None:
    tokens = resolve().tokens
    assert (tokens.temperature, tokens.top_p, tokens.top_k, tokens.min_p, tokens.repetition_penalty) == (1, 1, 0, 0, 1)
    assert tokens.num_top_logprobs is None


@row("S4-37")
def test_request_then_flag_then_checkpoint() -> None:
    checkpoint = SamplingDefaults(temperature=0.1, top_p=0.2, top_k=3, min_p=0.4, repetition_penalty=1.5)
    defaults = SamplingDefaults(temperature=0.0, top_p=0.6)
    tokens = resolve(SamplingParams(top_p=0.7, top_k=0), defaults=defaults, checkpoint=checkpoint).tokens
    assert (tokens.temperature, tokens.top_p, tokens.top_k) == (0, 0.7, 0)
    assert (tokens.min_p, tokens.repetition_penalty) == (0.4, 1.5)


def test_what_only_requests_have_is_passed_on() -> None:
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=-0.5, logit_bias={7: 1.0}, seed=11, logprobs=3)
    assert resolve(params).tokens == TokenSampling(
        presence_penalty=0.5, frequency_penalty=-0.5, logit_bias={7: 1.0}, seed=11, num_top_logprobs=3
    )


def test_seed_is_drawn_where_none_is_given() -> None:
    assert len({resolve().tokens.seed for _ in range(20)}) == 20
    assert resolve(SamplingParams(seed=-1)).tokens.seed == 2**64 - 1


@pytest.mark.parametrize(
    ("asked", "default", "expected", "clamped"),
    [
        (None, None, 90, None),
        (5, None, 5, None),
        (90, 7, 90, None),
        (32000, None, 90, 90),
        (None, 7, 7, None),
        (None, 999, 90, None),
    ],
)
def test_max_tokens_fits_the_context_window(asked, default, expected, clamped) -> None:
    resolved = resolve(SamplingParams(max_tokens=asked), defaults=SamplingDefaults(max_tokens=default))
    assert (resolved.max_tokens, resolved.clamped_max_tokens) == (expected, clamped)


def test_min_tokens_never_exceeds_max_tokens() -> None:
    assert resolve(SamplingParams(min_tokens=95)).min_tokens == 90


def test_stop_token_ids() -> None:
    assert resolve(SamplingParams(stop_token_ids=(5, 6))).stop_token_ids == {2, 5, 6}
    assert resolve(SamplingParams(stop_token_ids=(5,), ignore_eos=True)).stop_token_ids == {5}


@pytest.mark.parametrize("token_id", [-1, 50])
def test_logit_bias_outside_the_vocabulary_is_refused(token_id: int) -> None:
    with pytest.raises(InvalidParameter, match="0 to 49") as raised:
        resolve(SamplingParams(logit_bias={token_id: 1}))
    assert raised.value.param == "logit_bias"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, SamplingDefaults()),
        ({"eos_token_id": 1}, SamplingDefaults()),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0, "repetition_penalty": 1.05},
            SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20, min_p=0, repetition_penalty=1.05),
        ),
        ({"do_sample": False}, SamplingDefaults(temperature=0)),
        ({"do_sample": False, "temperature": 0.7}, SamplingDefaults(temperature=0.7)),
        ({"top_k": -1, "top_p": 0, "temperature": None, "min_p": "x"}, SamplingDefaults(top_k=0)),
    ],
)
def test_defaults_of_a_checkpoint(tmp_path: Path, config: dict[str, Any] | None, expected: SamplingDefaults) -> None:
    if config is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert checkpoint_defaults(read_json(tmp_path / "generation_config.json")) == expected
