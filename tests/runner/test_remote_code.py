"""Python code of a checkpoint does not run unless it is trusted; a checkpoint that loads without it is served."""

import json
import re
import shutil
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import transformers
from transformers import dynamic_module_utils
from transformers.models.auto import tokenization_auto

from vllm_mlx import LLM, SamplingParams
from vllm_mlx.core.errors import ModelLoadError
from vllm_mlx.formats.remote_code import RemoteCodeRefused, remote_code
from vllm_mlx.formats.tokenizer import Tokenizer
from vllm_mlx.media.renderers import load_library_processor
from vllm_mlx.runner.checkpoint import find_checkpoint
from vllm_mlx.runner.load_model import load_model

EVIL = """
import pathlib
pathlib.Path({trace!r}).touch()
from transformers import PretrainedConfig, PreTrainedTokenizerFast
class Evil(PreTrainedTokenizerFast): pass
class EvilConfig(PretrainedConfig): pass
"""
TOKENIZER = {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
CONFIG = {"auto_map": {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilModel"}}


@pytest.fixture
def trace(tmp_path) -> Path:
    """Exists once `evil.py` has run."""
    return tmp_path / "trace"


@pytest.fixture
def folder(checkpoint, tmp_path, trace) -> Path:
    """A copy of a text checkpoint, with a file `evil.py` that nothing names yet."""
    folder = shutil.copytree(checkpoint("qwen3"), tmp_path / "checkpoint")
    (folder / "evil.py").write_text(EVIL.format(trace=str(trace)))
    return folder


@pytest.fixture
def own_cache(tmp_path, monkeypatch) -> None:
    """transformers copies trusted code into a folder of this test."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))


def refusing(folder: Path) -> AbstractContextManager[None]:
    return remote_code(folder, "tokenizer", trusted=False, failed=lambda error: ModelLoadError(str(error)))


def change(file: Path, values: dict, *, without: str = "") -> None:
    known = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({name: value for name, value in (known | values).items() if name != without}))


def is_refused(raised: pytest.ExceptionInfo, folder: Path, part: str) -> bool:
    start = f"{folder} brings its own Python code (evil.py), and its {part} cannot be loaded without it"
    message = raised.value.message
    return message.startswith(start) and message.endswith("--trust-remote-code.") and "\n" not in message


def test_a_processor_that_asks_for_remote_code_by_itself_does_not_get_it(folder, trace, caplog):
    change(folder / "tokenizer_config.json", TOKENIZER)
    change(folder / "config.json", {"model_type": "inkling"})  # mlx-vlm's processor passes trust_remote_code=True
    load_library_processor(folder, {"model_type": "inkling"}, trust_remote_code=False)
    assert not trace.exists()
    assert "without its own Python code (evil.py), which only --trust-remote-code lets run" in caplog.text


def test_a_processor_that_needs_remote_code_is_refused(folder, trace):
    change(folder / "tokenizer_config.json", TOKENIZER | {"tokenizer_class": "EvilTokenizer"})
    change(folder / "config.json", {"model_type": "inkling"})
    with pytest.raises(RemoteCodeRefused) as raised:
        load_library_processor(folder, {"model_type": "inkling"}, trust_remote_code=False)
    assert is_refused(raised, folder, "processor")
    assert not trace.exists()


def test_a_tokenizer_that_needs_remote_code_is_refused(folder, trace):
    change(folder / "tokenizer_config.json", TOKENIZER | {"tokenizer_class": "EvilTokenizer"})
    change(folder / "config.json", {"model_type": "unheard_of"})
    with pytest.raises(RemoteCodeRefused) as raised:
        Tokenizer.load(folder)
    assert is_refused(raised, folder, "tokenizer")
    assert not trace.exists()


def test_a_tokenizer_that_is_trusted_runs_its_code(folder, trace, own_cache):
    change(folder / "tokenizer_config.json", TOKENIZER | {"tokenizer_class": "EvilTokenizer"})
    assert Tokenizer.load(folder, trust_remote_code=True).encode("hello", add_special_tokens=False)
    assert trace.exists()


def test_remote_code_beside_a_class_that_the_libraries_know_is_left_alone(checkpoint, folder, trace):
    change(folder / "tokenizer_config.json", TOKENIZER | {"tokenizer_class": "Qwen2Tokenizer"})
    change(folder / "config.json", CONFIG)
    plain = Tokenizer.load(checkpoint("qwen3"))
    assert Tokenizer.load(folder).encode("hello world", add_special_tokens=True) == plain.encode(
        "hello world", add_special_tokens=True
    )
    assert load_model(find_checkpoint(str(folder)), trust_remote_code=False).vocab_size
    assert not trace.exists()


def test_a_checkpoint_whose_parts_load_without_its_code_is_served(folder, trace):
    change(folder / "config.json", CONFIG)
    with LLM(str(folder), memory_budget_bytes=1 << 30) as llm:
        [reply] = llm.generate(["hello"], SamplingParams(temperature=0, max_tokens=2))
    assert reply.outputs[0].finish_reason == "length"
    assert not trace.exists()


def test_a_vision_checkpoint_whose_processor_the_library_knows_is_served(checkpoint, tmp_path, folder, trace):
    vision = shutil.copytree(checkpoint("vision:qwen3_vl"), tmp_path / "vision")
    shutil.copy(folder / "evil.py", vision)
    for name in ("preprocessor_config.json", "processor_config.json"):
        change(vision / name, {"auto_map": {"AutoImageProcessor": "evil.Evil", "AutoProcessor": "evil.Evil"}})
    change(vision / "config.json", CONFIG)
    with LLM(str(vision), memory_budget_bytes=1 << 30) as llm:
        assert llm.generate(["hello"], SamplingParams(temperature=0, max_tokens=1))
    assert not trace.exists()


def test_another_failure_keeps_its_own_words(folder):
    (folder / "tokenizer.json").write_text("{broken")
    with pytest.raises(ModelLoadError, match="cannot be loaded") as raised:
        Tokenizer.load(folder)
    assert "--trust-remote-code" not in raised.value.message


def test_transformers_is_as_before_after_a_load_that_failed(folder, trace, own_cache):
    change(folder / "tokenizer_config.json", TOKENIZER | {"tokenizer_class": "EvilTokenizer"})
    change(folder / "config.json", {"model_type": "unheard_of"})
    before = dict(vars(dynamic_module_utils))
    with pytest.raises(RemoteCodeRefused):
        Tokenizer.load(folder)
    assert dict(vars(dynamic_module_utils)) == before
    assert transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)


# What vllm_mlx.formats.remote_code relies on in transformers. Where one of these fails, transformers has changed how
# it runs a checkpoint's code, and that file must follow.


def test_contract_a_class_is_fetched_and_run_by_the_names_that_are_replaced(folder, trace):
    get_class = tokenization_auto.get_class_from_dynamic_module  # a module that took the name at its import
    with pytest.raises(RemoteCodeRefused) as raised, refusing(folder):
        get_class("evil.Evil", folder)
    assert is_refused(raised, folder, "tokenizer")
    assert not trace.exists()


def test_contract_only_the_generation_of_torch_models_takes_these_names_at_import():
    package = Path(transformers.__file__).parent
    names = re.compile(r"\b(?:get_cached_module_file|get_class_in_module)\b")
    files = [*package.glob("*.py"), *package.glob("utils/*.py"), *package.glob("generation/*.py"),
             *package.glob("models/auto/*.py"), *package.glob("pipelines/*.py")]  # fmt: skip
    users = {str(file.relative_to(package)) for file in files if names.search(file.read_text(encoding="utf-8"))}
    assert users == {"dynamic_module_utils.py", "generation/utils.py"}


def test_contract_a_caller_that_does_not_say_whether_it_trusts_asks_nobody(folder, monkeypatch):
    change(folder / "tokenizer_config.json", TOKENIZER | {"tokenizer_class": "EvilTokenizer"})
    change(folder / "config.json", {"model_type": "unheard_of"})
    monkeypatch.setattr("builtins.input", lambda question: pytest.fail(f"asked: {question}"))
    with pytest.raises(RemoteCodeRefused), refusing(folder):
        transformers.AutoTokenizer.from_pretrained(folder)
