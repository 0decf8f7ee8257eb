"""Texts for an encoder become the ids that transformers gives them, and are never cut in silence."""

import itertools

import pytest
from transformers import AutoTokenizer

from tests.support.encoders import FAMILIES, make_encoder
from tests.support.running_encoder import facts_of
from vllm_mlx.core.errors import InvalidParameter
from vllm_mlx.core.request import TextInputs
from vllm_mlx.formats.tokenizer import Tokenizer
from vllm_mlx.prompt.texts import MAX_TEXT_CHARS, TextTokenizer
from vllm_mlx.util.tasks import Cancelled, Deadline

LONG = "The quick brown fox says hello world, and def main(): return 1 + 2 été 東京 🙂. "
TEXTS = ("x", LONG * 3, "hello world", " ", "a\x00b", "e\u0301\u200d\ufeff", "<s> and </s> and <pad>")
VOCAB_SIZE = 384


def tokenizer_of(tmp_path, family="bert", **options) -> TextTokenizer:
    path = make_encoder(tmp_path / "m", family, **options)
    return TextTokenizer(Tokenizer.load(path), facts_of(path), VOCAB_SIZE)


def ids_of(tokenizer: TextTokenizer, *texts, **options) -> list[list[int]]:
    found = tokenizer.prepare(TextInputs(texts=texts, **options))
    assert found.ends[-1] == len(found.ids)
    return [list(found.ids[start:end]) for start, end in found.spans]


def refusal(tokenizer: TextTokenizer, *texts, **options) -> InvalidParameter:
    with pytest.raises(InvalidParameter) as caught:
        tokenizer.prepare(TextInputs(texts=texts, **options))
    return caught.value


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_are_those_of_transformers(family, tmp_path):
    tokenizer = tokenizer_of(tmp_path, family)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "m")
    expected = [theirs(text, padding=False, truncation=False)["input_ids"] for text in TEXTS]
    assert ids_of(tokenizer, *TEXTS) == expected
    assert [ids_of(tokenizer, text)[0] for text in TEXTS] == expected


def test_the_embedders_of_qwen3_get_their_end_token(tmp_path):
    assert ids_of(tokenizer_of(tmp_path, "qwen3"), "hello")[0][-1] == 2


@pytest.mark.parametrize("family", ["bert", "xlm-roberta", "modernbert"])
def test_pairs_are_those_of_transformers(family, tmp_path):
    tokenizer = tokenizer_of(tmp_path, family, task="rerank")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "m")
    found = tokenizer.prepare(TextInputs(texts=TEXTS, query="the fox"))
    for (start, end), text in zip(found.spans, TEXTS, strict=True):
        expected = theirs("the fox", text, padding=False, truncation=False)
        assert list(found.ids[start:end]) == expected["input_ids"]
        if family == "bert":
            assert list(found.types[start:end]) == expected["token_type_ids"]
    assert (found.types is None) == (family != "bert")


def test_pairs_are_cut_as_transformers_cuts_them(tmp_path):
    path = make_encoder(tmp_path / "m", "bert", task="rerank")
    ours, theirs = Tokenizer.load(path), AutoTokenizer.from_pretrained(path)
    sizes = ("x", "hello world, and def main", LONG * 2)
    for max_tokens, query, document in itertools.product(range(5, 40), sizes, sizes):
        tokenizer = TextTokenizer(ours, facts_of(path, max_model_len=max_tokens), VOCAB_SIZE)
        expected = theirs(query, document, truncation="longest_first", max_length=max_tokens)["input_ids"]
        assert ids_of(tokenizer, document, "x", document, query=query, truncate=True)[::2] == [expected, expected]
        if len(theirs(query, document, truncation=False)["input_ids"]) > max_tokens:
            assert refusal(tokenizer, document, query=query).param == "documents[0]"


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_are_cut_as_transformers_cuts_them(family, tmp_path):
    tokenizer = tokenizer_of(tmp_path, family, max_tokens=9)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "m")
    expected = [theirs(text, padding=False, truncation=True, max_length=9)["input_ids"] for text in TEXTS]
    assert ids_of(tokenizer, *TEXTS, truncate=True) == expected


def test_a_text_that_is_too_long_is_named_with_its_length_and_the_limit(tmp_path):
    tokenizer = tokenizer_of(tmp_path, max_tokens=9)
    number = len(AutoTokenizer.from_pretrained(tmp_path / "m")(LONG, truncation=False)["input_ids"])
    error = refusal(tokenizer, "x", LONG, LONG)
    assert error.param == "input[1]"
    assert all(f"{part}" in error.message for part in ("input[1]", number, 9, "truncate"))
    error = refusal(tokenizer, "x", (5,) * 10)
    assert error.param == "input[1]" and "10" in error.message
    assert ids_of(tokenizer, (5,) * 10, (6,) * 9, truncate=True) == [[5] * 9, [6] * 9]


def test_prompts_go_before_the_texts(tmp_path):
    prompts = {"query": "the query: ", "document": ""}
    tokenizer = tokenizer_of(tmp_path, prompts=prompts, default_prompt="query")
    plain = tokenizer_of(tmp_path / "plain")
    assert ids_of(tokenizer, "fox") == ids_of(plain, "the query: fox")
    assert ids_of(tokenizer, "fox", prompt_name="query") == ids_of(plain, "the query: fox")
    assert ids_of(tokenizer, "fox", prompt_name="document") == ids_of(plain, "fox")
    error = refusal(tokenizer, "fox", prompt_name="other")
    assert error.param == "prompt_name" and "query" in error.message
    assert refusal(plain, "fox", prompt_name="query").param == "prompt_name"


def test_ids_of_a_client_are_taken_as_they_are(tmp_path):
    tokenizer = tokenizer_of(tmp_path, prompts={"query": "q: "}, default_prompt="query")
    given = [(5, 6), (0, VOCAB_SIZE - 1, 2)]
    assert ids_of(tokenizer, *given) == [list(ids) for ids in given]
    assert ids_of(tokenizer, "fox", (5,), "world")[1] == [5]
    for wrong in ((-1,), (VOCAB_SIZE,), (5, 2**40)):
        assert refusal(tokenizer, "fox", wrong).param == "input[1]"
    assert refusal(tokenizer, (5,), prompt_name="query").param == "input[0]"


def test_ids_do_not_shift_the_types_of_texts(tmp_path):
    tokenizer = tokenizer_of(tmp_path, task="rerank")
    assert refusal(tokenizer, "x", (5,), query="fox").param == "documents[1]"


@pytest.mark.parametrize(
    ("task", "texts", "options", "param"),
    [
        ("embedding", (), {}, "input"),
        ("embedding", ("x", ""), {}, "input[1]"),
        ("embedding", ((),), {}, "input[0]"),
        ("embedding", ("x",), {"query": "fox"}, "query"),
        ("embedding", ("x",), {"instruction": "find it"}, "instruction"),
        ("embedding", ("x",), {"dimensions": 8}, "dimensions"),
        ("embedding", ("x", "y" * (MAX_TEXT_CHARS + 1)), {}, "input[1]"),
        ("rerank", (), {"query": "fox"}, "documents"),
        ("rerank", ("x", ""), {"query": "fox"}, "documents[1]"),
        ("rerank", ("x",), {}, "query"),
        ("rerank", ("x",), {"query": ""}, "query"),
        ("rerank", ("x",), {"query": "y" * (MAX_TEXT_CHARS + 1), "truncate": True}, "query"),
        ("rerank", ("x",), {"query": "fox", "prompt_name": "query"}, "prompt_name"),
        ("rerank", ("x",), {"query": "fox", "instruction": "find it"}, "instruction"),
        ("rerank", ("x",), {"query": "fox", "dimensions": 8}, "dimensions"),
    ],
)
def test_requests_that_do_not_fit_the_model(task, texts, options, param, tmp_path):
    error = refusal(tokenizer_of(tmp_path, task=task), *texts, **options)
    assert error.param == param and ("longer" not in error.message or "characters" in error.message)


def test_declared_dimensions(tmp_path):
    tokenizer = tokenizer_of(tmp_path, matryoshka_dimensions=[16, 32])
    for number in (None, 16, 32, 64):
        ids_of(tokenizer, "x", dimensions=number)
    assert refusal(tokenizer, "x", dimensions=17).param == "dimensions"


@pytest.mark.parametrize("text", ["\ud800", "a\udc00b", "\ud83d\ude42 split"])
def test_half_a_surrogate_pair_is_read_as_the_replacement_character(text, tmp_path):
    tokenizer = tokenizer_of(tmp_path)
    sound = {"\ud800": "\ufffd", "a\udc00b": "a\ufffdb"}.get(text, "🙂 split")
    assert ids_of(tokenizer, "x", text) == ids_of(tokenizer, "x", sound)


def test_a_model_that_reads_small_letters(tmp_path):
    tokenizer = tokenizer_of(tmp_path)
    (tmp_path / "m/sentence_bert_config.json").write_text('{"do_lower_case": true}')
    lower = TextTokenizer(Tokenizer.load(tmp_path / "m"), facts_of(tmp_path / "m"), VOCAB_SIZE)
    assert ids_of(lower, "The FOX") == ids_of(tokenizer, "the fox") != ids_of(tokenizer, "The FOX")


def test_the_work_is_divided_and_ends_with_its_deadline(tmp_path):
    tokenizer = tokenizer_of(tmp_path, "modernbert", max_position_embeddings=100_000)
    (tmp_path / "m/tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    texts = (LONG * 500,) * 40  # characters: 40 times 40,000
    asked = []

    def clock() -> float:
        asked.append(None)
        return float(len(asked))

    tokenizer = TextTokenizer(Tokenizer.load(tmp_path / "m"), facts_of(tmp_path / "m"), VOCAB_SIZE)
    found = tokenizer.prepare(TextInputs(texts=texts), Deadline(1000, "over", clock=clock))
    assert len(found.ends) == 40 and len({end - start for start, end in found.spans}) == 1
    assert len(asked) >= 6
    asked.clear()
    tokenizer.prepare(TextInputs(texts=("x",) * 50), Deadline(1000, "over", clock=clock))
    assert len(asked) >= 50
    deadline = Deadline(1000, "over")
    deadline.cancel()
    with pytest.raises(Cancelled):
        tokenizer.prepare(TextInputs(texts=("x",)), deadline)


def test_a_chat_tokenizer_is_left_as_it_is(tmp_path):
    path = make_encoder(tmp_path / "m", "bert")
    shared = Tokenizer.load(path)
    before = shared.encode(LONG, add_special_tokens=True)
    ids_of(TextTokenizer(shared, facts_of(path, max_model_len=5), VOCAB_SIZE), LONG, truncate=True)
    assert shared.encode(LONG, add_special_tokens=True) == before and len(before) > 16
