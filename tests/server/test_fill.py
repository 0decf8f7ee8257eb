"""Fill-in over a real socket: what editors send, what is computed while somebody types, and what a client leaves."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from tests.support.rows import cases
from tests.support.running import Running, eventually, post_bytes
from vllm_mlx.cli.remote import events_of

from .watched import engine_served

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")
CODESTRAL = ("[PREFIX]", "[SUFFIX]")
SUFFIX = "\n\ndef last(fox):\n    return fox\n" * 4
TYPED = "    return fox + 1\n\n\ndef dog(a, b):\n    x = a\n    \n"  # 51 characters, with blank lines
# As Continue 1.x sends them for a name with "qwen" and "coder", and for its other models; as Zed does.
CONTINUE = ["<|endoftext|>", *QWEN, "<|im_start|>", "<|im_end|>", "/src/", "#- coding: utf-8", "```", "\n\n",
            "\r\n\r\n", "</COMPLETION>"]  # fmt: skip
OLDER = [*CONTINUE, "t.", "\nclass", "\nfunction", "\nmodule", "\nexport ", "\nimport ", "\nvar ", "\nlet ", "//"]
ZED = ["<|endoftext|>", *QWEN, "<|im_start|>", "<|im_end|>", "<|cursor|>", "<|marker_1|>", "<|marker_2|>", "<<<<<<< ",
       "\n\n\n"]  # fmt: skip


@dataclass
class Editor:
    """A client of a small model whose tokenizer has the tokens of a family."""

    server: Running

    @cached_property
    def http(self) -> Any:
        return self.server.http()

    def post(self, prompt: Any, suffix: str | None = None, **fields: Any) -> dict[str, Any]:
        body = {"prompt": prompt, "suffix": suffix, "max_tokens": 5, "temperature": 0, **fields}
        found: dict[str, Any] = self.http.post("/v1/completions", json=body).json()
        return found

    def num_computed(self, found: dict[str, Any]) -> int:
        usage = found["usage"]
        return int(usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"])

    def num_tokens(self, text: str) -> int:
        return len(self.server.engine.processor.tokenizer.encode(text, add_special_tokens=False))


def with_tokens(folder: Path, source: Path, tokens: tuple[str, ...]) -> Path:
    shutil.copytree(source, folder)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in tokens])
    backend.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def editor_of(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with ExitStack() as stack:

        @cache
        def make(architecture: str, tokens: tuple[str, ...], **settings: Any) -> Editor:
            folder = with_tokens(tmp_path_factory.mktemp("fill") / "model", checkpoint(architecture), tokens)
            served = engine_served(folder, **{"max_model_len": 10_000, **settings})
            return Editor(stack.enter_context(served))

        yield make


@pytest.fixture(scope="module")
def editor(editor_of: Any) -> Editor:
    made: Editor = editor_of("qwen3", QWEN)
    return made


def type_into(editor: Editor, num_lines: int, num_chars: int, suffix_bound: int, ask: Callable[..., Any]) -> None:
    """Each reply is the one without any cache, and computes few tokens."""
    file = "".join(f"def fox{number}(a):\n    return {number}\n\n" for number in range(num_lines))
    for at in range(num_chars):
        prefix = file + TYPED[:at]
        found = ask(prefix, SUFFIX)
        assert found["usage"]["prompt_tokens"] > editor.num_tokens(file) >= min(8000, 12 * num_lines)
        if at % max(4, num_lines // 40) == 0:
            alone = ask(prefix, SUFFIX, cache_salt=f"{num_lines} {at}")
            assert found["choices"][0]["text"] == alone["choices"][0]["text"]
            assert editor.num_computed(alone) == found["usage"]["prompt_tokens"]
        if at:
            line = editor.num_tokens(prefix[prefix.rfind("\n", 0, -1) + 1 :])
            assert editor.num_computed(found) <= suffix_bound + line + 64


FAMILIES = ["qwen3", "qwen3_5", "gemma3_text", "gpt_oss", "nemotron_h"]  # dense, hybrid, windows


@pytest.mark.parametrize("architecture", cases(FAMILIES, ["qwen3_5", "gemma3_text"]))
@pytest.mark.parametrize(("num_lines", "num_chars"), [(12, 24), pytest.param(600, 50, marks=pytest.mark.full)])
def test_typing_computes_the_suffix_and_a_line(
    editor_of: Any, architecture: str, num_lines: int, num_chars: int
) -> None:
    editor = editor_of(architecture, QWEN)

    def raw(prefix: str, suffix: str, **fields: Any) -> Any:
        return editor.post(f"{QWEN[0]}{prefix}{QWEN[1]}{suffix}{QWEN[2]}", **fields)

    bound = editor.num_tokens(SUFFIX)
    type_into(editor, num_lines, num_chars, bound, editor.post)
    type_into(editor, num_lines + 1, min(num_chars, 12), bound, raw)


@pytest.mark.parametrize("architecture", cases(FAMILIES, ["qwen3_5"]))
def test_where_the_suffix_comes_first_typing_computes_a_line(editor_of: Any, architecture: str) -> None:
    editor = editor_of(architecture, CODESTRAL)
    type_into(editor, 12, 24, 0, editor.post)


def test_what_kilo_and_minuet_send(editor: Editor) -> None:
    """Both send the two texts; minuet streams, and both stop at their own strings."""
    text = "def fox(a):\n    return a\n"
    whole = editor.post(text, SUFFIX, max_tokens=40)
    raw = editor.post(f"{QWEN[0]}{text}{QWEN[1]}{SUFFIX}{QWEN[2]}", max_tokens=40)
    assert whole["choices"] == raw["choices"] and whole["usage"]["prompt_tokens"] == raw["usage"]["prompt_tokens"]
    body = {"prompt": text, "suffix": SUFFIX, "max_tokens": 40, "temperature": 0, "stream": True, "top_p": 0.9}
    events = events_of(editor.http.post("/v1/completions", json=body).text.splitlines())
    assert "".join(event["choices"][0]["text"] for event in events) == whole["choices"][0]["text"]


@pytest.mark.parametrize("stop", [CONTINUE, OLDER, ZED], ids=["Continue", "an older Continue", "Zed"])
def test_a_client_that_writes_the_template_itself(editor: Editor, stop: list[str]) -> None:
    """The reply is the one without stop strings, up to the first of them: here one that the reply has."""
    assert {len(CONTINUE), len(OLDER), len(ZED)} == {15, 24, 14}
    prompt = f"{QWEN[0]}# Path: fox.py\ndef fox(a):\n    re{QWEN[1]}{SUFFIX}{QWEN[2]}"
    free = editor.post(prompt, max_tokens=40, ignore_eos=True)["choices"][0]["text"]
    ends = [*stop, free[10:13]]
    found = editor.post(prompt, max_tokens=40, ignore_eos=True, stop=ends)["choices"][0]
    assert found["text"] == free[: min(at for each in ends if (at := free.find(each)) >= 0)]
    assert found["finish_reason"] == "stop"
    most = [*ends, *(f"<|{number}|>" for number in range(64 - len(ends)))]
    assert editor.post(prompt, max_tokens=40, ignore_eos=True, stop=most)["choices"][0] == found
    assert editor.post(prompt, stop=[*most, "x"])["error"]["param"] == "stop"


@pytest.mark.parametrize("end", ["<|fim_pad|>", "<|file_sep|>", "<|repo_name|>", "<|endoftext|>", "<|fim_prefix|>"])
def test_a_token_that_ends_the_fill_ends_the_reply(editor: Editor, end: str) -> None:
    token_id = editor.server.engine.processor.tokenizer.token_id(end)
    for fields in ({"suffix": SUFFIX}, {"prompt": f"{QWEN[0]}a\n{QWEN[1]}{SUFFIX}{QWEN[2]}"}):
        found = editor.post(**{"prompt": "a\n", "logit_bias": {str(token_id): 100}, **fields})
        assert found["choices"][0]["finish_reason"] == "stop" and found["choices"][0]["text"] == ""
        assert found["usage"]["completion_tokens"] == 1


def test_several_prompts_replies_and_log_probabilities(editor: Editor) -> None:
    prompts = ["def fox(a):\n    return ", "x"]
    apart = [editor.post(prompt, SUFFIX)["choices"][0]["text"] for prompt in prompts]
    found = editor.post(prompts, SUFFIX, n=2, logprobs=2)["choices"]
    assert [choice["text"] for choice in found] == [text for text in apart for _ in range(2)]
    assert all("".join(choice["logprobs"]["tokens"]) == choice["text"] for choice in found)
    tokenizer = editor.server.engine.processor.tokenizer
    ids = [tokenizer.encode(prompt, add_special_tokens=False) for prompt in prompts]
    assert [choice["text"] for choice in editor.post(ids, SUFFIX)["choices"]] == apart


def test_an_empty_suffix_is_an_ordinary_completion(editor: Editor) -> None:
    plain = editor.post("def fox(a):\n    return ")
    assert editor.post("def fox(a):\n    return ", "")["choices"] == plain["choices"]
    assert plain["usage"]["prompt_tokens"] == editor.num_tokens("def fox(a):\n    return ")


def test_what_does_not_go_together_is_refused_by_name(editor: Editor, editor_of: Any) -> None:
    assert editor.post("x", SUFFIX, echo=True)["error"]["param"] == "echo"
    assert editor.post("x", ["y"])["error"]["param"] == "suffix"
    other = editor_of("qwen3", ())
    error = other.post("x", SUFFIX)["error"]
    assert error["param"] == "suffix" and "Codestral" in error["message"]
    assert "error" not in other.post("x", "")


def test_who_types_on_does_not_wait_for_the_reply_before(editor_of: Any) -> None:
    """There is one place. Each key press leaves a reply of thousands of tokens; the next one takes its place."""
    editor = editor_of("qwen3", QWEN, max_num_seqs=1)
    num_tokens = 9000
    for at in range(8):
        body = {"prompt": "def fox(a):\n    " + TYPED[:at], "suffix": SUFFIX, "max_tokens": num_tokens}
        with editor.server.connect() as connection:
            connection.sendall(post_bytes("/v1/completions", json.dumps(body | {"stream": True, "ignore_eos": True})))
            received = b""
            while b'"text"' not in received:
                received += connection.recv(4096)
            assert b"200 OK" in received
    eventually(lambda: editor.http.get("/v1/status").json()["num_running"] == 0)
    metrics = editor.http.get("/metrics").text
    [line] = [line for line in metrics.splitlines() if line.startswith("vllm:generation_tokens_total")]
    assert float(line.split()[-1]) < num_tokens, "fewer than one of the eight replies would have had"


@pytest.mark.parametrize("architecture", cases(FAMILIES, ["qwen3_5"]))
@pytest.mark.parametrize("leaves", [False, True], ids=["read", "left"])
def test_nothing_behind_the_last_whole_line_is_kept(editor_of: Any, architecture: str, leaves: bool) -> None:
    """So it is after a reply that was read and after one whose client has left, and for state that replies share."""
    editor = editor_of(architecture, QWEN)
    text = "def fox(a):\n    return a\n" * 20 + "x = f"
    body = {"prompt": text, "suffix": SUFFIX, "max_tokens": 500 if leaves else 5, "ignore_eos": True, "n": 2}
    with editor.server.connect() as connection:
        connection.sendall(post_bytes("/v1/completions", json.dumps(body | {"stream": True})))
        received = b""
        while (b'"text"' if leaves else b"[DONE]") not in received:
            received += connection.recv(4096)
    whole = editor.num_tokens("<|fim_prefix|>" + text[: text.rindex("\n")])

    def num_cached() -> int:
        found = editor.post(text, SUFFIX, max_tokens=1)
        return int(found["usage"]["prompt_tokens"] - editor.num_computed(found))

    eventually(lambda: num_cached() == whole)
