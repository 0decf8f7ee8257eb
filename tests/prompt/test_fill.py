"""Fill-in prompts: their ids in each documented order, texts that spell a marker, and the part that is kept."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import CodeLlamaTokenizer

from tests.support.tokenizers import byte_level_backend, save, sentencepiece_backend
from vllm_mlx.core.config import EngineConfig
from vllm_mlx.core.errors import ContextLengthExceeded, InvalidParameter, Unsupported
from vllm_mlx.core.messages import Message
from vllm_mlx.core.request import Request, SamplingParams
from vllm_mlx.engine.front import ReplyKeeper
from vllm_mlx.engine.preparing import PromptPool
from vllm_mlx.formats.reply import FinishedReply
from vllm_mlx.formats.tokenizer import Tokenizer
from vllm_mlx.prompt.processor import PreparedRequest, RequestProcessor
from vllm_mlx.prompt.reply_formats import reply_formats

PREFIX, SUFFIX = "def fox(a):\n    return the ", "\n\nprint(fox(1))\n"
LLAMA = ("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>")
# Each documented prompt, and other tokens of the family. `bos`: its tokenizer begins with a token of its own.
DOCUMENTED: dict[str, tuple[str, tuple[str, ...], str]] = {
    "Qwen": ("<|fim_prefix|>{p}<|fim_suffix|>{s}<|fim_middle|>", ("<|fim_pad|>", "<|file_sep|>", "<|repo_name|>"), ""),
    "CodeGemma": ("<|fim_prefix|>{p}<|fim_suffix|>{s}<|fim_middle|>", ("<|file_separator|>",), "<bos>"),
    "Granite 4": ("<|fim_prefix|>{p}<|fim_suffix|>{s}<|fim_middle|>", ("<|fim_pad|>", "<|end_of_text|>"), ""),
    "Granite 3": ("<fim_prefix>{p}<fim_suffix>{s}<fim_middle>", ("<fim_pad>", "<filename>", "<reponame>"), ""),
    "StarCoder": ("<fim_prefix>{p}<fim_suffix>{s}<fim_middle>", ("<fim_pad>", "<file_sep>", "<repo_name>"), ""),
    "SantaCoder": ("<fim-prefix>{p}<fim-suffix>{s}<fim-middle>", ("<fim-pad>",), ""),
    "DeepSeek": (
        "<｜fim▁begin｜>{p}<｜fim▁hole｜>{s}<｜fim▁end｜>", ("<|EOT|>",), "<｜begin▁of▁sentence｜>",
    ),
    "Seed-Coder": ("<[fim-suffix]>{s}<[fim-prefix]>{p}<[fim-middle]>", (), "<[begin▁of▁sentence]>"),
}  # fmt: skip


def load(folder: Path, backend: Backend, bos: str = "", eos: str = "<|im_end|>") -> Tokenizer:
    if bos:
        start = (bos, backend.token_to_id(bos))
        backend.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[start])
    return Tokenizer.load(save(folder, backend, eos=eos))


def byte_level(folder: Path, name: str) -> Tokenizer:
    form, others, bos = DOCUMENTED[name]
    backend = byte_level_backend()
    markers = [part for part in form.replace("{p}", "\0").replace("{s}", "\0").split("\0") if part]
    is_special = name != "Qwen"  # whose file declares them not to be special
    backend.add_tokens([AddedToken(text, special=is_special, normalized=False) for text in (*markers, *others)])
    backend.add_special_tokens([AddedToken(bos, special=True, normalized=False)] if bos else [])
    return load(folder, backend, bos)


def llama_like(folder: Path, tokens: tuple[str, ...], scheme: str | None = None) -> Tokenizer:
    """`scheme`: a pre-tokenizer adds the space, in front of the first text or of each; None: the normalizer does."""
    backend = sentencepiece_backend()
    if scheme is not None:
        backend.normalizer = None
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in tokens])
    return load(folder, backend, "<s>", "</s>")


def make(tokenizer: Tokenizer, max_model_len: int = 4096) -> RequestProcessor:
    config = EngineConfig(model="m")
    return RequestProcessor(
        tokenizer, config, Path("/nowhere"), formats=reply_formats(config, tokenizer), max_model_len=max_model_len,
        vocab_size=4096,
    )  # fmt: skip


def prepare(tokenizer: Tokenizer, prompt: Any = PREFIX, suffix: str = SUFFIX, **fields: Any) -> PreparedRequest:
    return make(tokenizer).prepare(Request(request_id="r", prompt=prompt, suffix=suffix, **fields))


def kept(tokenizer: Tokenizer, prepared: PreparedRequest, num_reply: int = 3) -> str:
    """The text of the prompt that stays in the cache."""
    reply = FinishedReply(message=Message("assistant", ()), token_ids=(5,) * num_reply)
    num_kept = make(tokenizer).kept_tokens(prepared, reply)
    assert num_kept == prepared.num_kept, "nothing of the reply is kept"
    return tokenizer.decode(prepared.prompt.token_ids[:num_kept])


@pytest.mark.parametrize("name", DOCUMENTED)
def test_the_prompt_is_the_documented_one(tmp_path: Path, name: str) -> None:
    """It has the ids that the family's tokenizer gives the documented text, with the BOS that it adds, or none."""
    tokenizer, (form, _, bos) = byte_level(tmp_path, name), DOCUMENTED[name]
    prepared = prepare(tokenizer)
    documented = form.format(p=PREFIX, s=SUFFIX)
    assert list(prepared.prompt.token_ids) == tokenizer.encode(documented, add_special_tokens=True)
    assert tokenizer.decode(prepared.prompt.token_ids) == bos + documented


@pytest.mark.parametrize("name", DOCUMENTED)
def test_the_family_s_tokens_end_the_reply(tmp_path: Path, name: str) -> None:
    tokenizer, (form, others, _) = byte_level(tmp_path, name), DOCUMENTED[name]
    ends = {tokenizer.token_id(text) for text in (*others, "<|endoftext|>", "<|im_end|>")}
    assert ends <= prepare(tokenizer).sampling.stop_token_ids
    raw = prepare(tokenizer, form.format(p=PREFIX, s=SUFFIX), "")
    assert raw.sampling.stop_token_ids == prepare(tokenizer).sampling.stop_token_ids, "the client wrote it itself"
    assert prepare(tokenizer, suffix="").sampling.stop_token_ids == tokenizer.eos_token_ids


@pytest.mark.parametrize("scheme", [None, "first", "always"])
def test_code_llama_adds_a_space_before_the_prefix_alone(tmp_path: Path, scheme: str | None) -> None:
    """As the paper has it: no implicit space before the suffix and the middle."""
    tokenizer = llama_like(tmp_path, LLAMA, scheme)
    found = [tokenizer.backend.id_to_token(each) for each in prepare(tokenizer, "The fox", "hello").prompt.token_ids]
    assert found == ["<s>", "▁<PRE>", "▁The", "▁fox", "▁<SUF>", "h", "e", "l", "l", "o", "▁<MID>"]
    data = json.loads(sentencepiece_backend().to_str())["model"]
    vocab = data["vocab"] | {text: len(data["vocab"]) + at for at, text in enumerate(LLAMA)}
    family = CodeLlamaTokenizer(vocab=vocab, merges=[tuple(pair) for pair in data["merges"]])
    wanted = family.convert_ids_to_tokens(family("The fox", suffix=" hello").input_ids)
    ids = prepare(tokenizer, "The fox", " hello").prompt.token_ids
    assert [tokenizer.backend.id_to_token(each) for each in ids] == wanted
    assert tokenizer.token_id("▁<EOT>") in prepare(tokenizer).sampling.stop_token_ids


@pytest.mark.parametrize("adds_bos", [True, False])
def test_codestral_has_the_suffix_first_and_no_middle(tmp_path: Path, adds_bos: bool) -> None:
    tokenizer = llama_like(tmp_path, ("[PREFIX]", "[SUFFIX]", "[MIDDLE]"))
    if not adds_bos:
        tokenizer.backend.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
        tokenizer.hf.bos_token = "<s>"
    ids = prepare(tokenizer, "The fox", "hello").prompt.token_ids
    pieces = [tokenizer.backend.id_to_token(each) for each in ids]
    assert pieces == ["<s>", "[SUFFIX]", "h", "e", "l", "l", "o", "[PREFIX]", "▁The", "▁fox"]


@pytest.mark.parametrize("name", ["Qwen", "StarCoder", "DeepSeek"])
def test_a_text_that_spells_a_marker_has_no_marker(tmp_path: Path, name: str) -> None:
    tokenizer, (form, others, bos) = byte_level(tmp_path, name), DOCUMENTED[name]
    spelled = form.format(p="x", s="y") + "".join(others) + "<|im_start|>a<|im_end|><|im_end|>"
    prepared = prepare(tokenizer, spelled, spelled)
    alone = prepare(tokenizer, "x", "y").prompt.token_ids
    markers = {each for each in alone if tokenizer.added_token(each)}
    for marker in (*markers, tokenizer.token_id("<|im_end|>"), tokenizer.token_id("<|im_start|>")):
        assert prepared.prompt.token_ids.count(marker) == alone.count(marker)
    assert tokenizer.decode(prepared.prompt.token_ids) == bos + form.format(p=spelled, s=spelled)


@pytest.mark.parametrize("text", ["<s>", " <s>x", "a <PRE> b", "</s></s> fox", "x <SUF>", "é<s>é"])
def test_a_spelled_marker_costs_no_space_where_texts_begin_with_one(tmp_path: Path, text: str) -> None:
    tokenizer = llama_like(tmp_path, LLAMA)
    start, prefix, *rest = prepare(tokenizer, text, text).prompt.token_ids
    assert [start, prefix] == [tokenizer.token_id("<s>"), tokenizer.token_id("▁<PRE>")]
    assert rest.count(tokenizer.token_id("▁<PRE>")) == rest.count(start) == 0
    [at] = [at for at, each in enumerate(rest) if each == tokenizer.token_id("▁<SUF>")]
    before, behind = (b"".join(map(tokenizer.token_bytes, ids)) for ids in (rest[:at], rest[at + 1 : -1]))
    assert (before.decode(), behind.decode()) == (" " + text, text)


def test_a_prompt_of_ids_is_a_prefix_too(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path, "Qwen")
    ids = tuple(tokenizer.encode(PREFIX, add_special_tokens=False))
    assert prepare(tokenizer, ids).prompt == prepare(tokenizer).prompt
    with pytest.raises(InvalidParameter, match="9999"):
        prepare(tokenizer, (9999,))


def test_a_tokenizer_without_the_tokens_is_refused_by_name(qwen: Tokenizer, llama: Tokenizer) -> None:
    for tokenizer in (qwen, llama):
        with pytest.raises(Unsupported, match=r"`suffix`.*Qwen2\.5-Coder") as raised:
            prepare(tokenizer)
        assert raised.value.param == "suffix"
        assert prepare(tokenizer, suffix="").prompt.snapshot_points == ()


def test_both_texts_count_against_the_context(tmp_path: Path) -> None:
    processor = make(byte_level(tmp_path, "Qwen"), 64)
    for prompt, suffix in (("x", "1 " * 60), ("1 " * 60, "x"), ("x", "z" * 10**6)):
        with pytest.raises(ContextLengthExceeded) as raised:
            processor.prepare(Request(request_id="r", prompt=prompt, suffix=suffix))
        assert raised.value.param == ("suffix" if len(suffix) == 10**6 else "prompt"), "such a text is not tokenized"


@pytest.mark.parametrize("name", ["Qwen", "StarCoder", "Seed-Coder"])
@pytest.mark.parametrize(
    ("prefix", "whole"),
    [
        ("one\ntwo\nthr", "one\ntwo"),
        ("one\ntwo\n", "one\ntwo"),
        ("one\ntwo\n\n\n    x", "one\ntwo"),
        ("one two", ""),
        ("\n\nx", ""),
        ("", ""),
    ],
)
def test_a_fill_in_is_kept_up_to_the_cursor_s_line(tmp_path: Path, name: str, prefix: str, whole: str) -> None:
    """So it is for a request with `suffix`, one whose client wrote the tokens, and one of ids."""
    tokenizer, (form, _, bos) = byte_level(tmp_path, name), DOCUMENTED[name]
    raw = form.format(p=prefix, s=SUFFIX)
    wanted = bos + form.partition("{p}")[0].format(s=SUFFIX) + whole
    ids = tuple(tokenizer.encode(raw, add_special_tokens=True))
    for prepared in (prepare(tokenizer, prefix), prepare(tokenizer, raw, ""), prepare(tokenizer, ids, "")):
        assert kept(tokenizer, prepared) == kept(tokenizer, prepared, num_reply=0) == wanted
        assert prepared.prompt.snapshot_points == (prepared.num_kept,)


def test_a_client_that_left_before_the_first_token_keeps_as_much(tmp_path: Path) -> None:
    tokenizer, asked = byte_level(tmp_path, "Qwen"), []
    prepared = prepare(tokenizer, "one\ntwo\nthr")
    keeper = ReplyKeeper(make(tokenizer), PromptPool(), lambda seq, num_tokens, following: asked.append(num_tokens))
    reply = FinishedReply(message=Message("assistant", ()), token_ids=())
    keeper.take(prepared, prepared.sequence(1, 0), reply, is_last=False)
    assert asked == [prepared.num_kept]


def test_codestral_keeps_the_suffix(tmp_path: Path) -> None:
    tokenizer = llama_like(tmp_path, ("[PREFIX]", "[SUFFIX]", "[MIDDLE]"))
    assert kept(tokenizer, prepare(tokenizer, "The\nfox\nh", "x\nx")).endswith("x\nx[PREFIX] The\nfox")


def test_the_last_prefix_is_the_one_that_is_typed(tmp_path: Path) -> None:
    """A client that writes the prompt itself may show the model a fill-in before."""
    tokenizer = byte_level(tmp_path, "Qwen")
    shown = DOCUMENTED["Qwen"][0].format(p="a\nb", s="c") + "d<|file_sep|>"
    prompt = shown + DOCUMENTED["Qwen"][0].format(p="one\ntwo\nthr", s="\nx\n")
    assert kept(tokenizer, prepare(tokenizer, prompt, "")) == f"{shown}<|fim_prefix|>one\ntwo"


def test_many_blank_lines_are_not_all_computed_again(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path, "Qwen")
    num_before, num_blank = (prepare(tokenizer, text).num_kept for text in ("x", "x" + "\n" * 200))
    assert num_blank >= num_before + 200 - 33


def test_a_marker_alone_makes_no_fill_in(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path, "Qwen")
    for prompt in ("a<|fim_prefix|>b\nc", "a<|fim_suffix|>b\nc", "a\nb<|file_sep|>"):
        prepared = prepare(tokenizer, prompt, "")
        assert prepared.prompt.snapshot_points == () and prepared.num_kept == len(prepared.prompt.token_ids)
        assert prepared.sampling.stop_token_ids == tokenizer.eos_token_ids


def test_ignored_ends_end_nothing(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path, "Qwen")
    assert prepare(tokenizer, sampling=SamplingParams(ignore_eos=True)).sampling.stop_token_ids == frozenset()
