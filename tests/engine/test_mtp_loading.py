"""Where an MTP head is found, what it changes at load, and what happens where it cannot be used."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_vlm.speculative import drafters

from tests.support.checkpoints import checkpoint
from tests.support.engine_driver import Driver, RandomPrompts
from tests.support.mtp_heads import head_tensors, shifted, write_split
from tests.support.rows import cases
from vllm_mlx.core.config import EngineConfig
from vllm_mlx.core.errors import ConfigError
from vllm_mlx.engine.loading import fingerprint
from vllm_mlx.engine.sizing import begin_drafting
from vllm_mlx.runner.checkpoint import find_checkpoint
from vllm_mlx.runner.model import Model, TextModel, weights_bytes

FAMILY = "vision:qwen3_5"
PROMPT = RandomPrompts(3)(30)


def load(path: Path, **settings: Any) -> Model:
    return begin_drafting(EngineConfig(model=str(path), **settings), find_checkpoint(str(path))).complete()


def name_of(path: Path, **settings: Any) -> str:
    return fingerprint(find_checkpoint(str(path)), load(path, **settings))


def counts(path: Path, **settings: Any) -> tuple[list[int], int, int]:
    """A reply, and how many drafts of the head there were, and how many of them were right."""
    driver = Driver(path, num_draft_tokens=3, **settings)
    [reply] = driver.generate([PROMPT], max_tokens=25)
    speculation = driver.engine.scheduler.speculation
    return reply, speculation.num_drafted["mtp"], speculation.num_accepted["mtp"]


@pytest.fixture
def parted(tmp_path: Path) -> tuple[Path, dict[str, mx.array]]:
    """A copy of a checkpoint without its head, and the head."""
    path = tmp_path / "parted"
    shutil.copytree(checkpoint(FAMILY, mtp=True), path)
    tensors = mx.load(str(path / "model.safetensors"))
    mx.eval(tensors)
    head = {name: tensor for name, tensor in tensors.items() if name.startswith("mtp.")}
    rest = {name: tensor for name, tensor in tensors.items() if name not in head}
    mx.save_safetensors(str(path / "model.safetensors"), rest, metadata={"format": "mlx"})
    return path, head


def test_a_head_is_found_in_every_place_and_form(parted: tuple[Path, dict[str, mx.array]], tmp_path: Path) -> None:
    path, head = parted
    expected = counts(checkpoint(FAMILY, mtp=True))
    assert expected[2] > 5
    config = json.loads((path / "config.json").read_text())
    split = write_split(tmp_path / "split", config, head)
    assert counts(path, draft_model=str(split)) == expected
    assert counts(path, draft_model=str(checkpoint(FAMILY, mtp=True))) == expected
    mx.save_safetensors(str(path / "mtp.safetensors"), shifted(head))  # as in originals: norms less one
    assert counts(path) == expected


@pytest.mark.parametrize("architecture", cases(["qwen3_5", FAMILY], ["qwen3_5"]))
def test_a_text_model_has_a_head_too(architecture: str) -> None:
    path, text_only = checkpoint(architecture, mtp=True), architecture == FAMILY
    reply, drafted, accepted = counts(path, text_only=text_only)
    assert 0 < accepted < drafted
    assert [reply] == Driver(path, num_draft_tokens=0, text_only=text_only).generate([PROMPT], max_tokens=25)
    assert load(path, text_only=text_only).module.vision_tower is None
    assert isinstance(load(path, text_only=True, num_draft_tokens=0), TextModel)


def test_without_drafts_no_head_is_loaded() -> None:
    path = checkpoint(FAMILY, mtp=True)
    tensors = mx.load(str(path / "model.safetensors"))
    head_bytes = sum(tensor.nbytes for name, tensor in tensors.items() if name.startswith("mtp."))
    without = weights_bytes(load(path, num_draft_tokens=0).weights)
    assert weights_bytes(load(path, repeatable=True).weights) == without
    assert weights_bytes(load(path).weights) == without + head_bytes + 4 * 8, "and the frequencies of its positions"
    facts = {number: Driver(path, num_draft_tokens=number).engine.default.facts for number in (0, 1)}
    assert facts[1].memory.weights_bytes - facts[0].memory.weights_bytes == head_bytes + 4 * 8
    assert facts[1].footprint.bytes_per_token > facts[0].footprint.bytes_per_token


def test_another_head_is_another_fingerprint(parted: tuple[Path, dict[str, mx.array]], tmp_path: Path) -> None:
    path, head = parted
    config = json.loads((path / "config.json").read_text())
    names = {name_of(path, num_draft_tokens=0)}
    assert name_of(path) in names
    for number in range(2):
        other = {name: tensor + number for name, tensor in head.items()}
        names.add(name_of(path, draft_model=str(write_split(tmp_path / f"split{number}", config, other))))
        mx.save_safetensors(str(path / "mtp.safetensors"), {**other, "mtp.unused": mx.zeros(number + 1)})
        names.add(name_of(path, num_draft_tokens=0))
        (path / "mtp.safetensors").unlink()
    assert len(names) == 5
    assert name_of(checkpoint(FAMILY, mtp=True)) != name_of(checkpoint(FAMILY, mtp=True), num_draft_tokens=0)


def test_a_config_that_names_a_head_without_tensors_is_served_and_says_so(
    parted: tuple[Path, dict[str, mx.array]],
) -> None:
    path, _ = parted
    config = json.loads((path / "config.json").read_text())
    config["text_config"]["mtp_num_hidden_layers"] = 1
    (path / "config.json").write_text(json.dumps(config))
    facts = Driver(path).engine.default.facts
    assert facts.no_drafts is None and facts.no_head is not None
    assert facts.no_head.endswith("holds no mtp.* tensors. Use a conversion that keeps them.")


def renamed(patch: pytest.MonkeyPatch) -> None:
    patch.delattr(drafters, "load_drafter")


def changed(change: Callable[[Any], None]) -> Callable[[pytest.MonkeyPatch], None]:
    """Heads that the library loads in another form."""

    def patch_heads(patch: pytest.MonkeyPatch) -> None:
        load_drafter = drafters.load_drafter

        def load_changed(*arguments: Any, **options: Any) -> Any:
            head, kind = load_drafter(*arguments, **options)
            change(head)
            return head, kind

        patch.setattr(drafters, "load_drafter", load_changed)

    return patch_heads


def without_a_layer(head: Any) -> None:
    del head.pre_fc_norm_hidden


def with_another_call(head: Any) -> None:
    head.norm = lambda x, scale: x


@pytest.mark.parametrize(
    "change",
    [renamed, *(pytest.param(changed(how), marks=pytest.mark.full) for how in (without_a_layer, with_another_call))],
)
def test_a_changed_library_gives_plain_decoding_with_a_reason(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoint(FAMILY, mtp=True)
    expected = Driver(path, num_draft_tokens=0).generate([PROMPT], max_tokens=8)
    change(monkeypatch)
    model = load(path)
    assert model.no_head is not None and model.num_head_layers == 0
    with pytest.raises(ConfigError, match=r"--draft-model .* cannot be used: "):
        load(path, draft_model=str(path))
    driver = Driver(checkpoint(FAMILY, mtp=True, seed=1))
    assert driver.engine.default.facts.no_head is not None
    assert expected == Driver(path, num_draft_tokens=0).generate([PROMPT], max_tokens=8)


def test_a_head_that_does_not_fit_is_refused_by_what_is_wrong(tmp_path: Path) -> None:
    path = checkpoint(FAMILY, mtp=True)
    config = json.loads((path / "config.json").read_text())
    config["text_config"]["hidden_size"] = 32
    wide = write_split(tmp_path / "wide", config, head_tensors(config["text_config"], 1))
    with pytest.raises(ConfigError, match=r"holds no head of a model that is 64 wide. Use one of this very model"):
        load(path, draft_model=str(wide))
    with pytest.raises(ConfigError, match="only heads of qwen3_5 and qwen3_5_moe draft, and not of qwen3"):
        load(checkpoint("qwen3"), draft_model=str(path))
    with pytest.raises(ConfigError, match=r"holds no mtp.\* tensors"):
        load(path, draft_model=str(checkpoint("qwen3")))
    with pytest.raises(ConfigError, match=r"--draft-model .* cannot be used: .* is not a checkpoint"):
        load(path, draft_model=str(tmp_path))
