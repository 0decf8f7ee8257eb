"""Every way a checkpoint can be wrong is one line that says what to do."""

import asyncio
import json
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

import mlx.core as mx
import pytest

from tests.support.commands import call
from vllm_mlx.core.config import EngineConfig
from vllm_mlx.core.errors import ConfigError, ModelLoadError
from vllm_mlx.engine.loading import start_engine
from vllm_mlx.runner.checkpoint import find_checkpoint
from vllm_mlx.runner.load_model import load_model


@pytest.fixture
def broken(checkpoint, tmp_path):
    """A copy of a checkpoint to damage."""
    return shutil.copytree(checkpoint("llama"), tmp_path / "model")


def start(model) -> None:
    """Start an engine and end it again."""
    asyncio.run(start_engine(EngineConfig(model=str(model), memory_budget_bytes=1 << 30)).shutdown(0))


def message(model) -> str:
    with pytest.raises(ModelLoadError) as caught:
        start(model)
    text = caught.value.message
    assert "\n" not in text
    assert "Traceback" not in text
    return text


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "~/nowhere", "nowhere"])
def test_a_wrong_path(name):
    assert f"No folder {name}" in message(name)


def test_a_model_that_is_not_here_while_offline():
    assert "could not be downloaded" in message("some-org/some-model")


def test_an_impossible_name():
    assert "valid Hugging Face id" in message("what is/this?!")


def test_a_folder_that_is_no_checkpoint(tmp_path):
    assert "config.json" in message(tmp_path)


def test_a_damaged_config(broken):
    (broken / "config.json").write_text("{")
    assert "not valid JSON" in message(broken)


def test_an_unknown_architecture(broken):
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "model_type": "hal9000"}))
    assert "'hal9000'" in message(broken)


def test_no_weights(broken):
    (broken / "model.safetensors").unlink()
    assert "safetensors" in message(broken)


APPLE_DOUBLE = bytes.fromhex("0005160700020000") + b"Mac OS X".ljust(4088)
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 5242880\n" % (b"4d7a2146" * 8)
AGAIN = "Download this file again."
CONTENTS = {
    "empty": b"",
    "pointer": POINTER,
    "of macOS": APPLE_DOUBLE,
    "zeros": bytes(8192),
    "not UTF-8": b"\xff\xfe\x00" * 50,
    "list": b"[]",
    "number": b"5",
    "nested": b"[" * 200_000,
    "header of all": (1 << 40).to_bytes(8, "little"),
    "header is a list": b"\3\0\0\0\0\0\0\0[1]",
    "header of texts": b'\7\0\0\0\0\0\0\0{"a":1}'[:15],
    "header not UTF-8": b'\7\0\0\0\0\0\0\0{"\xff":1}',
}


def folder_instead(file: Path) -> None:
    file.unlink()
    file.mkdir()


def link_to_nothing(file: Path) -> None:
    file.unlink()
    file.symlink_to("nowhere")


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def unreadable(file: Path) -> None:
    file.chmod(0)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("empty", f"is empty. {AGAIN}"),
        ("pointer", "is a Git LFS pointer, without the content. Download it"),
        ("of macOS", f"is not a safetensors file, or is cut short. {AGAIN}"),
        ("header of all", f"is not a safetensors file, or is cut short. {AGAIN}"),
        ("header is a list", f"has a damaged header. {AGAIN}"),
        ("header not UTF-8", f"has a damaged header. {AGAIN}"),
        (folder_instead, f"is not a file, or a link to a file that is not there. {AGAIN}"),
        (link_to_nothing, f"is not a file, or a link to a file that is not there. {AGAIN}"),
        (cut, f"is cut short. {AGAIN}"),
    ],
)
def test_a_file_that_holds_no_weights_is_named(broken, content, words):
    file = broken / "model.safetensors"
    content(file) if callable(content) else file.write_bytes(CONTENTS[content])
    assert message(broken).startswith(f"{file} {words}")
    if content is cut:  # what a process prints
        served = call("serve", str(broken), "--port", "0")
        assert served.returncode == 1 and served.stderr.splitlines()[-1].startswith(f"vllm-mlx: {file} {words}")
        checked = call("doctor", "--quick", "--json", str(broken), VLLM_MLX_PORT="0")
        assert checked.returncode == 1 and f"{file} {words}" in checked.stdout


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja", "generation_config.json"])
def test_a_pointer_in_place_of_a_small_file_is_named(broken, name):
    (broken / name).write_bytes(POINTER)
    assert message(broken).startswith(f"{broken / name} is a Git LFS pointer")


@pytest.mark.parametrize("name", ["qwen3", "vision:qwen3_5"])
def test_files_of_macos_beside_the_others_do_not_count(checkpoint, tmp_path, name):
    copy = shutil.copytree(checkpoint(name), tmp_path / "model")
    fingerprint = find_checkpoint(str(copy)).fingerprint()
    for file in [*copy.iterdir(), copy / "model.gguf", copy / "pytorch_model.bin"]:
        (copy / f"._{file.name}").write_bytes(APPLE_DOUBLE)
    (copy / ".DS_Store").write_bytes(bytes(8192))
    assert find_checkpoint(str(copy)).fingerprint() == fingerprint
    start(copy)
    assert call("doctor", "--quick", str(copy), VLLM_MLX_PORT="0").returncode == 0


@pytest.mark.full
@pytest.mark.parametrize("name", ["llama", "vision:qwen3_5"])
def test_a_damaged_file_is_never_a_fault_of_the_server(checkpoint, tmp_path, name):
    damages = [*CONTENTS, folder_instead, link_to_nothing, cut, *([unreadable] if os.getuid() else [])]
    for file in sorted(file.name for file in checkpoint(name).iterdir()):
        for number, damage in enumerate(damages):
            copy = shutil.copytree(checkpoint(name), tmp_path / f"{file}-{number}")
            damage(copy / file) if callable(damage) else (copy / file).write_bytes(CONTENTS[damage])
            with suppress(ConfigError):
                start(copy)


@pytest.mark.parametrize("model", ["~nobody-of-this-name/model", "/" + "long/" * 2000])
def test_a_path_that_the_system_refuses(model):
    assert "cannot be read: " in message(model)


def test_weights_of_another_shape(broken):
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "intermediate_size": 96}))
    assert "Cannot load" in message(broken)


def test_no_tokenizer(broken):
    for file in broken.glob("tokenizer*"):
        file.unlink()
    assert "tokenizer" in message(broken)


def test_remote_code_is_not_run_unless_trusted(broken):
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "model_file": "model.py"}))
    (broken / "model.py").write_text("raise SystemExit('ran')")
    assert "trust" in message(broken)


def test_the_context_window_is_read_where_the_architecture_keeps_it(checkpoint):
    assert find_checkpoint(str(checkpoint("llama"))).max_model_len == 65536
    assert find_checkpoint(str(checkpoint("qwen3_5"))).max_model_len == 65536


WHOLE = ("of no file", "of another shard", "a list", "a list of places", "no JSON")


def shards(folder: Path, fault: str) -> None:
    """Cut the weights into two files, with an index that is wrong."""
    tensors = mx.load(str(folder / "model.safetensors"))
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for file, part in zip(files, (names[::2], names[1::2]), strict=True):
        mx.save_safetensors(str(folder / file), {name: tensors[name] for name in part}, metadata={"format": "mlx"})
    places = {name: files[number % 2] for number, name in enumerate(names)}
    if fault in ("of no file", "missing"):
        places = {name: file.replace("00002-of", "00003-of") for name, file in places.items()}
    if fault == "of another shard":
        places = dict.fromkeys(names, files[0])
    if fault == "missing":
        (folder / files[1]).unlink()
    index = [] if fault == "a list" else {"weight_map": [] if fault == "a list of places" else places}
    (folder / "model.safetensors.index.json").write_text("{" if fault == "no JSON" else json.dumps(index))


@pytest.mark.parametrize("fault", WHOLE)
@pytest.mark.parametrize("name", ["llama", "vision:qwen3_5"])
def test_an_index_that_does_not_fit_does_no_harm_to_a_whole_checkpoint(checkpoint, tmp_path, name, fault):
    copy = shutil.copytree(checkpoint(name), tmp_path / "model")
    shards(copy, fault)
    models = [load_model(find_checkpoint(str(path)), trust_remote_code=False) for path in (checkpoint(name), copy)]
    whole, cut = (model.forward(mx.array([[5, 6, 7]]), model.new_caches()) for model in models)
    assert mx.array_equal(whole, cut)


@pytest.mark.parametrize("name", ["llama", "vision:qwen3_5"])
def test_of_a_checkpoint_that_is_not_whole_the_index_and_two_parameters_are_named(checkpoint, tmp_path, name):
    copy = shutil.copytree(checkpoint(name), tmp_path / "model")
    shards(copy, "missing")
    text = message(copy)
    index = "The index model.safetensors.index.json names model-00003-of-00002.safetensors, which is not there. "
    assert re.search(r": Missing \d+ parameters: (\S+\.\S+), (\S+\.\S+) …\. ", text) and index in text
    checked = call("doctor", "--quick", "--json", str(copy), VLLM_MLX_PORT="0")
    assert checked.returncode == 1 and index in checked.stdout


def test_the_parameters_that_do_not_belong_to_a_model_are_named(broken):
    tensors = mx.load(str(broken / "model.safetensors")) | {"strange.weight": mx.zeros(2)}
    mx.save_safetensors(str(broken / "model.safetensors"), tensors)
    assert "Received 1 parameters not in model: strange.weight. Is" in message(broken)


def test_a_key_that_the_config_lacks_is_named(broken):
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "quantization_config": {"bits": 4}}))
    assert "the key 'quant_method' is missing" in message(broken)


def with_config(folder: Path, **values: object) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    return folder


@pytest.mark.parametrize("values", [{"num_hidden_layers": 1_000_000}, {"vision_config": {"depth": 1_000_000}}])
def test_a_model_of_a_million_layers_is_refused_before_any_is_made(broken, values):
    assert "1000000, and a model of at most 2000 layers is served" in message(with_config(broken, **values))


@pytest.mark.parametrize("length", [-1, 0])
def test_a_context_window_below_one_says_nothing(broken, length):
    config = {"max_position_embeddings": length, "max_sequence_length": 77}
    assert find_checkpoint(str(with_config(broken, **config))).max_model_len == 77


@pytest.mark.parametrize("change", ["changed", "gone"])
def test_a_checkpoint_that_is_not_as_before_is_named_without_its_place(broken, change):
    found = find_checkpoint(str(broken))
    identity = found.fingerprint()
    found.check_unchanged(identity)
    if change == "gone":
        shutil.rmtree(broken)
    else:
        with_config(broken, rope_theta=1.0)
    with pytest.raises(ModelLoadError) as caught:
        found.check_unchanged(identity)
    words = {"changed": "changed on disk. Put the earlier files back", "gone": "no longer on disk. Put it back"}
    assert words[change] in caught.value.message and str(broken) not in caught.value.message
