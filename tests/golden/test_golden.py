"""What clients, monitors and scripts rely on is as the files hold it: bytes of replies, refusals, status, flags."""

import json

import pytest

from .kept import FOLDER, GOLDENS, Golden, changed_words
from .normal import joined, normalised, shape


@pytest.mark.parametrize("golden", [golden for golden in GOLDENS if not golden.is_words], ids=lambda each: each.name)
def test_what_others_rely_on_is_as_it_was(golden: Golden) -> None:
    assert golden.make() == golden.kept


@pytest.mark.parametrize("golden", [golden for golden in GOLDENS if golden.is_words], ids=lambda each: each.name)
def test_words_change_on_purpose_only(golden: Golden) -> None:
    changed = list(changed_words(golden.kept, golden.make()))
    assert not changed, "if the new words are meant: python -m tests.golden --write"


def test_no_file_is_left_over() -> None:
    assert {file.name for file in FOLDER.iterdir()} == {golden.name for golden in GOLDENS}


def test_every_family_of_refusals_is_in_the_table() -> None:
    kept = json.loads((FOLDER / "refusals.json").read_text(encoding="utf-8"))
    assert len(kept) >= 200
    assert {status for status, _ in kept.values()} >= {200, 400, 401, 403, 404, 405, 413, 415, 422, 429, 499, 500, 503}
    for protocol in ("chat", "completions", "messages", "responses"):
        assert sum(f", {protocol}" in name for name in kept) >= 35


def test_a_shape_names_every_path_and_type() -> None:
    value = {"a": [{"b": 1}, {"b": None, "c": 0.5}], "d": {}}
    assert shape(value) == {"a": "list", "a[]": "object", "a[].b": "int or null", "a[].c": "float", "d": "object"}


def test_only_what_is_new_each_time_is_normalised() -> None:
    wire = b'{"id":"chatcmpl-0123456789abcdef","created":17,"max_tokens":17,"call":"call_1a"}'
    assert normalised(wire) == '{"id":"chatcmpl-ID","created":"TIME","max_tokens":17,"call":"call_1a"}'


def test_where_a_text_is_cut_does_not_matter() -> None:
    def wire(*texts: str) -> str:
        return (
            "".join(f'event: a\ndata: {{"i":1,"delta":{{"text":"{text}"}}}}\n\n' for text in texts) + "data: [DONE]\n\n"
        )

    assert joined(wire("one ", "two", " three")) == joined(wire("one two", " three"))
    assert joined(wire("one")) != joined(wire("one", "two"))
