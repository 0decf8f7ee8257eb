"""Settings that cannot work are refused before a checkpoint is downloaded, or before its weights are read."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_mlx.core.config import EngineConfig, MediaConfig
from vllm_mlx.core.errors import ConfigError
from vllm_mlx.engine.loading import start_engine

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"reasoning_parser": "nonsense"}, "--reasoning-parser nonsense is not known. Choose auto, none or one of"),
    ({"tool_call_parser": "nonsense"}, "--tool-call-parser nonsense is not known"),
    ({"media": MediaConfig(media_root="/nowhere")}, "--media-root /nowhere is not a folder"),
    ({"memory_budget_bytes": 1 << 60}, "--memory-budget 1152921504.6 GB is more than this machine has"),
]


@pytest.fixture
def unreadable(checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    """A checkpoint whose weights have a type that no library knows: reading them is an error."""
    folder = Path(shutil.copytree(checkpoint("qwen3"), tmp_path / "model"))
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content.replace(b'"F32"', b'"F31"'))
    return folder


def refusal(**settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        start_engine(EngineConfig(**settings))
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize(("settings", "words"), WRONG)
def test_what_no_checkpoint_could_mend_is_refused_before_one_is_downloaded(
    settings: dict[str, Any], words: str
) -> None:
    assert "could not be downloaded" in refusal(model="some-org/some-model")
    assert words in refusal(model="some-org/some-model", **settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"chat_template": "a\n{% if %}"}, "--chat-template is not a Jinja template: line 2: Expected an expression"),
        ({"chat_template": " \n"}, "--chat-template is not a Jinja template: it writes no messages"),
        ({"chat_template": "{{ messages | nothing }}"}, "No filter named 'nothing'"),
        ({"max_model_len": 99_999_999}, "--max-model-len 99999999 exceeds the checkpoint's context of 65536 tokens"),
        ({"revision": "main"}, "--revision is for models on Hugging Face"),
    ],
)
def test_what_does_not_fit_a_checkpoint_is_refused_before_its_weights_are_read(
    unreadable: Path, settings: dict[str, Any], words: str
) -> None:
    assert "Cannot load" in refusal(model=str(unreadable))
    assert words in refusal(model=str(unreadable), **settings)


@pytest.mark.parametrize("template", ["{{ raise_exception('no system prompt') }}", "{{ messages[7].content.x }}"])
def test_a_template_that_refuses_the_messages_of_the_check_is_no_fault(unreadable: Path, template: str) -> None:
    assert "Cannot load" in refusal(model=str(unreadable), chat_template=template)
