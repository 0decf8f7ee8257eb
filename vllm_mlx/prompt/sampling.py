"""Fills in sampling settings that a request left out: from the server's flags, the checkpoint, then 1.0 / 1.0 / 0."""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..core.config import SamplingDefaults
from ..core.errors import InvalidParameter
from ..core.request import SamplingParams
from ..core.sequence import TokenSampling
from ..tokens.tokenizer import read_json

_LAST_RESORT = SamplingDefaults(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0)
_SEED_BITS = 63


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedSampling:
    tokens: TokenSampling
    max_tokens: int
    clamped_max_tokens: int | None  # set if the context window is too small for what the client asked for
    min_tokens: int
    stop_token_ids: frozenset[int]


def checkpoint_defaults(path: Path) -> SamplingDefaults:
    """Read generation_config.json. It is greedy if `do_sample` is false and no temperature is given.

    Other values count even if `do_sample` is false. Raises ModelLoadError for a broken file.
    """
    config = read_json(path / "generation_config.json")
    greedy = config.get("do_sample") is False and config.get("temperature") is None
    return SamplingDefaults(
        temperature=0.0 if greedy else _number(config.get("temperature"), 0, 2),
        top_p=_number(config.get("top_p"), 1e-9, 1),
        top_k=_count(config.get("top_k")),
        min_p=_number(config.get("min_p"), 0, 1),
        repetition_penalty=_number(config.get("repetition_penalty"), 1e-9, float("inf")),
    )


def resolve_sampling(
    params: SamplingParams,
    *,
    num_prompt_tokens: int,
    max_model_len: int,
    vocab_size: int,
    eos_token_ids: Iterable[int] = (),
    defaults: SamplingDefaults = SamplingDefaults(),  # noqa: B008 - frozen
    checkpoint: SamplingDefaults = SamplingDefaults(),  # noqa: B008 - frozen
) -> ResolvedSampling:
    """Resolve every setting. The prompt must fit the context window.

    Raises InvalidParameter for a `logit_bias` outside the vocabulary.
    """
    for token_id in params.logit_bias:
        if not 0 <= token_id < vocab_size:
            raise InvalidParameter(
                f"`logit_bias` names the token id {token_id}; this model's ids are 0 to {vocab_size - 1}.",
                param="logit_bias",
            )
    room = max_model_len - num_prompt_tokens
    assert room > 0
    asked = params.max_tokens if params.max_tokens is not None else defaults.max_tokens
    max_tokens = room if asked is None else min(asked, room)
    is_clamped = params.max_tokens is not None and params.max_tokens > room
    seed = secrets.randbits(_SEED_BITS) if params.seed is None else params.seed
    return ResolvedSampling(
        tokens=TokenSampling(
            **_filled_in(params, defaults, checkpoint, _LAST_RESORT),
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            logit_bias=dict(params.logit_bias),
            seed=seed % 2**64,
            num_top_logprobs=params.logprobs,
        ),
        max_tokens=max_tokens,
        clamped_max_tokens=max_tokens if is_clamped else None,
        min_tokens=min(params.min_tokens, max_tokens),
        stop_token_ids=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else set(eos_token_ids)),
    )


def _filled_in(*sources: SamplingParams | SamplingDefaults) -> dict[str, Any]:
    """Each setting from the first source that gives it."""
    names = [field.name for field in fields(SamplingDefaults) if field.name != "max_tokens"]
    return {name: next(value for source in sources if (value := getattr(source, name)) is not None) for name in names}


def _number(value: Any, low: float, high: float) -> float | None:
    """A checkpoint's value; None if a client could not ask for it."""
    return float(value) if isinstance(value, int | float) and low <= value <= high else None


def _count(value: Any) -> int | None:
    return max(0, value) if isinstance(value, int) else None
