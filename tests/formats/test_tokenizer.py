"""Loading a tokenizer, and what single tokens stand for."""

import json
import threading
from pathlib import Path

import pytest

from tests.support.rows import row
from tests.support.tokenizers import MARKERS, byte_level_backend, save
from vllm_mlx.core.errors import ModelLoadError
from vllm_mlx.formats.tokenizer import LONG_CHARS, Tokenizer

TEXTS = ["The quick brown fox", "été 東京 🙂", " a  b\n\n", "<|im_start|>user\nhi<|im_end|>", ""]


def test_round_trip(qwen: Tokenizer) -> None:
    for text in TEXTS:
        assert qwen.decode(qwen.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize("special", [False, True])
def test_a_long_text_is_encoded_as_a_short_one(any_tokenizer: Tokenizer, special: bool) -> None:
    text = "".join(TEXTS) * (LONG_CHARS // 20)
    alone = any_tokenizer.backend.encode(text, add_special_tokens=special)
    assert len(text) > LONG_CHARS
    assert any_tokenizer.encode(text, add_special_tokens=special) == alone.ids
    if not special:
        found = any_tokenizer.encoding(text)
        assert (found.ids, found.offsets) == (alone.ids, alone.offsets)


def test_special_tokens_are_skipped_and_markers_are_not(qwen: Tokenizer) -> None:
    ids = qwen.encode("<|im_start|>a<think>b", add_special_tokens=False)
    assert qwen.decode(ids, skip_special_tokens=True) == "a<think>b"


def test_ids_that_are_no_tokens_decode_to_nothing(any_tokenizer: Tokenizer) -> None:
    ids = any_tokenizer.encode("hello", add_special_tokens=False)
    unknown = [any_tokenizer.vocab_size, 10**6, -1, 2**40]
    assert any_tokenizer.decode([*unknown, *ids, *unknown]) == any_tokenizer.decode(ids)
    assert [any_tokenizer.token_bytes(token_id) for token_id in unknown] == [b""] * 4
    assert [any_tokenizer.added_token(token_id) for token_id in unknown] == [None] * 4


@pytest.mark.parametrize("text", ["The quick brown fox", " été 東京 🙂", "<think>\nhello"])
def test_token_bytes_make_up_the_text(qwen: Tokenizer, text: str) -> None:
    ids = qwen.encode(text, add_special_tokens=False)
    assert b"".join(map(qwen.token_bytes, ids)).decode() == text


def test_token_bytes_of_a_sentencepiece_vocabulary(llama: Tokenizer) -> None:
    ids = llama.encode("The fox 東", add_special_tokens=False)
    assert b"".join(map(llama.token_bytes, ids)).decode() == " The fox 東"
    assert llama.token_text(ids[-1]) == "\ufffd"


@row("S0-7")
def test_added_tokens(qwen: Tokenizer, llama: Tokenizer) -> None:
    think, end = qwen.token_id("<think>"), qwen.token_id("<|im_end|>")
    assert think is not None
    assert end is not None
    assert qwen.added_token(think) == ("<think>", False)
    assert qwen.added_token(end) == ("<|im_end|>", True)
    assert qwen.added_token(qwen.encode("hello", add_special_tokens=False)[0]) is None
    assert qwen.marker_tokens > set(MARKERS)
    spaces = llama.token_id("▁▁▁")
    assert spaces is not None
    assert llama.added_token(spaces) is None, "an added run of spaces is text"


def test_vocabulary(qwen: Tokenizer) -> None:
    assert "<think>" in qwen
    assert "<no_such_token>" not in qwen
    assert qwen.vocab_size == 330 + 3 + 6


def test_end_of_sequence_ids_of_all_files(tmp_path: Path) -> None:
    save(tmp_path, byte_level_backend(), eos="<|im_end|>")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": None, "text_config": {"eos_token_id": 9}}))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.eos_token_ids == {tokenizer.token_id("<|im_end|>"), 7, 8, 9}


def test_chat_template_of_the_checkpoint_of_its_processor_and_of_the_user(tmp_path: Path) -> None:
    folder = save(tmp_path, byte_level_backend(), eos="<|im_end|>")
    assert Tokenizer.load(folder).chat_template is None
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "{# of the processor #}"}))
    assert Tokenizer.load(folder).chat_template == "{# of the processor #}"
    (folder / "chat_template.jinja").write_text("{# of the checkpoint #}")
    assert Tokenizer.load(folder).chat_template == "{# of the checkpoint #}"
    assert Tokenizer.load(folder, chat_template="{# of the user #}").chat_template == "{# of the user #}"


def test_missing_tokenizer_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json") as raised:
        Tokenizer.load(tmp_path)
    assert "\n" not in raised.value.message


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json", "config.json"])
def test_broken_file_is_said_in_one_line(tmp_path: Path, name: str) -> None:
    save(tmp_path, byte_level_backend(), eos="<|im_end|>")
    (tmp_path / name).write_text("{broken")
    with pytest.raises(ModelLoadError) as raised:
        Tokenizer.load(tmp_path)
    assert "\n" not in raised.value.message


def test_threads_share_a_tokenizer(qwen: Tokenizer) -> None:
    texts = [f"hello world {index} " * 50 for index in range(16)]
    results: dict[int, str] = {}

    def work(index: int) -> None:
        results[index] = qwen.decode(qwen.encode(texts[index], add_special_tokens=bool(index % 2)))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[index] for index in range(16)] == texts
