"""What a model's rows cannot do is found at load: share a batch, or resume from a copy of a state that nobody knows."""

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from tests.support.checkpoints import ARCHITECTURES, OWN_ATTENTION, OWN_STATE, PARTLY_ROTARY, checkpoint
from vllm_mlx.cache.node import ResumeRule
from vllm_mlx.runner.checkpoint import find_checkpoint
from vllm_mlx.runner.load_model import load_model
from vllm_mlx.runner.model import TextModel
from vllm_mlx.runner.proofs import prove_rows

WIDTHS: list[int] = []  # what the layers of `Hidden` have seen, which is in no attribute


class Counted(KVCache):
    """It keeps how many tokens came alone, and nothing that is not in its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_alone = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        self.num_alone += keys.shape[2] == 1
        return super().update_and_fetch(keys, values)


class Historic(Counted):
    """What it returns depends on how the tokens were cut into chunks."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        keys, values = super().update_and_fetch(keys, values)
        return keys, values * (1 + self.num_alone)


class Hidden(KVCache):
    """Its copy lacks what it keeps outside."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        WIDTHS[:] = [0] if self.keys is None else [*WIDTHS, self.offset]
        keys, values = super().update_and_fetch(keys, values)
        return keys, values * (1 + len(WIDTHS))


class Foreign(KVCache):
    """It keeps what is no state."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = object()


class Shy(KVCache):
    """A new one is not like one that was used."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        found = super().update_and_fetch(keys, values)
        self.__dict__.pop("offset_before", None)
        return found

    def __init__(self) -> None:
        super().__init__()
        self.offset_before = 0


def proved(name: str, cache: type | None = None) -> TextModel:
    model = load_model(find_checkpoint(str(checkpoint(name))), trust_remote_code=False)
    if cache is not None:
        num_layers = len(model.structure)
        model.module.make_cache = lambda: [cache() for _ in range(num_layers)]
        model = TextModel(model.module)
    assert isinstance(model, TextModel)
    prove_rows(model)
    return model


@pytest.mark.parametrize("name", [*ARCHITECTURES, *PARTLY_ROTARY])
def test_rows_of_known_classes_can_all_of_it(name: str) -> None:
    model = proved(name)
    assert model.can_batch and model.no_shared_forward is None
    assert model.resume_rule is not None and model.no_prefix_cache is None and not model.copied_whole


@pytest.mark.parametrize("name", OWN_ATTENTION)
def test_rows_that_differ_in_a_batch_decode_alone(name: str) -> None:
    """Gemma 2 applies the mask of a batch to its heads."""
    model = proved(name)
    assert not model.can_batch
    assert model.no_shared_forward is not None and "cannot share a batch" in model.no_shared_forward
    assert model.resume_rule == ResumeRule()


@pytest.mark.parametrize(
    ("name", "rule", "copied_whole"),
    [
        ("llama4", ResumeRule(window=24), ()),
        ("afm7", ResumeRule(), ()),
        ("deepseek_v41", ResumeRule(needs_state=True), ("LayerCache",)),
    ],
)
def test_models_that_no_batch_serves_have_a_prefix_cache(
    name: str, rule: ResumeRule, copied_whole: tuple[str, ...]
) -> None:
    model = proved(name)
    assert name in OWN_STATE and not model.can_batch and model.no_prefix_cache is None
    assert (model.resume_rule, model.copied_whole) == (rule, copied_whole)


def test_an_unknown_class_that_keeps_all_in_its_attributes_is_copied_whole() -> None:
    model = proved("qwen3", Counted)
    assert model.resume_rule == ResumeRule(needs_state=True) and model.copied_whole == ("Counted",)
    assert not model.can_batch


@pytest.mark.parametrize(
    ("cache", "fault"),
    [(Historic, "differs"), (Hidden, "differs"), (Shy, "cannot be used"), (Foreign, r"Foreign\.lock")],
)
def test_an_unknown_class_that_cannot_be_copied_costs_the_cache_and_says_why(cache: type, fault: str) -> None:
    model = proved("qwen3", cache)
    assert model.resume_rule is None and model.window is None
    assert model.no_prefix_cache is not None and fault.replace("\\", "") in model.no_prefix_cache
