"""Values in which the sessions of one agent differ are found where they stand, alone and among others."""

from pathlib import Path

import pytest

from tests.support.tokenizers import TEMPLATES
from vllm_mlx.core.messages import Message, TextPart
from vllm_mlx.core.request import Request
from vllm_mlx.formats.tokenizer import Tokenizer
from vllm_mlx.prompt.encoded import common_prefix
from vllm_mlx.prompt.processor import RequestProcessor
from vllm_mlx.prompt.volatile import volatile_places

from .turns import make_processor, system, user

PROSE = "Be kind to each reader of this text and say what you mean in few words. " * 20
NEAR = 330  # characters that are computed again
VALUES = {
    "folder on macOS": ("/Users/ann/shop", "/Users/ann/site"),
    "folder on Linux": ("/home/ann/shop", "/home/ben/shop"),
    "folder in a container": ("/workspace/shop", "/workspace/site"),
    "folder on Windows": (r"C:\Users\Ann\shop", r"C:\Users\Ann\site"),
    "folder on Windows, in JSON": (r"D:\\work\\shop", r"D:\\work\\site"),
    "folder on Windows, with slashes": ("c:/dev/shop", "c:/dev/site"),
    "folder below home": ("~/shop", "~/site"),
    "folder as URL": ("file:///Users/ann/shop", "file:///Users/ann/site"),
    "ISO date": ("2026-03-01", "2026-03-02"),
    "compact date": ("20260301", "20260302"),
    "date with slashes": ("3/1/2026", "3/2/2026"),
    "date with dots": ("1.3.2026", "2.3.2026"),
    "written date": ("Sunday, March 1, 2026", "Monday, March 2, 2026"),
    "written date, day first": ("Sonntag, 1. März 2026", "Montag, 2. März 2026"),
    "date of JavaScript": ("Sun Mar 01 2026", "Mon Mar 02 2026"),
    "month": ("March 2026", "April 2026"),
    "date in Japanese": ("2026年3月1日", "2026年4月2日"),
    "time": ("09:05", "10:15"),
    "time with seconds": ("9:05:11", "9:05:12"),
    "time with AM": ("9:05 AM", "9:06 AM"),
    "moment": ("2026-03-01T09:05:11Z", "2026-03-01T09:05:12Z"),
    "seconds since 1970": ("1772355911", "1772355912"),
    "UUID": ("0b3fd7a2-1111-4222-8333-444455556666", "1b3fd7a2-1111-4222-8333-444455556666"),
    "commit": ("c591d3c", "530c192"),
    "long commit": ("c591d3c0b3fd7a21111422283334444555566667", "d591d3c0b3fd7a21111422283334444555566667"),
    "id with a prefix": ("ses_01jq8zk3v9x7r2m4", "ses_02jq8zk3v9x7r2m4"),
    "branch": ("Branch: main", "Branch: fix/login"),
    "branch in JSON": ('"gitBranch": "main"', '"gitBranch": "fix/login"'),
    "branch in a tag": ("<branch>main</branch>", "<branch>fix/login</branch>"),
    "branch in prose": ("You are on branch main", "You are on branch topic"),
    "version": ("Darwin 25.1.0", "Darwin 25.2.0"),
    "version with v": ("Node.js v22.1.0", "Node.js v22.2.0"),
    "address": ("ann@example.org", "ben@example.com"),
    "user's name": ("username: ann", "username: ben"),
    "session": ("session_id=ann", "session_id=ben"),
}


def places(text: str) -> list[int]:
    return list(volatile_places(text, len(text)))


@pytest.mark.parametrize(
    "layout", ["{prose}It is {value}, as you know.{prose}", "{prose}\n\n# Here\n- It: {value}\n{prose}"]
)
@pytest.mark.parametrize("kind", VALUES)
def test_sessions_share_what_is_before_a_value(kind: str, layout: str) -> None:
    first, other = (layout.format(prose=PROSE, value=value) for value in VALUES[kind])
    shared = common_prefix(first, other)
    assert any(shared - NEAR <= place <= shared for place in places(first))
    assert places(first)[0] == places(other)[0], "the other session also stops there"


BLOCK = """<env>
  Model: {model}
  Branch of {user}: {branch}
  Folder: /Users/{user}/shop
  Date: {date}
</env>
"""
SAME = {"model": "m", "user": "ann", "branch": "main", "date": "2026-03-01"}


@pytest.mark.parametrize("field", SAME)
def test_neighbours_of_a_value_differ_with_it(field: str) -> None:
    first, other = (PROSE + "\n" + BLOCK.format(**values) + PROSE for values in (SAME, {**SAME, field: "other"}))
    shared = common_prefix(first, other)
    assert shared - NEAR <= places(first)[0] <= shared


@pytest.mark.parametrize(
    "text",
    ["see a/home/x", "the ratio 3/4", "https://example.org/home/x", "1/2026-03", "https://example.org/2020-12/schema",
     "up to 2000 lines", "up to 2048 tokens", "/usr/bin/env", "and/or", "at most 300000 ms", "a defaced facade", "3.5",
     "line 10:20:", "a branch", "branches and users"],
)  # fmt: skip
def test_other_texts_have_no_places(text: str) -> None:
    assert places(f"{PROSE}{text} {PROSE}") == []


def test_a_value_counts_once() -> None:
    text = "".join(f"{PROSE}/Users/ann/shop is the folder. " for _ in range(5))
    assert len(places(text)) == 1


@pytest.fixture(scope="module")
def processors(qwen_folder: Path) -> dict[bool, RequestProcessor]:
    tokenizer = Tokenizer.load(qwen_folder, chat_template=(TEMPLATES / "qwen3.jinja").read_text())
    return {anywhere: make_processor(tokenizer, resumes_anywhere=anywhere) for anywhere in (True, False)}


def starts(processor: RequestProcessor, *messages: Message) -> list[str]:
    """The texts before the snapshot points."""
    prompt = processor.prepare(Request(request_id="r", messages=messages)).prompt
    return [processor.tokenizer.decode(prompt.token_ids[:point]) for point in prompt.snapshot_points]


def test_only_a_model_that_needs_points_gets_them(processors: dict[bool, RequestProcessor]) -> None:
    messages = (system(f"{PROSE}\nFolder: /Users/ann/shop\n{PROSE}"), user("Hello."))
    none, found = (starts(processors[anywhere], *messages) for anywhere in (True, False))
    assert none == []
    assert [text.endswith(PROSE.strip()) for text in found].count(True) == 1


def test_points_are_few_and_stay_while_the_conversation_grows(processors: dict[bool, RequestProcessor]) -> None:
    facts = "\n".join(f"{PROSE}\nFolder: /Users/ann/{number}" for number in range(8))
    messages = [system(facts), user("Hello.")]
    processor = processors[False]
    first = starts(processor, *messages)
    assert len(first) - len(starts(processor, system(PROSE), user("Hello."))) == 4
    messages += [Message("assistant", (TextPart(f"{PROSE} /Users/ben/x {PROSE} 2026-03-01"),)), user("And?")]
    later = starts(processor, *messages)
    assert set(first[:4]) <= set(later) and not any("/Users/ben" in text for text in set(later[:-3]) - set(first))


def test_a_question_behind_what_the_client_adds_begins_at_a_point(processors: dict[bool, RequestProcessor]) -> None:
    added = TextPart(PROSE)
    for messages in (
        (system("Be kind."), Message("user", (added, TextPart("What is this?")))),
        (system("Be kind."), Message("user", (added,)), user("What is this?")),
    ):
        after = [text for text in starts(processors[False], *messages) if PROSE.strip() in text]
        assert [text.endswith((PROSE.strip(), "user")) for text in after].count(True) == 1
